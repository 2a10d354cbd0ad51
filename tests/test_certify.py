"""Certificates of weights: never exceeded, close to what happens, true to the bytes, and readable again."""

import json
import math
import random

import pytest
import torch
from torch import nn

import softequiv as se
from draws import ALL_GROUPS, as_trained, leaves
from softequiv.certify import Certificate, certify
from softequiv.certify.located import Located
from softequiv.certify.modelled import turn
from softequiv.certify.operator import spectral_norm
from softequiv.certify.weight import certified, rounding_of
from softequiv.nn import Layout, SoftConv2d, SoftLinear, SoftTable
from zoo import CASES

CASES_DRAWN, WEIGHTS = 252, 40  # 252 x 40 = 10,080 layers
GROUPS = [g for g in ALL_GROUPS if g.order > 1 and g.lie.shape[-1] <= 4]  # the larger ones are slow to draw from
FAMILIES = ("resnet", "vit", "segformer", "swin", "mlp")


def holder(weight: torch.Tensor) -> nn.Module:
    """A module that stores one weight."""
    module = nn.Module()
    module.weight = nn.Parameter(weight)
    return module


def smooth_images(count: int, side: int) -> torch.Tensor:
    """Pictures of a few slow waves."""
    generator = torch.Generator().manual_seed(0)
    y, x = torch.meshgrid(*[torch.linspace(-1, 1, side)] * 2, indexing="ij")
    waves = torch.randn(count, 6, 3, generator=generator) * torch.tensor([6.0, 6.0, 3.0])
    phase = waves[..., 0, None, None] * x + waves[..., 1, None, None] * y + waves[..., 2, None, None]
    return phase.cos().sum(1, keepdim=True)


def edge_elements(group: se.Group, reach: float, generator: torch.Generator) -> list[se.Element]:
    """Elements in the range, those at its far end first: all of a small group, else random directions."""
    if group.order <= 24:
        return [g for g in group.elements() if g.length <= reach + 1e-9]
    k, m = len(group.lie), len(group.steps)
    out = []
    for _ in range(6):
        if k:
            direction = torch.randn(k, dtype=torch.float64, generator=generator)
            direction = (direction / direction.norm() * reach).tolist()
            out += [group.element(*[t * share for t in direction], *[0] * m) for share in (1, 0.7)]
        out.append(group.random(generator, within=max(reach, 1.0) if not k else reach))
    return [g for g in out if g.length <= reach + 1e-9]


