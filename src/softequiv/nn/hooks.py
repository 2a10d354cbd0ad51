"""Which hooks go with filters? They can be taken off, and a baked model has none of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn
from torch.utils.hooks import RemovableHandle


@dataclass(frozen=True)
class Hooks:
    """Hooks on a model or an optimiser."""

    hooks: tuple[RemovableHandle, ...]

    def remove(self) -> None:
        """Take them off."""
        for hook in self.hooks:
            hook.remove()


class GoesWithFilters:
    """A hook of a module that means nothing once the filters are gone."""


def without_hooks(module: nn.Module, chosen: Callable[[object], bool]) -> None:
    """Take off those hooks of a module's forward pass that are chosen.

    >>> layer = nn.Identity()
    >>> _ = layer.register_forward_hook(print)
    >>> without_hooks(layer, lambda hook: hook is print)
    >>> layer._forward_hooks
    OrderedDict()
    """
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        for number, hook in list(hooks.items()):
            if chosen(hook):
                del hooks[number]
                module._forward_hooks_always_called.pop(number, None)
