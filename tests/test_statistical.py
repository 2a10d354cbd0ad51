"""Statistical certificates: bounds hold as often as they say, are not much wider than need be, and can be repeated."""

import json
import math

import pytest
import torch
from torch import nn

import softequiv as se
from softequiv.actions import Pictures, Points, Still
from softequiv.asking.proportion import mean_upper, proportion_upper
from softequiv.certify.statistical import StatisticalCertificate, model_digest
from softequiv.errors import SoftEquivError

DELTA, DRAWS = 0.05, 600
LUCK = 3.3 * math.sqrt(DELTA * (1 - DELTA) / DRAWS)  # simulation error of a rate of 0.05: exceeded once in 2000 runs


def bernstein(values: torch.Tensor, delta: float) -> float:
    """Maurer & Pontil (2009), theorem 4, from its formula."""
    n, log = len(values), math.log(2 / delta)
    return float(values.mean()) + math.sqrt(2 * float(values.var()) * log / n) + 7 * log / (3 * (n - 1))


def sparse(n: int, generator: torch.Generator) -> torch.Tensor:
    """Mostly nothing, now and then much; expectation 0.02 / 2."""
    return torch.rand(n, generator=generator) * (torch.rand(n, generator=generator) < 0.02)


DISTRIBUTIONS = {
    "uniform": (lambda n, g: torch.rand(n, generator=g), 0.5),
    "cubes": (lambda n, g: torch.rand(n, generator=g) ** 3, 0.25),
    "sparse": (sparse, 0.01),
    "coins": (lambda n, g: (torch.rand(n, generator=g) < 0.1).double(), 0.1),
    "rare coins": (lambda n, g: (torch.rand(n, generator=g) < 0.01).double(), 0.01),
}


@pytest.mark.parametrize("delta", [0.2, 0.01, 1e-4])
def test_proportions_are_bounded_by_the_beta_quantile(delta):
    beta = pytest.importorskip("scipy.stats").beta
    for trials in (1, 2, 10, 137, 5000, 100_000):
        for successes in {0, min(1, trials - 1), trials // 50, trials // 2, trials - 1}:
            exact = float(beta.ppf(1 - delta, successes + 1, trials - successes))
            assert proportion_upper(successes, trials, delta) == pytest.approx(exact, rel=1e-8)
        assert proportion_upper(trials, trials, delta) == 1


def test_a_proportion_is_the_root_of_the_binomial_tail():
    p = proportion_upper(3, 40, 0.03)
    assert sum(math.comb(40, k) * p**k * (1 - p) ** (40 - k) for k in range(4)) == pytest.approx(0.03, rel=1e-9)


@pytest.mark.parametrize("rate", [0.003, 0.1, 0.6])
def test_the_bound_on_a_rate_covers_as_often_as_it_says(rate):
    """Exactly: over all outcomes of 200 coins, by their probabilities."""
    missed = sum(
        math.comb(200, k) * rate**k * (1 - rate) ** (200 - k)
        for k in range(201)
        if proportion_upper(k, 200, DELTA) < rate
    )
    assert missed <= DELTA
    assert proportion_upper(round(200 * rate), 200, DELTA) < rate + 4 * math.sqrt(rate / 200) + 4 / 200


@pytest.mark.parametrize("name", DISTRIBUTIONS)
@pytest.mark.parametrize("n", [20, 300])
def test_the_bound_on_a_mean_covers_as_often_as_it_says(name, n):
    draw, expectation = DISTRIBUTIONS[name]
    generator = torch.Generator().manual_seed(0)
    missed = sum(mean_upper(draw(n, generator), DELTA) < expectation for _ in range(DRAWS)) / DRAWS
    assert missed <= DELTA + LUCK


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_the_bound_on_a_mean_is_tighter_than_bernsteins_and_close_to_the_normal_one(name):
    draw, expectation = DISTRIBUTIONS[name]
    generator = torch.Generator().manual_seed(1)
    ours, theirs, least = [], [], []
    for _ in range(20):
        x = draw(2000, generator).double()
        ours.append(mean_upper(x, 0.01) - expectation)
        theirs.append(bernstein(x, 0.01) - expectation)
        least.append(2.326 * float(x.std()) / math.sqrt(2000))  # asymptotically, no bound can be below
    mean = [sum(values) / 20 for values in (ours, theirs, least)]
    assert mean[0] < mean[1]
    assert mean[0] < 2.5 * mean[2]


def test_for_coins_the_bound_on_a_mean_is_close_to_the_exact_one():
    """On average over orders: bets follow the order of the values, the exact bound does not."""
    generator = torch.Generator().manual_seed(2)
    for successes in (0, 5, 100):
        coins = (torch.arange(1000) < successes).double()
        bounds = [mean_upper(coins[torch.randperm(1000, generator=generator)], 0.01) for _ in range(30)]
        exact = proportion_upper(successes, 1000, 0.01)
        assert 1 < sum(bounds) / 30 / exact < 1.3
        assert max(bounds) < 2 * exact


def test_the_bound_on_a_mean_is_the_root_of_the_capital():
    """Against the product written out, value by value."""
    x, delta = torch.rand(50, dtype=torch.float64, generator=torch.Generator().manual_seed(3)).square(), 0.05

    def capital(m: float) -> float:
        now, most, seen, spread = 1.0, 1.0, 0.5, 0.25
        for i, value in enumerate(x.tolist()):
            bet = min(0.9, math.sqrt(2 * math.log(1 / delta) / (50 * spread / (i + 1))))
            now *= 1 + bet * (m - value)
            most, seen = max(most, now), seen + value
            spread += (value - seen / (i + 2)) ** 2
        return most

    assert capital(mean_upper(x, delta)) == pytest.approx(1 / delta, rel=1e-9)


def test_the_order_of_a_few_values_bounds_nothing_better_than_their_range():
    assert mean_upper(torch.ones(100), 0.01) == 1
    assert mean_upper(torch.zeros(1), 0.01) == 1


# the certificate


class Gate(nn.Module):
    """Changes its class under g with a known probability: by whether the first pixel stays the largest of its row."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        score = x[:, 0, 0, 0] - x[:, 0, 0, 1]
        return torch.stack([score, -score], 1)


def classifier() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(147, 4)).eval()


def pictures(n: int = 60) -> torch.Tensor:
    return torch.randn(n, 1, 9, 9, generator=torch.Generator().manual_seed(5))


def test_a_known_flip_rate_is_covered_and_not_overstated():
    """Under flips of i.i.d. pixels: moved with probability 1/2, and the other end's pair decides by chance: 1/4."""
    missed = 0
    for seed in range(60):
        x = torch.randn(150, 1, 2, 4, generator=torch.Generator().manual_seed(seed))
        bound = se.certify(Gate(), group=se.Reflection(), data=x, confidence=0.85, seed=seed)["flip rate"].bound
        missed += bound < 0.25
        assert bound < 0.45
    assert missed / 60 <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / 60)  # each of three bounds has a third of 0.15