def test_no_measured_error_of_10000_layers_exceeds_its_certificate(capsys):
    rng, generator = random.Random(1), torch.Generator().manual_seed(1)
    layers, ratios, operators = 0, [], []
    while layers < CASES_DRAWN * WEIGHTS:
        group = rng.choice(GROUPS)
        small = [rep for rep in leaves(group) if rep.dim <= 9]
        source, target = (rng.choice(small) * rng.choice([1, 1, 2]) for _ in range(2))
        rep = source >> target
        within = rng.uniform(1.0, 2.0) if not len(group.lie) else rng.uniform(0.1, 1.5)
        gain = rng.choice([se.hard(rng.uniform(0, 4)), se.smooth(1, rng.uniform(0.3, 3)), se.softness(rng.random())])
        weights = gain(torch.randn(WEIGHTS, *rep.shape, dtype=torch.float64, generator=generator), rep)
        moved = [
            weights @ source.rho(g) - target.rho(g) @ weights
            for g in edge_elements(group, group.reach(within), generator)
        ]
        change = torch.stack([m.flatten(1).norm(dim=1) for m in moved]).amax(0)
        operator = torch.stack([torch.linalg.matrix_norm(m, 2) for m in moved]).amax(0)
        for w, most, most_operator in zip(weights, change.tolist(), operator.tolist(), strict=True):
            found = certified(Located("w", holder(w), "weight", rep, Layout()), within)
            layers += 1
            size, norm = float(w.norm()), float(torch.linalg.matrix_norm(w, 2))
            assert most <= found.error * size + 1e-8 * max(size, 1), (group, rep, within, gain)
            assert most_operator <= found.operator * norm + 1e-8 * max(size, 1), (group, rep, within, gain)
            if found.error > 1e-6 and size:
                ratios.append(most / (found.error * size))
                operators.append(most_operator / (found.operator * norm))
    median, median_operator = (sorted(r)[len(r) // 2] for r in (ratios, operators))
    with capsys.disabled():
        print(
            f"\n{layers} layers: median measured / certified {median:.3f} (Frobenius), {median_operator:.3f} (operator)"
        )
    assert layers >= 10_000
    assert median > 0.5


@pytest.mark.parametrize("degrees", [10, 30, 60])
def test_the_figures_of_a_kernel_are_those_of_the_turned_kernel(degrees):
    """Frobenius: attained. Operator: a bound on the singular values of every turned kernel's difference."""
    net = se.soften(nn.Conv2d(3, 8, 5).double(), "SO(2)", gain=se.hard(2.5))
    found = certify(net, se.degrees(degrees))["weight"]
    grid, w = se.grid(se.SO(2), 5, 5), net.weight.detach()
    changes, operators = [], []
    for share in torch.linspace(-1, 1, 41).tolist():
        turn = grid.rho(se.SO(2).element(share * math.radians(degrees)))
        difference = (w.flatten(2) @ turn.mT - w.flatten(2)).flatten(1)
        changes.append(float(difference.norm() / w.norm()))
        operators.append(float(torch.linalg.matrix_norm(difference, 2) / torch.linalg.matrix_norm(w.flatten(1), 2)))
    assert max(changes) == pytest.approx(found.error, rel=1e-9)
    assert 0.6 * found.operator < max(operators) <= found.operator * (1 + 1e-9)


def test_groups_of_channels_are_maps_of_their_own():
    net = se.soften(nn.Conv2d(6, 8, 3, groups=2).double(), "C4", softness=0.5)
    w = net.weight.detach()
    turned = [w.rot90(k, (-2, -1)) - w for k in range(4)]
    norm = max(float(torch.linalg.matrix_norm(part.flatten(1), 2)) for part in w.chunk(2))
    change = max(float(torch.linalg.matrix_norm(p.flatten(1), 2)) for t in turned for p in t.chunk(2))
    found = certify(net)["weight"]
    assert 0.5 * found.operator < change / norm <= found.operator * (1 + 1e-9)


def test_a_map_between_typed_fields_has_an_operator_bound():
    fields = 2 * se.frequency(se.C(4), 1) + 2 * se.scalar(se.C(4))
    net = as_trained(SoftConv2d(fields, fields, 3, se.softness(0.6))).double()
    found = certify(net)["weight"]
    hom = (fields @ se.grid(se.C(4), 3, 3)) >> fields
    w = net.weight.detach().flatten(1)
    moved = [w @ hom.source.rho(g) - hom.target.rho(g) @ w for g in se.C(4).elements()]
    assert max(float(m.norm() / w.norm()) for m in moved) <= found.error * (1 + 1e-9)
    most = max(float(torch.linalg.matrix_norm(m, 2)) for m in moved) / float(torch.linalg.matrix_norm(w, 2))
    assert 0.5 * found.operator < most <= found.operator * (1 + 1e-9)
    assert certify(net)["bias"].operator is None


def test_tables_are_added_and_have_no_operator_norm():
    found = certify(as_trained(SoftTable(se.grid(se.SO(2), 7, 7), 16, se.softness(0.5))))["weight"]
    assert found.operator is None and found.rounding is None
    assert 0 < found.error < 2


def test_whole_group_figures_are_those_of_all_elements():
    net = se.soften(nn.Conv2d(4, 4, 5).double(), "C8", softness=0.5)
    found, w, grid = certify(net)["weight"], net.weight.detach(), se.grid(se.C(8), 5, 5)
    squares = [float((w.flatten(2) @ grid.rho(g).mT - w.flatten(2)).square().sum()) for g in se.C(8).elements()]
    assert found.haar == pytest.approx(math.sqrt(sum(squares) / 8) / float(w.norm()))
    assert math.sqrt(max(squares)) / float(w.norm()) <= min(found.error, found.supremum) + 1e-12


def test_no_mean_over_the_group_where_resting_pictures_count_as_moving():
    even = certify(nn.Conv2d(2, 2, 2).double(), se.degrees(30), "SO(2)")["weight"]
    assert even.haar is None and even.supremum is not None
    assert certify(nn.Conv2d(2, 2, 3).double(), se.degrees(30), "SO(2)")["weight"].haar is not None


def test_no_whole_group_figures_where_the_group_is_open_or_stretches():
    open_group = certify(se.soften(nn.Conv2d(2, 2, 5), "Scaling", softness=0.5), 0.3)["weight"]
    assert open_group.haar is None and open_group.supremum is None and open_group.paper_whole is None
    stretched = certify(se.soften(nn.Conv2d(2, 2, 5), "SO(2)", softness=0.5, action="bilinear"), se.degrees(20))
    assert stretched["weight"].kappa > 1 and stretched["weight"].haar is None
    with pytest.raises(se.GroupError, match="not compact"):
        certify(se.soften(nn.Conv2d(2, 2, 5), "Scaling", softness=0.5))


def test_the_papers_bound_counts_generators_and_outputs_that_turn():
    group, within = se.SO(3), 0.5
    layer = as_trained(SoftLinear(se.vector(group), 2 * se.vector(group), se.hard(10))).double()
    found = certify(layer, within)["weight"]
    b = float(se.spectrum(se.vector(group) >> se.vector(group)).levels[-1])
    assert found.paper == pytest.approx(b * math.sqrt(3 * 6) * within)
    assert found.paper_whole == pytest.approx(b * math.sqrt(3 * 6) * math.pi)
    kernel = certify(se.soften(nn.Conv2d(2, 4, 3), "SO(2)", gain=se.hard(1.5)), within)["weight"]
    assert kernel.paper == pytest.approx(1.0 * within) and kernel.paper_whole == pytest.approx(math.pi)
    assert kernel.error < kernel.paper


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_levels_kept_are_those_beyond_rounding(dtype):
    net = se.soften(nn.Conv2d(8, 8, 5).to(dtype), "SO(2)", gain=se.hard(1.5))
    levels = se.spectrum(se.grid(se.SO(2), 5, 5))
    found = certify(net)["weight"]
    kept = levels.levels < 1.5
    assert (found.levels, found.levels_total) == (int(kept.sum()), len(levels.levels))
    assert (found.directions, found.directions_total) == (int(levels.counts[kept].sum()), 25)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding_bounds_what_the_dtype_adds(dtype):
    """||fl(W fl(g x)) - g fl(W x)|| exceeds the exact change by no more than the rounding term."""
    group = se.C(8)
    source, target = 40 * se.frequency(group, 1), 4 * se.frequency(group, 1)
    layer = SoftLinear(source, target, se.softness(0), bias=False).to(dtype)
    w = layer.weight.detach()
    exact, term = w.double(), rounding_of(dtype, 81)
    used = []
    for g in group.elements():
        x = torch.randn(80, 50, generator=torch.Generator().manual_seed(3)).to(dtype)
        moved = (source.rho(g) @ x.double()).to(dtype)
        rounded = (w @ moved).double() - target.rho(g) @ (w @ x).double()
        change = exact @ source.rho(g) @ x.double() - target.rho(g) @ exact @ x.double()
        added = (rounded - change).norm(dim=0) / (exact.norm() * x.double().norm(dim=0))
        used.append(float(added.max()) / term)
    assert 1e-4 < max(used) <= 1


@pytest.mark.parametrize("groups", [1, 4])
def test_rounding_counts_the_products_behind_one_output(groups):
    up = certify(nn.ConvTranspose2d(64, 4, 3, groups=groups), 1, "C4")["weight"]
    down = certify(nn.Conv2d(64, 4, 3, groups=groups), 1, "C4")["weight"]
    assert up.rounding == down.rounding == rounding_of(torch.float32, 64 // groups * 9 + 1)


@pytest.mark.parametrize("mode", ["parametrize", "project"])
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_error_targets_are_met_by_every_weight_and_shown(name, mode, dtype):
    case = CASES[name]
    net = se.soften(case.model().to(dtype), "SO(2)", error=0.15, within=se.degrees(30), mode=mode, grids=case.grids)
    before = certify(net)
    assert before.within == se.degrees(30)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    held = se.hold(net, optimizer) if mode == "project" else None
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        for parameter in net.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(dtype)
        optimizer.step()
    if held is not None:
        held.remove()
    for certificate in (before, certify(net)):
        slack = 3e-6 if dtype == torch.float32 else 2e-3
        assert all(w.asked == 0.15 and w.error <= 0.15 + slack and w.met for w in certificate.weights)
        assert all("0.15" in line for line in str(certificate).splitlines()[6:-2])
    assert not before.verify(net)


def test_a_target_for_a_smaller_range_is_not_shown_as_one_for_this():
    net = se.soften(nn.Conv2d(3, 8, 5), "SO(2)", error=0.1, within=se.degrees(30))
    assert certify(net, se.degrees(20))["weight"].asked == 0.1
    assert certify(net, se.degrees(40))["weight"].asked is None
    assert certify(net, se.degrees(40))["weight"].error > 0.1


def test_a_baked_model_has_the_certificate_of_the_soft_one():
    case = CASES["mlp"]
    net = se.soften(case.model(), "SO(2)", error=0.15, within=se.degrees(30), grids=case.grids)
    certificate, plain = certify(net), se.bake(net, copy=True)
    again = certify(plain, se.degrees(30), "SO(2)", grids=case.grids)
    assert again["1.weight"].error == certificate["1.weight"].error
    assert again.sha256 == certificate.sha256
    assert certificate.verify(plain) and certificate.verify(plain).recomputed == 1


def test_a_soft_model_can_be_certified_for_another_group():
    net = se.soften(nn.Conv2d(3, 8, 5), "C4", softness=0.0)
    assert certify(net)["weight"].error < 1e-6
    assert certify(net, group="SO(2)")["weight"].error > 0.1
    assert certify(net, group="Reflection")["weight"].levels_total == 2


def test_certificates_come_back_from_their_files(tmp_path):
    net = se.soften(CASES["resnet"].model(), "SO(2)", error=0.2, within=se.degrees(30))
    certificate = certify(net, images=torch.rand(2, 3, 48, 48))
    certificate.save(tmp_path / "certificate.json")
    again = Certificate.load(tmp_path / "certificate.json")
    assert again == certificate and str(again) == str(certificate)
    assert [path.name for path in tmp_path.iterdir()] == ["certificate.json"]
    assert str(again.verify(net)) == "verified: same bytes and same figures for 4 weights"
    assert again.verify(net).recomputed == again.verify(net).total == 4
    whole = certify(se.soften(nn.Conv2d(2, 2, 3), "D4", softness=0.5))
    assert math.isinf(Certificate.from_json(whole.to_json()).within)


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda text: text[:200], "not JSON"),
        (lambda text: "[1, 2]", "not a certificate of format 1"),
        (lambda text: text.replace('"error"', '"terror"'), "damaged certificate"),
        (lambda text: text.replace('"group": "SO(2)"', '"group": "SO(9,"'), "SO\\(9,"),
        (lambda text: text.replace('"group": "SO(2)"', '"group": "C36"'), "damaged certificate"),
    ],
)
def test_a_damaged_file_is_refused_with_a_sentence(tmp_path, damage, sentence):
    path = tmp_path / "certificate.json"
    certify(se.soften(nn.Conv2d(2, 2, 3), "SO(2)", softness=0.5), 1.0).save(path)
    path.write_text(damage(path.read_text()))
    with pytest.raises(se.SoftEquivError, match=sentence):
        Certificate.load(path)
    with pytest.raises(se.SoftEquivError, match="cannot be read"):
        Certificate.load(tmp_path / "absent.json")


