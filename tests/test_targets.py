"""Is an error that was asked of one weight, or of the whole network, the error that they have?"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import softequiv as se
from digits import digits, trained, unseen
from softequiv.actions import Moves, Pictures
from softequiv.errors import GainError, SoftEquivError

WITHIN = se.degrees(30)
ERRORS = {"0": 0.05, "2.*": 0.2}


def net() -> nn.Sequential:
    """Three kernels, and a head without any."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(),
        nn.Conv2d(8, 8, 5, padding=2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10),
    )  # fmt: skip


# errors per weight


@pytest.mark.parametrize("mode", ["parametrize", "project"])
def test_every_weight_has_the_error_that_was_asked_of_it(mode: Any) -> None:
    plain, soft = net(), se.soften(net(), "SO(2)", error=ERRORS, within=WITHIN, mode=mode)
    certificate = se.certify(soft)
    assert {w.name: (w.asked, round(w.error, 4)) for w in certificate.weights} == {
        "0.weight": (0.05, 0.05),
        "2.weight": (0.2, 0.2),
    }
    assert torch.equal(soft[4].weight, plain[4].weight) and "4.weight" in certificate.uncertified
    for number, eta in ((0, 0.05), (2, 0.2)):  # as if it had been asked of this weight alone
        alone = se.soften(net(), "SO(2)", error=eta, within=WITHIN, only=[f"{number}.weight"])
        assert torch.equal(soft[number].weight, alone[number].weight)


def test_the_first_match_counts_and_what_is_not_named_is_told() -> None:
    planned = se.plan(net(), "SO(2)", error={"2.weight": 0.3, "*.weight": 0.1}, within=WITHIN)
    assert [weight.soft.gain.error for weight in planned.weights] == [0.1, 0.3, 0.1]  # type: ignore[union-attr]
    text = str(se.plan(net(), "SO(2)", error=ERRORS, within=WITHIN))
    assert "error <= 0.05 within 30deg" in text and "no error given for it (4.weight)" in text


def test_a_module_names_its_weights_for_softness_too() -> None:
    soft = se.soften(net(), "C4", softness={"0": 0.0})
    assert [weight.name for weight in se.soft_weights(soft)] == ["0.weight"]
    weight = soft[0].weight.detach()
    torch.testing.assert_close(weight, weight.rot90(1, (-2, -1)))


def test_errors_of_their_own_survive_saving_loading_and_baking(tmp_path: Path) -> None:
    soft = se.soften(net(), "SO(2)", error=ERRORS, within=WITHIN)
    certificate = se.certify(soft)
    se.save(soft, tmp_path)
    again = se.load(net(), tmp_path)
    assert [w.soft.gain for w in se.soft_weights(again)] == [w.soft.gain for w in se.soft_weights(soft)]
    assert certificate.verify(again) and torch.equal(again[2].weight, soft[2].weight)
    assert certificate.verify(se.bake(again, copy=True))
    other = se.soften(net(), "SO(2)", error={**ERRORS, "0": 0.06}, within=WITHIN)
    assert certificate.verify(se.load(other, tmp_path))  # its gains are those of the file from now on


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        ({"error": {"0.wieght": 0.1}}, r"'0.wieght' names no weight .* close to it: 0.weight"),
        ({"error": {"7.weight": 0.1}}, r"'7.weight' cannot be softened: acts on channels"),
        ({"error": {}}, "an empty mapping names no weight"),
        ({"error": {"0": -0.1}}, "-0.1"),
        ({"error": {"0": 0.1}, "within": None}, "needs within"),
        ({"error": 0.1, "scope": "net"}, "unknown scope 'net'"),
        ({"error": 0.1, "data": torch.zeros(2, 1, 8, 8)}, "belongs to scope='network'"),
        ({"error": 0.1, "scope": "network"}, "needs data"),
        ({"error": {"0": 0.1}, "scope": "network", "data": torch.zeros(2, 1, 8, 8)}, "one number"),
        ({"softness": 0.1, "within": None, "scope": "network", "data": torch.zeros(2, 1, 8, 8)}, "give error"),
        ({"error": 0.0, "scope": "network", "data": torch.randn(2, 1, 8, 8)}, "above 0"),
        ({"error": 0.1, "scope": "network", "data": "pictures"}, "cannot read data"),
        ({"error": 0.1, "scope": "network", "data": torch.rand(0, 1, 8, 8)}, "samples of one shape; data has none"),
        (
            {"error": 0.1, "scope": "network", "data": [torch.rand(2, 1, 8, 8), torch.rand(2, 1, 9, 9)]},
            r"samples of one shape; data has \[\(1, 8, 8\), \(1, 9, 9\)\]",
        ),
        ({"error": 0.1, "scope": "network", "data": torch.rand(5, 1, 8, 8), "skip": ["*"]}, "leave none of 3 weights"),
        ({"error": {"0": 0.1}, "only": ["2"]}, "leave none of 3 weights to soften"),
        ({"error": {"*.weight": 0.3, "0": 0.1}}, "of '0' would count for no weight.*put it before them"),
        ({"error": {0: 0.1}}, "named by text"),
    ],
)
def test_wrong_targets_are_refused_and_change_nothing(asked: dict[str, Any], sentence: str) -> None:
    model, plain = net(), net()
    with pytest.raises(SoftEquivError, match=sentence):
        se.soften(model, "SO(2)", **{"within": WITHIN, **asked})
    assert next(se.soft_weights(model), None) is None
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