def test_the_figures_are_those_of_the_formulas():
    net, x = classifier(), pictures()
    found = se.certify(net, "40deg", "SO(2)", data=x, seed=7, confidence=0.9)
    generator = torch.Generator().manual_seed(7)
    flips, variation, divergence = [], [], []
    with torch.no_grad():
        for sample in x:
            moved = Pictures()(sample, se.SO(2).random(generator, se.degrees(40)))
            p, q = (net(part[None]).double().softmax(1)[0] for part in (sample, moved))
            flips.append(float(p.argmax() != q.argmax()))
            variation.append(float((p - q).clamp(min=0).sum()))
            divergence.append(float((p * (p / q).log()).sum()))
    for name, values in (("flip rate", flips), ("total variation", variation), ("KL", divergence)):
        assert found[name].observed == pytest.approx(sum(values) / 60, abs=1e-5)
    delta, order = 0.1 / 3, torch.randperm(60, generator=generator)
    assert found["flip rate"].bound == pytest.approx(proportion_upper(int(sum(flips)), 60, delta))
    assert found["total variation"].bound == pytest.approx(mean_upper(torch.tensor(variation)[order], delta), abs=1e-5)
    assert found["KL"].bound == pytest.approx(10 * mean_upper(torch.tensor(divergence)[order] / 10, delta), abs=1e-4)


def test_bounds_hold_for_data_that_come_class_by_class():
    """Folders of classes are read so; one class stands still here, and the other one changes its answers."""

    class Corner(nn.Module):
        def forward(self, x):
            score = 100 * (x[:, 0, 0, 0] - x[:, 0, -1, -1]) * (x.amax((1, 2, 3)) > 1)
            return torch.stack([score, -score], 1)

    x = torch.rand(400, 1, 6, 6, generator=torch.Generator().manual_seed(0))
    x[200:, 0, 2, 2] = 2
    sorted_by_class = se.certify(Corner(), group="C4", data=x)
    assert all(figure.observed < figure.bound < 1.5 * figure.observed for figure in sorted_by_class.figures)


