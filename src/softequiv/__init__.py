"""softequiv: as equivariant as you ask, with a guarantee."""

from softequiv.groups import *
from softequiv.reps import *
from softequiv.spectrum import *
