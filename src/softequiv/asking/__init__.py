"""How is any model asked, on data in any form, and how far apart are two of its answers?"""

from softequiv.asking.answers import asked, at_home, check_finite, default_target, evaluating, tensor_of
from softequiv.asking.data import Batch, batches, inputs_of
from softequiv.asking.divergence import kl_divergence, total_variation

__all__ = [
    "Batch",
    "asked",
    "at_home",
    "batches",
    "check_finite",
    "default_target",
    "evaluating",
    "inputs_of",
    "kl_divergence",
    "tensor_of",
    "total_variation",
]