# an error of the network


@pytest.fixture(scope="module")
def reader() -> nn.Module:
    return trained(net(), digits(), 6, 1e-2)


@torch.no_grad()
def measured(model: nn.Module, x: Tensor, group: se.Group, within: float) -> float:
    """mean KL[F(x) || F(g x)] over all elements but the identity, of infinite groups over 100, from the formula."""
    moving = [g for g in Moves(Pictures(), group, within, count=100, seed=1).elements if g.length > 0]
    p = model(x).double().log_softmax(1)
    turned = [model(Pictures()(x, g)).double().log_softmax(1) for g in moving]
    return sum(float((p.exp() * (p - q)).sum(1).mean()) for q in turned) / len(turned)


@pytest.mark.parametrize("group", [se.C(4), se.SO(2)], ids=str)
@pytest.mark.parametrize("part", [0.5, 0.1])
def test_the_softened_network_has_the_error_that_was_asked(reader: nn.Module, group: se.Group, part: float) -> None:
    x, reach = digits()[0][:200], se.degrees(90)
    before = measured(reader, x, group, reach)
    target = part * before
    planned = se.plan(reader, group, error=target, within=reach, scope="network", data=x)
    soft = se.soften(copy.deepcopy(reader), group, error=target, within=reach, scope="network", data=x)
    after = measured(soft, x, group, reach)
    if group == se.C(4):
        assert 0.9 * target < after <= 1.001 * target
        assert f"network: mean KL {before:.3g} before, {after:.3g} after, on 200 samples" in planned.note
    else:  # other elements are drawn than were measured
        assert 0.8 * target < after < 1.2 * target and "after, on 200 samples" in planned.note
    assert [w.soft.gain for w in se.soft_weights(soft)] == [w.soft.gain for w in planned.weights]
    assert len({weight.soft.gain for weight in se.soft_weights(soft)}) == 3  # each its own
    assert all(weight.met for weight in se.certify(soft).weights)


def test_the_target_carries_over_to_samples_that_were_not_measured(reader: nn.Module) -> None:
    x, group, reach = unseen(digits())[0], se.C(4), se.degrees(90)
    target = 0.1 * measured(reader, x[:300], group, reach)
    soft = se.soften(copy.deepcopy(reader), group, error=target, within=reach, scope="network", data=x[:300])
    assert measured(soft, x[300:], group, reach) < 1.5 * target


