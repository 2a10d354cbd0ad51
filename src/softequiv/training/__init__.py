"""How is a model trained? One loop for every task, from one core to many GPUs, that a kill does not harm."""

from softequiv.training.loop import Fitted, fit
from softequiv.training.recipe import Recipe

__all__ = ["Fitted", "Recipe", "fit"]
