"""A ViT of typed tokens: exact at softness 0, free at softness 1, plain without a group."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import softequiv as se
from softequiv.errors import SoftEquivError
from softequiv.groups import Group
from softequiv.networks import VisionTransformer
from softequiv.nn import SoftLinear, soft_weights

GROUPS = [se.C(4), se.D(4), se.SO(2), se.O(2)]


def vit(group: Group | None = None, softness: float | None = None, **sizes: int) -> VisionTransformer:
    torch.manual_seed(0)
    gain = None if softness is None else se.softness(softness)
    sizes = {"size": 12, "patch": 3, "classes": 5, "channels": 2, "width": 20, "layers": 2, "heads": 2} | sizes
    return VisionTransformer(group=group, gain=gain, **sizes)


def pictures() -> torch.Tensor:
    return torch.randn(6, 2, 12, 12, generator=torch.Generator().manual_seed(1))


def trained(model: nn.Module) -> nn.Module:
    """A few steps away from the start, which is equivariant at any softness."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(3):
        nn.functional.cross_entropy(model(pictures()), torch.arange(6) % 5).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


def change(model: nn.Module, moved: torch.Tensor) -> float:
    """How far answers to moved pictures lie from those to upright ones, relative to the latter."""
    with torch.no_grad():
        before, after = model(pictures()), model(moved)
    return float((after - before).norm() / before.norm())


@pytest.mark.parametrize("group", GROUPS, ids=str)
def test_softness_0_stays_invariant_under_quarter_turns_in_training(group: Group) -> None:
    model = trained(vit(group, 0))
    for turns in (1, 2, 3):
        assert change(model, pictures().rot90(turns, (-2, -1))) < 1e-5
    if group.name.startswith(("D", "O")):
        assert change(model, pictures().flip(-1)) < 1e-5
    assert change(se.bake(model), pictures().rot90(1, (-2, -1))) < 1e-5


@pytest.mark.parametrize("softness", [0.1, 1.0])
def test_any_other_softness_lets_training_leave_the_symmetry(softness: float) -> None:
    assert change(trained(vit(se.C(4), softness)), pictures().rot90(1, (-2, -1))) > 1e-3


def test_a_strict_network_tells_where_things_are() -> None:
    """Invariant under turns does not mean blind to places: a table of positions is there, and other moves are seen."""
    assert change(trained(vit(se.C(4), 0)), pictures().roll(3, -1)) > 1e-3


def test_maps_are_plain_without_a_group_and_free_at_softness_1() -> None:
    plain, free = vit(), vit(se.C(4), 1)
    assert not list(soft_weights(plain)) and not any(isinstance(part, SoftLinear) for part in plain.modules())
    assert all(torch.equal(w.filtered(w.stored), w.stored) for w in soft_weights(free))


def test_the_dial_turns_and_the_recipe_is_saved(tmp_path) -> None:
    model = trained(vit(se.C(4), 1))
    se.save(model, tmp_path / "soft.safetensors")
    again = se.load(vit(se.C(4), 1), tmp_path / "soft.safetensors")
    torch.testing.assert_close(again(pictures()), model(pictures()))
    se.set_softness(model, 0)
    assert change(model, pictures().rot90(1, (-2, -1))) < 1e-5


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"patch": 5}, "patches of 5 pixels do not cover 12"),
        ({"width": 24, "group": se.C(4)}, "choose a multiple of 10"),
        ({"gain": se.softness(0.5)}, r"name it, such as group=C\(4\)"),
        ({"layers": 0}, "layers is a whole number of at least 1; got 0"),
        ({"heads": 0}, "heads is a whole number of at least 1; got 0"),
        ({"width": 0}, "width is a whole number of at least 1; got 0"),
        ({"group": se.SO(3), "width": 20}, "SO\\(3\\)"),
    ],
    ids=str,
)
def test_bad_input_is_answered_with_a_sentence(wrong, told) -> None:
    sizes = {"size": 12, "patch": 3, "classes": 5, "width": 20, "layers": 1, "heads": 2}
    with pytest.raises(SoftEquivError, match=told):
        VisionTransformer(**{**sizes, **wrong})
