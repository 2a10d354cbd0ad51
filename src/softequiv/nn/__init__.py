"""A filtered weight inside a torch module: one parametrisation, soft layers, equivariant nonlinearities."""

from softequiv.nn.bilinear import Bilinear
from softequiv.nn.constraints import hold, project
from softequiv.nn.layers import (
    SoftConv1d,
    SoftConv2d,
    SoftConv3d,
    SoftConvTranspose1d,
    SoftConvTranspose2d,
    SoftConvTranspose3d,
    SoftLinear,
    SoftTable,
)
from softequiv.nn.nonlinear import CopyBatchNorm, CopyNorm, Gated, Lengths, NormReLU, VectorReLU, gated
from softequiv.nn.soft import Layout, Soft
from softequiv.nn.together import filtered_together
from softequiv.nn.weight import (
    FilteredWeight,
    Mode,
    SoftWeight,
    is_constraint,
    set_gain,
    soft_weights,
    soften_weight,
    softenable,
)

__all__ = [
    "Bilinear",
    "CopyBatchNorm",
    "CopyNorm",
    "FilteredWeight",
    "Gated",
    "Layout",
    "Lengths",
    "Mode",
    "NormReLU",
    "Soft",
    "SoftConv1d",
    "SoftConv2d",
    "SoftConv3d",
    "SoftConvTranspose1d",
    "SoftConvTranspose2d",
    "SoftConvTranspose3d",
    "SoftLinear",
    "SoftTable",
    "SoftWeight",
    "VectorReLU",
    "filtered_together",
    "gated",
    "hold",
    "is_constraint",
    "project",
    "set_gain",
    "soft_weights",
    "soften_weight",
    "softenable",
]