def test_verification_says_what_changed():
    net = se.soften(nn.Sequential(nn.Conv2d(2, 2, 3), nn.Conv2d(2, 2, 5)), "SO(2)", softness=0.3)
    certificate = certify(net, se.degrees(30))
    with torch.no_grad():
        net[1].parametrizations.weight.original.mul_(1.5)
    report = certificate.verify(net)
    (sentence,) = report.changes
    assert not report and sentence.startswith("1.weight changed: its certified error was")
    smaller = se.bake(net[:1], copy=True)
    assert certificate.verify(smaller).changes == ("1.weight is missing from the model",)
    other = se.soften(se.bake(net[:1], copy=True), "C4", softness=1.0)
    assert "softened for C4, the certificate is for SO(2)" in str(certificate.verify(other))
    assert certificate.verify(nn.Linear(2, 2)).changes == (
        "the model cannot be certified again: no weight of Linear lives on a representation of SO(2)",
        "0.weight is missing from the model",
        "1.weight is missing from the model",
        "weight is in the model and not in the certificate",
    )


def edited(certificate: Certificate, **entries: object) -> Certificate:
    """A certificate whose file was written over: entries of the whole, or of its first weight."""
    whole = json.loads(certificate.to_json())
    for name, value in entries.items():
        (whole if name in whole else whole["weights"][0])[name] = value
    return Certificate.from_json(json.dumps(whole))


