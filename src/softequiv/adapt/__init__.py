"""Which weights of this model? Plan, soften, bake, save and load, for models found by structure and type."""

from softequiv.adapt.bake import bake
from softequiv.adapt.checkpoint import load, load_tensors, recipe, save, stored_tensors
from softequiv.adapt.opening import open_model, save_model
from softequiv.adapt.plan import Plan, plan
from softequiv.adapt.soften import set_error, set_softness, soften

__all__ = [
    "Plan",
    "bake",
    "load",
    "load_tensors",
    "open_model",
    "plan",
    "recipe",
    "save",
    "save_model",
    "set_error",
    "set_softness",
    "soften",
    "stored_tensors",
]