def test_an_invariant_network_is_certified_up_to_the_number_of_samples():
    net = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(1, 3)).double()
    found = se.certify(net, group="D4", data=pictures(400))
    assert found["flip rate"].observed == 0
    assert found["flip rate"].bound == pytest.approx(1 - (0.01 / 3) ** (1 / 400), rel=1e-6)
    assert found["total variation"].bound < 1.2 * found["flip rate"].bound


def test_a_segmentation_is_compared_inside_the_frame():
    torch.manual_seed(0)
    net, x = nn.Conv2d(1, 3, 3, padding=1), pictures(20)
    found = se.certify(net, "30deg", "SO(2)", data=x, seed=3)
    generator, share = torch.Generator().manual_seed(3), 0.0
    with torch.no_grad():
        for sample in x:
            g = se.SO(2).random(generator, se.degrees(30))
            said, expected = net(Pictures()(sample, g)[None])[0], Pictures()(net(sample[None])[0], g)
            inside = Pictures().valid(expected, g)
            share += float((said.argmax(0) != expected.argmax(0))[inside].double().mean()) / 20
    assert found["flipped pixels"].observed == pytest.approx(share, abs=1e-6)
    assert {figure.name for figure in found.figures} == {"flipped pixels", "total variation", "pixel KL"}


def test_a_coarse_segmentation_is_compared_at_the_size_of_the_picture():
    found = se.certify(nn.Conv2d(1, 3, 3, stride=2, padding=1), group="C4", data=pictures(8))
    assert 0 <= found["flipped pixels"].observed <= found["flipped pixels"].bound <= 1


def test_a_forecast_needs_a_largest_distance():
    class Forecast(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x[:, -2:] + torch.tensor([0.3, 0.0])

    x = torch.randn(100, 5, 2, generator=torch.Generator().manual_seed(0))
    settings = {"acts": Points(), "target": Points()}
    found = se.certify(Forecast(), group="C4", data=x, clip=2.0, **settings)
    # |g s - s| of the step s = (0.3, 0): 0, 0.3 sqrt 2, 0.6, 0.3 sqrt 2, a quarter each
    expectation = (0.6 * math.sqrt(2) + 0.6) / 4
    assert found["mean displacement"].observed == pytest.approx(expectation, abs=0.08)
    assert expectation < found["mean displacement"].bound < 2.0
    with pytest.raises(SoftEquivError, match="has no largest value"):
        se.certify(Forecast(), group="C4", data=x, **settings)


def test_what_exceeds_the_clip_is_counted():
    found = se.certify(classifier(), group="C4", data=pictures(), clip=0.01)["KL"]
    assert found.most == 0.01 and 0 < found.clipped < 60 and found.bound <= 0.01


def test_labels_and_the_form_of_the_data_do_not_matter():
    net, x = classifier(), pictures()
    whole = se.certify(net, group="C4", data=x)
    labels = torch.zeros(60, dtype=torch.long)
    forms = [
        (x, labels),
        {"pixel_values": x},
        list(x.split(7)),
        torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, labels), 13),
    ]
    for data in forms:
        found = se.certify(net, group="C4", data=data, batch_size=11)
        assert found.data_sha256 == whole.data_sha256
        for one, other in zip(found.figures, whole.figures, strict=True):
            assert one.observed == pytest.approx(other.observed, abs=1e-6)


def test_labels_that_are_no_classes_do_not_matter_either():
    net, x = classifier(), pictures()
    whole, targets = se.certify(net, group="C4", data=x), torch.randn(60, 2)
    for data in ((x, targets), torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, targets), 13)):
        assert se.certify(net, group="C4", data=data).data_sha256 == whole.data_sha256


def test_a_soft_model_is_certified_for_its_own_group_and_range():
    net = se.soften(classifier(), "SO(2)", error=0.3, within=se.degrees(20))
    found = se.certify(net, data=pictures())
    assert (found.group, found.within) == (se.SO(2), se.degrees(20))
    assert se.certify(net, group="C4", data=pictures()).within == math.inf
    assert se.certify(se.soften(classifier(), "C4", softness=0.5), data=pictures()).within == math.inf