EDITS = {
    "error": 0.01,
    "operator": None,
    "haar": 0.0,
    "supremum": math.nan,
    "paper": 0.0,
    "paper_whole": math.nan,
    "kappa": 0.5,
    "rounding": 0.0,
    "levels": 1,
    "levels_total": 1,
    "directions": 1,
    "directions_total": 1,
    "dtype": "float64",
    "shape": [1],
    "representation": "5x5",
    "action": "bilinear",
    "grids": {"nowhere": [1, 2, 2]},
    "uncertified": ["nowhere"],
}


@pytest.mark.parametrize("plain", [False, True], ids=["soft", "plain"])
@pytest.mark.parametrize("entry", EDITS)
def test_verification_sees_every_entry_that_the_model_does_not_give(entry, plain):
    net = se.soften(nn.Sequential(nn.Conv2d(2, 2, 3), nn.Flatten(), nn.Linear(2, 2)), "SO(2)", softness=0.9)
    certificate = certify(net, se.degrees(30))
    net = se.bake(net) if plain else net
    assert certificate.verify(net)
    assert not edited(certificate, **{entry: EDITS[entry]}).verify(net)


def test_a_sentence_says_what_the_certificate_states_and_what_the_model_gives():
    net = se.soften(nn.Conv2d(2, 2, 3), "SO(2)", softness=0.9)
    (sentence,) = edited(certify(net, se.degrees(30)), error=0.01).verify(net).changes
    assert sentence.startswith("weight states error 0.01, the model gives ")


