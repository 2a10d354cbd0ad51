"""The mean over an orbit is invariant, whatever the model; a mixture with the model itself moves by its share alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import softequiv as se
from softequiv.actions import Pictures, Vectors
from softequiv.errors import GroupError, RepresentationError, SoftEquivError
from softequiv.holding import Mixture, OrbitMean, total_variation


def reader(side: int) -> nn.Module:
    """A network that tells directions apart, with norms that training and evaluation treat differently."""
    torch.manual_seed(0)
    layers = nn.Conv2d(2, 6, 3, padding=1), nn.BatchNorm2d(6), nn.GELU(), nn.Flatten(), nn.Linear(6 * side * side, 4)
    return nn.Sequential(*layers).double().eval()


@pytest.mark.parametrize("group", [se.C(4), se.D(4), se.C(2)], ids=str)
@pytest.mark.parametrize("side", [5, 6])
def test_the_mean_is_invariant_and_is_the_mean(group: se.groups.Group, side: int) -> None:
    acts, net, x = Pictures(), reader(side), 3 * torch.randn(7, 2, side, side, dtype=torch.float64)
    mean = OrbitMean(net, group, acts).eval()
    answers = mean(x)
    probabilities = torch.stack([net(acts(x, h)).softmax(1) for h in group.elements()]).mean(0)
    torch.testing.assert_close(answers.exp(), probabilities, atol=1e-12, rtol=0)
    for h in group.elements():
        torch.testing.assert_close(mean(acts(x, h)), answers, atol=1e-10, rtol=0)
    assert total_variation(net(x), net(x.rot90(2, (-2, -1)))).mean() > 0.1  # which the network itself is not


@pytest.mark.parametrize("eps", [0.0, 0.05, 0.3, 1.0])
def test_a_mixture_with_the_model_itself_moves_by_its_share_of_what_the_model_moves(eps: float) -> None:
    net, x = reader(5), 3 * torch.randn(1000, 2, 5, 5, dtype=torch.float64)
    turned = x.rot90(1, (-2, -1))
    mixture = Mixture(OrbitMean(net, se.C(4), Pictures()), net, eps).eval()
    free = total_variation(net(x), net(turned))
    torch.testing.assert_close(total_variation(mixture(x), mixture(turned)), eps * free, atol=1e-10, rtol=1e-9)


@pytest.mark.parametrize("group", ["C2", "C4", "D4", "Reflection", "D1", "Shifts(5,5)"])
def test_the_bound_holds_for_groups_that_move_pixels_to_pixels(group: str) -> None:
    net, x = reader(5), 3 * torch.randn(50, 2, 5, 5, dtype=torch.float64)
    dial = Mixture.over_orbit(net, group, 0.1).eval()
    moves = dial.strict.moves
    found = [total_variation(dial(x), dial(moves.acts(x, h))).max() for h in moves.elements]
    assert dial.bound() == 0.1 and max(found) <= 0.1 + 1e-9


@pytest.mark.parametrize("group", ["C3", "C8", "D3", "D8"])
def test_no_bound_is_given_for_groups_that_resample(group: str) -> None:
    """Their mean is not invariant, and can be used for what it is."""
    net, x = reader(8), 3 * torch.randn(50, 2, 8, 8, dtype=torch.float64)
    dial = Mixture.over_orbit(net, group, 0.0).eval()
    moves = dial.strict.moves
    assert max(total_variation(dial(x), dial(moves.acts(x, h))).max() for h in moves.elements) > 0.02
    with pytest.raises(
        SoftEquivError, match=rf"turned by {moves.group} .* take C4 or D4, or say with bound\(tv_strict\)"
    ):
        dial.bound()
    assert dial.bound(0.2) == 0.2


@torch.no_grad()
def test_no_bound_is_given_for_vectors_that_are_no_representation_exactly() -> None:
    torch.manual_seed(0)
    rep = se.grid(se.C(8), 5, 5, action="bilinear")
    net, x = nn.Sequential(nn.Flatten(), nn.Linear(25, 3)).double(), 3 * torch.randn(200, 5, 5, dtype=torch.float64)
    dial = Mixture.over_orbit(net, "C8", 0.05, acts=Vectors(rep)).eval()
    moved = (Vectors(rep)(x, g) for g in se.C(8).elements())
    assert max(float(total_variation(dial(x), dial(y)).max()) for y in moved) > 0.1
    assert not dial.strict.exact
    with pytest.raises(SoftEquivError, match="eps bounds nothing"):
        dial.bound()
    assert Mixture.over_orbit(net, "C4", 0.05, acts=Vectors(se.grid(se.C(4), 5, 5))).bound() == 0.05


@pytest.mark.parametrize(("training", "passes"), [(False, 4), (True, 2)])
def test_a_dial_costs_what_it_says(training: bool, passes: int) -> None:
    """The model's own answer is one of the orbit's, and is not asked for twice."""
    net, x, calls = reader(5), torch.randn(7, 2, 5, 5, dtype=torch.float64), []
    net.register_forward_pre_hook(lambda *_: calls.append(1))
    dial = Mixture.over_orbit(net, "C4", 0.3).train(training)
    dial(x)
    assert len(calls) == passes
    apart = Mixture(OrbitMean(net, "C4", Pictures()), nn.Sequential(net), 0.3)
    torch.testing.assert_close(dial.eval()(x), apart.eval()(x), atol=1e-12, rtol=0)


def test_training_costs_one_pass_and_moves_each_sample_by_its_own_element() -> None:
    seen: list[torch.Tensor] = []
    net = nn.Sequential(nn.Flatten(), nn.Linear(16, 3))
    net.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    x = torch.arange(16.0).reshape(1, 1, 4, 4).expand(64, 1, 4, 4)
    mean = OrbitMean(net, se.C(4), Pictures()).train()
    mean(x).sum().backward()
    assert len(seen) == 1 and len({tuple(sample.flatten().tolist()) for sample in seen[0]}) == 4
    seen.clear()
    mean.eval()(x)
    assert len(seen) == 4


def test_an_infinite_group_is_refused() -> None:
    with pytest.raises(GroupError, match=r"needs a finite group; SO\(2\) is not"):
        OrbitMean(nn.Identity(), se.SO(2), Pictures())


def test_a_group_may_be_named_and_answers_that_have_places_are_refused() -> None:
    x = torch.randn(2, 1, 4, 4)
    assert OrbitMean(nn.Sequential(nn.Flatten(), nn.Linear(16, 3)), "C4", Pictures()).eval()(x).shape == (2, 3)
    maps = OrbitMean(nn.Conv2d(1, 3, 1), "C4", Pictures())
    for mode in (True, False):
        with pytest.raises(SoftEquivError, match=r"answers with \(2, 3, 4, 4\)"):
            maps.train(mode)(x)


@pytest.mark.parametrize("group", ["C4", "D4", "C8", "Shifts(5,5)"])
def test_a_dial_compiles_into_one_graph_and_is_exported(group: str) -> None:
    x = torch.randn(3, 2, 5, 5, dtype=torch.float64)
    dial = Mixture.over_orbit(reader(5), group, 0.3).eval()
    torch._dynamo.reset()
    compiled = torch.compile(dial, fullgraph=True, backend="aot_eager")
    exported = torch.export.export(dial, (x,)).module()
    for found in (compiled(x), exported(x)):
        torch.testing.assert_close(found, dial(x))


def test_a_group_that_does_not_move_pictures_is_refused_where_the_mean_is_made() -> None:
    with pytest.raises(RepresentationError, match="S3 does not act on pictures"):
        Mixture.over_orbit(reader(5), se.S(3), 0.3)