def test_the_model_is_left_as_it_was():
    net = classifier().train()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    se.certify(net, group="C4", data=pictures())
    assert all(module.training for module in net.modules())
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


def test_a_certificate_survives_json_and_is_computed_again(tmp_path):
    net, x = classifier(), pictures()
    for within in (None, se.degrees(30), 0.4):
        found = se.certify(net, within, "SO(2)", data=x)
        found.save(tmp_path / "certificate.json")
        loaded = StatisticalCertificate.load(tmp_path / "certificate.json")
        assert loaded == found
        assert loaded.differences(net, x, batch_size=9) == ()
    assert any("data_sha256" in change for change in found.differences(net, x + 1))
    assert any("acts" in change for change in found.differences(net, x, acts=Pictures("nearest")))
    with torch.no_grad():
        net[1].running_mean += 1.0  # a buffer, no parameter
    assert any("weights_sha256" in change for change in found.differences(net, x))


def test_a_certificate_that_was_edited_is_refused():
    text = se.certify(classifier(), group="C4", data=pictures()).to_json()
    edited = json.loads(text)
    edited["figures"][0]["bound"] = 0.0
    with pytest.raises(SoftEquivError, match="damaged"):
        StatisticalCertificate.from_json(json.dumps(edited))
    with pytest.raises(SoftEquivError, match="not JSON"):
        StatisticalCertificate.from_json(text[:50])
    with pytest.raises(SoftEquivError, match="not a statistical certificate"):
        StatisticalCertificate.from_json("{}")


def test_softening_and_baking_are_seen_through_by_the_hash():
    net = se.soften(classifier(), "C4", softness=0.5)
    assert model_digest(net) == model_digest(se.bake(net, copy=True))
    assert model_digest(net) != model_digest(classifier())


def test_the_table_says_what_is_certified_and_how():
    text = str(se.certify(classifier(), "30deg", "SO(2)", data=pictures(), confidence=0.95))
    for part in (
        "within 30deg",
        "60 samples",
        "confidence 0.95",
        "Clopper-Pearson",
        "betting",
        "not certified",
        "sha256",
    ):
        assert part in text


J = torch.tensor([[0.0, -1.0], [1.0, 0.0]])
FLIP = torch.diag(torch.tensor([1.0, -1.0]))


@pytest.mark.parametrize(
    ("group", "within", "words"),
    [
        (se.SO(2), None, "from the Haar measure"),
        (se.SO(2) * se.C(4), None, "from the Haar measure"),
        (se.Scaling(), None, "standard normal coordinates"),
        (se.C(8) * se.C(4), se.degrees(90), "uniform over the elements in range, the identity among them"),
        (se.SO(3), se.degrees(30), "coordinates uniform in the ball of the range"),
        (se.group_from(lie=[J], covering_radius=math.pi), None, "standard normal coordinates"),
        (
            se.group_from(lie=[J], steps=[FLIP], covering_radius=4.0),
            None,
            "standard normal coordinates, each step up to 2 times either way",
        ),
        (
            se.group_from(lie=[J], name="mine", covering_radius=math.pi) * se.C(4),
            None,
            "mine: standard normal coordinates; C4: uniform over the elements in range, the identity among them",
        ),
        (
            se.O(2),
            2.0,
            "steps one after another of those that still fit the range, or no more, then coordinates uniform in the "
            "ball of what is left",
        ),
        (
            se.SO(2) * se.C(4),
            se.degrees(90),
            "SO(2): coordinates uniform in the ball of the range; C4: uniform over the elements in range, the identity "
            "among them",
        ),
    ],
    ids=str,
)
def test_how_elements_are_drawn_is_said_as_it_is(group, within, words):
    assert group.how_drawn(within) == words


def test_an_angle_bounds_the_flow_whatever_steps_are_taken():
    assert se.O(2).how_drawn(se.degrees(30)).endswith("the ball of what is left, at most 30deg")