def test_figures_that_a_plain_model_cannot_give_are_not_verified():
    layer = as_trained(SoftLinear(2 * se.vector(se.SO(3)), 3 * se.vector(se.SO(3)), se.softness(0.5)))
    certificate, plain = certify(layer, 0.3), se.bake(layer, copy=True)
    assert certificate.verify(layer)
    for claimed in (certificate, edited(certificate, error=0.0, operator=0.0)):
        report = claimed.verify(plain)
        assert not report and report.recomputed == 0
        assert "weight: its figures cannot be certified again from this plain model" in report.changes


def test_a_plain_model_with_one_more_weight_is_another():
    net = nn.Sequential(nn.Conv2d(1, 2, 3))
    certificate = certify(net, se.degrees(30), "SO(2)")
    assert certificate.verify(net)
    net.append(nn.Conv2d(2, 2, 3))
    assert certificate.verify(net).changes == ("1.weight is in the model and not in the certificate",)


def test_a_model_softened_in_part_is_verified_when_baked():
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Conv2d(2, 2, 3))
    certificate = certify(se.soften(net, "SO(2)", softness=0.5, only=["0.weight"]), se.degrees(30))
    assert certificate.uncertified == ("1.weight",)
    assert certificate.verify(se.bake(net))


def test_weights_with_other_parametrisations_are_those_that_the_model_uses():
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(2, 2))
    for layer in (net[0], net[2]):
        nn.utils.parametrizations.weight_norm(layer)
    certificate = certify(net, se.degrees(30), "SO(2)")
    assert certificate.uncertified == ("2.weight",)
    assert certificate.verify(net)
    with torch.no_grad():
        net[0].parametrizations.weight.original1[0, 0, 0, 0] += 1
    assert "0.weight changed" in str(certificate.verify(net))


