"""How does it act? Representations: scalars, vectors, tensors, sums, duals, regular ones, grids, and a user's
matrices.
"""

from softequiv.reps.base import (
    Decomposition,
    Dual,
    Hom,
    Piece,
    Rep,
    Sum,
    TensorProduct,
    Trivial,
    direct_sum,
    product_rates,
    scalar,
    tensor_product,
    terms_of,
)
from softequiv.reps.grids import LARGEST_SQUARE, Action, Cube, Line, Square, grid
from softequiv.reps.irreps import frequency, spin
from softequiv.reps.lifts import lift, outer
from softequiv.reps.matrices import Matrices, check_representation, representation
from softequiv.reps.regular import regular
from softequiv.reps.tensors import determinant, tensor, vector

__all__ = [
    "LARGEST_SQUARE",
    "Action",
    "Cube",
    "Decomposition",
    "Dual",
    "Hom",
    "Line",
    "Matrices",
    "Piece",
    "Rep",
    "Square",
    "Sum",
    "TensorProduct",
    "Trivial",
    "check_representation",
    "determinant",
    "direct_sum",
    "frequency",
    "grid",
    "lift",
    "outer",
    "product_rates",
    "regular",
    "representation",
    "scalar",
    "spin",
    "tensor",
    "tensor_product",
    "terms_of",
    "vector",
]
