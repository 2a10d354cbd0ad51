"""What acts? Groups by their generators: elements, random elements, path lengths, names."""

from softequiv.groups.angles import Angle, degrees, parse_range, radians
from softequiv.groups.base import Element, Flow, Group, Step, Word, evaluate, matrix_key
from softequiv.groups.custom import MatrixGroup, group_from
from softequiv.groups.parse import parse_group
from softequiv.groups.permutations import S, Shifts
from softequiv.groups.plane import C, D, Reflection
from softequiv.groups.products import DirectProduct
from softequiv.groups.rotations import SO, O
from softequiv.groups.scaling import Scaling
from softequiv.groups.spacetime import Lorentz
from softequiv.groups.spin import SU2

__all__ = [
    "SO",
    "SU2",
    "Angle",
    "C",
    "D",
    "DirectProduct",
    "Element",
    "Flow",
    "Group",
    "Lorentz",
    "MatrixGroup",
    "O",
    "Reflection",
    "S",
    "Scaling",
    "Shifts",
    "Step",
    "Word",
    "degrees",
    "evaluate",
    "group_from",
    "matrix_key",
    "parse_group",
    "parse_range",
    "radians",
]