@pytest.mark.parametrize(
    ("entry", "value"),
    [
        ("error", "0"),
        ("levels", True),
        ("levels", 1.5),
        ("asked", "none"),
        ("shape", ["a"]),
        ("name", 3),
        ("action", "sideways"),
        ("grids", {"1": "ab"}),
        ("uncertified", [1]),
        ("versions", "new"),
    ],
)
def test_entries_of_another_kind_are_damage(entry, value):
    certificate = certify(se.soften(nn.Conv2d(2, 2, 3), "SO(2)", softness=0.9), 1.0)
    with pytest.raises(se.SoftEquivError, match="damaged certificate"):
        edited(certificate, **{entry: value})


@pytest.mark.parametrize("name", ["mine", "SO(2)"])
def test_a_group_that_its_name_does_not_stand_for_is_not_written(name):
    group = se.group_from(lie=[torch.tensor([[0.0, -5.0], [5.0, 0.0]])], name=name, covering_radius=math.pi)
    certificate = certify(SoftLinear(2 * se.vector(group), se.vector(group), se.softness(0.5)), 0.3)
    with pytest.raises(se.GroupError, match="a group of your own"):
        certificate.to_json()


def test_verification_sees_another_target():
    net = se.soften(nn.Conv2d(3, 8, 5), "SO(2)", error=1.9, within=se.degrees(30))
    certificate = certify(net)
    plain = se.bake(net, copy=True)
    looser = se.soften(plain, "SO(2)", error=1.9, within=se.degrees(20))
    assert "was softened for an error of 1.9 in this range, and now for no error" in str(certificate.verify(looser))


def test_the_modelled_action_is_compared_with_true_rotations():
    net = se.soften(nn.Sequential(nn.Conv2d(1, 4, 7), nn.Conv2d(4, 4, 3)), "SO(2)", softness=0.5)
    images = smooth_images(4, 64)
    large, small = certify(net, se.degrees(30), images=images).gaps
    assert (large.grid, small.grid) == ("7x7", "3x3")
    assert str(large).startswith("7x7: differs from a bicubic rotation by ")
    assert 0 < large.half < large.edge < 0.35  # turned the other way it would be above 0.5
    noise = certify(net, se.degrees(30), images=torch.rand(4, 3, 64, 64)).gaps
    assert noise[0].edge > 2 * large.edge
    assert certify(net, group="C4", images=images).gaps[0].edge == 0
    assert "smaller than its surroundings" in str(certify(net, se.degrees(30), images=images[..., :8, :8]))


def test_the_far_end_of_a_range_of_steps_is_its_last_step():
    group = se.C(8)
    assert [turn(group, group.reach(se.degrees(45 * steps))).length for steps in (1, 2, 3)] == [1, 2, 3]


