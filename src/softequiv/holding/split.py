"""Which errors of its weights does a target of the whole network ask for, under moves of your own? With pictures turned
as `soften(..., scope="network")` does it, that call says all in one line.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor, nn

from softequiv.actions import Moves
from softequiv.adapt.plan import plan
from softequiv.adapt.split import split
from softequiv.errors import GainError
from softequiv.groups.angles import range_of
from softequiv.reps import Action


def split_target(
    model: nn.Module,
    target: float,
    x: Tensor,
    moves: Moves,
    within: float | str,
    *,
    only: Iterable[str] | None = None,
    skip: Iterable[str] = (),
    grids: Mapping[str, tuple[int, ...]] | None = None,
    action: Action = "exact",
) -> dict[str, float]:
    """Errors {weight: eta} for which a plain classifier, softened by them, has mean KL[F(x) || F(g x)] at `target`.

    The samples x (N, ...) are moved by `moves` in turn; how the target is shared out says `softequiv.adapt.split`. It
    holds before training; what training does to it is another matter (`HeldByMeasurement`).

    >>> import torch, softequiv as se
    >>> from softequiv.actions import Pictures
    >>> net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 3, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    >>> x, moves = 20 * torch.randn(64, 1, 8, 8), Moves(Pictures(), se.C(4))
    >>> errors = split_target(net, 1e-3, x, moves, se.degrees(90))
    >>> net = se.soften(net, "C4", error=errors, within=se.degrees(90))
    >>> list(errors), all(error > 0 for error in errors.values())
    (['0.weight', '2.weight'], True)
    """
    reach = range_of(within)
    if reach is None:
        raise GainError("errors need within=..., the range they hold for, such as degrees(30)")
    todo = plan(model, moves.group, error=1.0, within=reach, only=only, skip=skip, grids=grids, action=action)
    return dict(split(model, [weight.found for weight in todo.weights], target, x, moves, reach).errors)