def test_a_group_given_by_generators_is_not_said_to_have_a_haar_measure():
    class Right(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.stack([x[:, 0, 0], -x[:, 0, 0]], 1)

    x = torch.tensor([1.0, 0.0]).expand(400, 1, 2)
    mine = se.group_from(lie=[J], name="turns", covering_radius=math.pi)
    found = {
        group: se.certify(Right(), group=group, data=x, acts=Points(), target=Still()) for group in (mine, "SO(2)")
    }
    assert "standard normal" in str(found[mine]) and "Haar" not in str(found[mine])
    assert found[mine]["flip rate"].bound < 0.4 < found["SO(2)"]["flip rate"].observed  # which are not one law


class Mean(nn.Module):
    """Answers by the mean of the batch, upper half less lower half."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        score = (x[..., :4, :] - x[..., 5:, :]).mean().expand(len(x))
        return 1e3 * torch.stack([score, -score], 1)


class First(nn.Module):
    """Answers to every sample as to the first."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[:1].flatten(1)[:, :3].expand(len(x), 3)


def unsteady() -> nn.Module:
    norm = nn.BatchNorm2d(1, track_running_stats=False)
    return nn.Sequential(norm, nn.Flatten(), nn.Linear(81, 3))


@pytest.mark.parametrize("model", [Mean(), First(), unsteady()], ids=lambda model: type(model).__name__)
def test_answers_that_depend_on_the_rest_of_their_batch_are_refused(model):
    with pytest.raises(SoftEquivError, match=r"changed with the others of its batch.*batch_size=1"):
        se.certify(model, group="C4", data=pictures())
    assert se.certify(model, group="C4", data=pictures(), batch_size=1).samples == 60
    with pytest.raises(SoftEquivError, match="changed with the others"):  # of the first batch there are none
        se.certify(model, group="C4", data=[pictures()[:1], pictures()[1:]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("offset", [0.0, 100.0])
def test_rounding_is_not_taken_for_the_rest_of_the_batch(dtype, offset):
    net = classifier()
    with torch.no_grad():
        net[4].bias += offset
    for batch_size in (7, 64):
        assert se.certify(net.to(dtype), group="C4", data=pictures(), batch_size=batch_size).samples == 60


class Broken(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.flatten(1)[:, :3] / 0


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"data": torch.randn(1, 1, 9, 9)}, "at least 2 held-out samples"),
        ({"data": torch.randn(0, 1, 9, 9)}, "at least 2 held-out samples"),
        ({"model": Broken()}, "NaN or infinity"),
        ({"data": torch.full((3, 1, 9, 9), math.nan)}, "inputs hold NaN"),
        ({"confidence": 1.0}, "between 0 and 1"),
        ({"confidence": 0.0}, "between 0 and 1"),
        ({"confidence": 99}, "between 0 and 1"),
        ({"confidence": "99"}, "confidence is a number; got '99', a str"),
        ({"clip": -1.0}, "clip, the largest value .* above 0; got -1.0"),
        ({"batch_size": 0}, "batch_size"),
        ({"data": "pictures"}, "cannot read data"),
        ({"data": torch.zeros(5, 1, 9, 9, dtype=torch.uint8)}, "floating point"),
        ({"model": nn.Conv1d(9, 2, 1), "data": torch.randn(5, 9, 9)}, "how does the group act on answers"),
        ({"model": lambda x: x}, "torch module"),
        ({"within": -1.0}, "range"),
        ({"group": None}, "say for which group"),
        ({"foo": 1}, "certify has no setting foo; there are grids"),
        ({"data": None, "foo": 1}, "certify has no setting foo; there are grids"),
        ({"seed": None}, "a seed is a whole number"),
        ({"images": torch.zeros(1, 1, 9, 9)}, "images=... belongs to a certificate of weights"),
        ({"data": None, "confidence": 0.9}, "confidence=... belongs to a certificate over data"),
    ],
)
def test_bad_input_is_refused_with_a_sentence(change, sentence):
    settings = {"model": classifier(), "data": pictures(8), "group": "SO(2)", **change}
    with pytest.raises(SoftEquivError, match=sentence):
        se.certify(**settings)


@pytest.mark.parametrize(
    "values", [torch.tensor([0.5, 1.5]), torch.tensor([math.nan]), torch.zeros(0), torch.zeros(2, 2)]
)
def test_a_mean_of_what_is_not_in_range_is_refused(values):
    with pytest.raises(SoftEquivError, match=r"numbers in \[0, 1\]"):
        mean_upper(values, 0.1)


def test_a_still_answer_of_another_shape_is_a_distance():
    found = se.certify(
        nn.Sequential(nn.Flatten(), nn.Linear(81, 1)), group="C4", data=pictures(), target=Still(), clip=5.0
    )
    assert [figure.name for figure in found.figures] == ["distance"]