def test_tables_are_compared_on_whole_images():
    net = se.soften(CASES["vit"].model(), "SO(2)", softness=0.5)
    grids = {gap.grid: gap for gap in certify(net, se.degrees(30), images=smooth_images(4, 64)).gaps}
    assert grids["4x4"].patches == 4 and grids["5x5"].patches == 512


def test_the_table_says_what_is_certified_and_what_is_not():
    text = str(certify(se.soften(CASES["resnet"].model(), "SO(2)", softness=0.5), se.degrees(30)))
    head = text.splitlines()[:5]
    assert head[0].startswith("SO(2), within 30deg")
    assert "9 other weights" in head[3] and "normalisation" in head[3]
    assert "sha256" in text and "give images=" in text
    one = se.soften(nn.Sequential(nn.Conv2d(2, 2, 3), nn.Linear(2, 2)), "SO(2)", softness=0.5)
    assert "not certified: 1 other weight (1.weight), normalisation" in str(certify(one, se.degrees(30)))
    three = se.soften(nn.Sequential(nn.Conv2d(2, 2, 3), *(nn.Linear(2, 2) for _ in range(3))), "SO(2)", softness=0.5)
    assert "3 other weights (1.weight, 2.weight, 3.weight), normalisation" in str(certify(three, se.degrees(30)))


@pytest.mark.parametrize(
    ("attempt", "sentence"),
    [
        (lambda: certify(nn.Conv2d(2, 2, 3)), "say for which group"),
        (lambda: certify(nn.Linear(2, 2), group="C4"), "no weight of Linear"),
        (lambda: certify(nn.Conv2d(2, 2, 3), group="C99x"), "C99x"),
        (lambda: certify(nn.Conv2d(2, 2, 3), -1.0, "C4"), "empty"),
        (lambda: certify(nn.Conv2d(2, 2, 3, device="meta"), group="C4"), "meta device"),
        (lambda: certify(nn.Conv2d(2, 2, 3), group="C4", images=torch.zeros(3, 8, 8)), "images are"),
        (lambda: certify(nn.Conv2d(2, 2, 3), group="C4", images=torch.zeros(0, 3, 8, 8)), "at least one"),
        (lambda: certify(nn.Conv2d(2, 2, 3), group="C4", images="x"), "images are .* got 'x'"),
        (
            lambda: certify(nn.Conv2d(2, 2, 3), group="C4", images=torch.full((1, 3, 8, 8), math.nan)),
            "images hold NaN or infinity in 192 of 192 entries; look for broken pictures",
        ),
    ],
)
def test_bad_input_is_refused_with_a_sentence(attempt, sentence):
    with pytest.raises(se.SoftEquivError, match=sentence):
        attempt()


def test_weights_that_are_not_finite_or_zero():
    net = nn.Conv2d(2, 2, 3)
    with torch.no_grad():
        net.weight.zero_()
    zero = certify(net, group="C4")["weight"]
    assert (zero.error, zero.operator, zero.levels) == (0, 0, 0)
    with torch.no_grad():
        net.weight[0, 0, 0, 0] = math.nan
    with pytest.raises(se.WeightError, match="not finite"):
        certify(net, group="C4")


def test_soft_weights_of_two_groups_have_no_common_certificate():
    net = nn.Sequential(
        se.soften(nn.Conv2d(2, 2, 3), "C4", softness=0), se.soften(nn.Conv2d(2, 2, 3), "D4", softness=0)
    )
    with pytest.raises(se.GroupError, match="C4, D4"):
        certify(net)


@pytest.mark.parametrize("shape", [(3, 7), (7, 3), (2, 4, 5)])
def test_the_norm_is_the_largest_singular_value(shape):
    x = torch.randn(shape, dtype=torch.float64) * 1e-200
    assert spectral_norm(x) == pytest.approx(float(torch.linalg.svdvals(x).max()), rel=1e-8)
