"""What is guaranteed of this model? Of its weights as they stand; or, with held-out data, of its answers on average."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, overload

from torch import Tensor, nn

from softequiv.actions import Acts
from softequiv.certify.certificate import Certificate, certify_weights
from softequiv.certify.statistical import StatisticalCertificate, certify_data
from softequiv.errors import SoftEquivError
from softequiv.groups import Group
from softequiv.reps import Action

OF_WEIGHTS = ("grids", "action", "images")
OF_DATA = ("confidence", "acts", "target", "clip", "seed", "batch_size")


@overload
def certify(
    model: nn.Module,
    within: float | str | None = None,
    group: Group | str | None = None,
    *,
    grids: Mapping[str, tuple[int, ...]] | None = None,
    action: Action = "exact",
    images: Tensor | None = None,
) -> Certificate: ...


@overload
def certify(
    model: nn.Module,
    within: float | str | None = None,
    group: Group | str | None = None,
    *,
    data: Any,
    confidence: float = 0.99,
    acts: Acts = ...,
    target: Acts | None = None,
    clip: float | None = None,
    seed: int = 0,
    batch_size: int = 64,
) -> StatisticalCertificate: ...


def certify(
    model: nn.Module,
    within: float | str | None = None,
    group: Group | str | None = None,
    *,
    data: Any = None,
    **settings: Any,
) -> Certificate | StatisticalCertificate:
    """What holds for a model under every group element of path length up to `within`, or, with `data`, on average.

    Without data: a certificate for every weight that lives on a representation. With W_g = rho_Y(g)^-1 W rho_X(g),

        ||W_g - W|| <= error ||W||   for every g of the range.

    `grids` and `action` are as in `soften`; with `images` (n, c, H, W) the modelled action on pixels is compared with a
    true rotation of them. It says nothing of what later layers make of the change.

    With data: a certificate for the answers of any model, whatever is inside it. With the given confidence,

        E f(F(g x), g F(x)) <= bound   for a sample x like those of `data` and g drawn from the range,

    where f is the flip rate, the total variation and the KL in nats for class scores (N, K); for scores per pixel
    (N, K, h, w) the same, averaged over the pixels of a picture that stay inside the frame; else a distance. It says
    nothing of a single input or element. `data` is a tensor (N, ...), a pair with labels, which are not used, or a
    loader, of samples that neither trained nor chose the model. `acts` and `target` say how the group moves inputs and
    answers, as in `measure`. What has no largest value is clipped at `clip`: KL at 10 nats unless you say otherwise;
    distances need it, in their own unit. All bounds hold together (Bonferroni).

    A soft model is certified for its own group and, by default, for the range of its error target; any other needs
    `group`, and its range is by default the whole of a compact group.

    >>> import torch, softequiv as se
    >>> net = nn.Sequential(nn.Conv2d(1, 3, 5), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    >>> net = se.soften(net, "SO(2)", error=0.1, within=se.degrees(30))
    >>> round(se.certify(net)["0.weight"].error, 4)
    0.1
    >>> se.certify(net, data=torch.randn(200, 1, 9, 9), confidence=0.99)["total variation"].bound < 0.2
    True
    """
    unknown = [name for name in settings if name not in (*OF_WEIGHTS, *OF_DATA)]
    if unknown:
        raise SoftEquivError(f"certify has no setting {unknown[0]}; there are {', '.join((*OF_WEIGHTS, *OF_DATA))}")
    strangers = [name for name in settings if name in (OF_DATA if data is None else OF_WEIGHTS)]
    if strangers:
        raise SoftEquivError(
            f"{strangers[0]}=... belongs to a certificate "
            + ("over data: give data=... too" if data is None else "of weights: leave data=... out, and certify twice")
        )
    if data is None:
        return certify_weights(model, within, group, **settings)
    return certify_data(model, data, group, within, **settings)