class Tied(nn.Module):
    """Two kernels in one tensor, under a head that sees places."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Conv2d(1, 1, 3, padding=1), nn.Conv2d(1, 1, 3, padding=1)
        self.second.weight = self.first.weight
        self.head = nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.second(x + torch.relu(self.first(x))))
        answers: Tensor = 5 * self.head(torch.cat([x.mean((2, 3)), x.amax((2, 3))], 1))
        return answers


@pytest.mark.parametrize("only", [["first"], ["second"], None])
def test_a_weight_that_is_shared_is_measured_as_it_will_be_softened(only: Any) -> None:
    model, x, group, reach = Tied(), torch.randn(200, 1, 8, 8), se.C(4), se.degrees(90)
    alone = se.soften(copy.deepcopy(model), group, softness=0, only=only)
    before, least = measured(model, x, group, reach), measured(alone, x, group, reach)
    target = (before + least) / 2
    se.soften(model, group, error=target, within=reach, scope="network", data=x, only=only)
    assert 0.9 * target < measured(model, x, group, reach) <= 1.001 * target


def test_the_form_of_the_data_does_not_matter(reader: nn.Module) -> None:
    x, y = (part[:60] for part in digits())
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), 13)
    found = [
        se.plan(reader, "C4", error=0.01, within=se.degrees(90), scope="network", data=data).weights
        for data in (x, (x, y), loader)
    ]
    assert found[0] == found[1] == found[2]


def test_a_target_above_the_error_of_the_network_leaves_it_as_it_is(reader: nn.Module) -> None:
    x, before = digits()[0][:50], reader(digits()[0][:50])
    soft = se.soften(copy.deepcopy(reader), "C4", error=50.0, within=se.degrees(90), scope="network", data=x)
    torch.testing.assert_close(soft(x), before, rtol=1e-4, atol=1e-4)


def test_answers_that_are_no_class_scores_are_refused() -> None:
    maps = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 3, 3, padding=1))
    with pytest.raises(SoftEquivError, match=r"class scores \(N, K\); this model answers with \(5, 3, 8, 8\)"):
        se.soften(maps, "C4", error=0.1, within=se.degrees(90), scope="network", data=torch.rand(5, 1, 8, 8))


def test_too_many_ways_at_once_are_refused() -> None:
    with pytest.raises(GainError, match="exactly one way"):
        se.plan(net(), "C4", error=0.1, softness=0.1, within=WITHIN, scope="network", data=torch.rand(5, 1, 8, 8))


def test_a_softness_in_place_of_a_target_is_told():
    net = se.soften(nn.Sequential(nn.Conv2d(3, 8, 5), nn.Conv2d(8, 8, 3)), "SO(2)", error=0.1, within="30deg")
    with pytest.warns(UserWarning, match="0.weight and 1 other weights had an error target"):
        se.set_softness(net, 0.5)


@pytest.mark.parametrize("mode", ["parametrize", "project"])
def test_a_target_that_falls_over_training_is_kept_at_every_value(mode: Any) -> None:
    rep = se.grid(se.SO(2), 5, 5)
    soft = se.soften(
        nn.Sequential(nn.Conv2d(3, 8, 5), nn.Conv2d(8, 8, 5)), "SO(2)", error=0.5, within=WITHIN, mode=mode
    )
    other = soft[1].weight.clone()
    for error in (0.3, 0.1, 0.02):
        se.set_error(soft, error, "30deg", only=["0*"])
        assert se.spectrum(rep).error(soft[0].weight, se.degrees(30)) == pytest.approx(error, rel=1e-3)
    assert torch.equal(soft[1].weight, other)
    with pytest.raises(GainError, match="no soft weights"):
        se.set_error(nn.Conv2d(3, 8, 5), 0.1, WITHIN)
    with pytest.raises(SoftEquivError, match=r"close to it: 0\.weight"):
        se.set_error(soft, 0.1, WITHIN, only=["0.wieght"])
