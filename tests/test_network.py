"""Certificates of networks: no measured deviation exceeds them, and where there is none the reason is given."""

import copy
import math
import random

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

import softequiv as se
from draws import as_trained
from softequiv import certify, certify_network
from softequiv.actions import Pictures
from softequiv.certify.convolution import convolution_norm
from softequiv.nn import SoftLinear
from zoo import CASES

NETWORKS, TRIALS, ASCENTS = 200, 5, 12


class Residual(nn.Module):
    """x + f(x)."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x)


class Side(nn.Module):
    """f(x) beside x, as channels."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.inner(x), x], 1)


class Positions(nn.Module):
    """x plus a table."""

    def __init__(self, channels: int, size: int) -> None:
        super().__init__()
        self.table = nn.Parameter(0.2 * torch.randn(1, channels, size, size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.table


class Of(nn.Module):
    """A function of the module itself and x; tensors become buffers, modules children."""

    def __init__(self, function, **own) -> None:
        super().__init__()
        self.function = function
        for name, value in own.items():
            self.register_buffer(name, value) if isinstance(value, torch.Tensor) else setattr(self, name, value)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self, x)


def under_autocast(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return net.inner(x)


def assigned(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    net.last = 2 * x
    return x


def on_one_pixel(layer: nn.Module, first: nn.Linear | None = None) -> nn.Module:
    """A layer on pictures after a linear one, which leaves one pixel."""
    first = nn.Linear(16, 2) if first is None else first
    return Of(lambda m, x: m.layer(m.first(x.flatten(1)).view(-1, 2, 1, 1)), first=first, layer=layer)


def activation(rng: random.Random) -> nn.Module:
    kinds = (nn.ReLU, nn.Tanh, nn.GELU, nn.SiLU, nn.ELU, nn.LeakyReLU, nn.Sigmoid, nn.Softplus, nn.Hardswish, nn.ReLU6)
    return rng.choice(kinds)()


def batch_norm(channels: int) -> nn.BatchNorm2d:
    """With statistics and scales of its own."""
    norm = nn.BatchNorm2d(channels)
    with torch.no_grad():
        norm.running_mean.normal_()
        norm.running_var.uniform_(0.5, 2)
        norm.weight.uniform_(-1.5, 1.5)
        norm.bias.normal_()
    return norm


def drawn_mlp(rng: random.Random) -> tuple[nn.Module, se.Group, float, torch.Tensor, bool]:
    """(network, group, range, example, whether its output moves): a flattened picture to still features."""
    group = rng.choice([se.SO(2), se.O(2), se.C(4), se.C(6), se.D(4), se.C(18)])
    side, channels, width = rng.choice([4, 5, 7]), rng.choice([1, 2]), rng.choice([4, 9])
    layers = [nn.Flatten(), nn.Linear(channels * side**2, width), activation(rng)]
    for _ in range(rng.choice([0, 1])):
        layers += [Residual(nn.Sequential(nn.Linear(width, width), activation(rng)))]
    net = nn.Sequential(*layers, nn.Linear(width, 3))
    se.soften(net, group, softness=rng.random() ** 2, grids={"1": (channels, side, side)})
    within = math.inf if rng.random() < 0.3 else se.degrees(rng.choice([95, 120]))
    if group == se.SO(2) and rng.random() < 0.7:
        within = se.degrees(rng.uniform(5, 60))
    return net, group, within, torch.zeros(1, channels, side, side), False


def drawn_typed(rng: random.Random) -> tuple[nn.Module, se.Group, float, torch.Tensor, bool]:
    """Vectors to vectors, by layers between representations."""
    group = rng.choice([se.SO(2), se.SO(3), se.C(5), se.O(2)])
    v = se.vector(group)
    gain = se.softness(rng.random() ** 2)
    net = nn.Sequential(
        SoftLinear(2 * v, 3 * v + se.scalar(group), gain), SoftLinear(3 * v + se.scalar(group), v, gain)
    )
    return as_trained(net), group, math.inf, torch.zeros(1, (2 * v).dim), True


def drawn_cnn(rng: random.Random) -> tuple[nn.Module, se.Group, float, torch.Tensor, bool]:
    group = rng.choice([se.C(4), se.D(4), se.C(2), se.D(2), se.Reflection(), "shifts"])
    shifts = group == "shifts"
    side = 9
    border = "circular" if shifts else rng.choice(["zeros", "circular", "reflect"])

    def conv(a: int, b: int, k: int, **kwargs: int) -> nn.Conv2d:
        return nn.Conv2d(a, b, k, padding=kwargs.pop("padding", k // 2), padding_mode=border, **kwargs)

    layers: list[nn.Module] = [conv(2, 4, rng.choice([3, 5])), batch_norm(4), activation(rng)]
    if rng.random() < 0.5:
        layers += [Residual(nn.Sequential(conv(4, 4, 3, groups=rng.choice([1, 2, 4])), batch_norm(4), activation(rng)))]
    if rng.random() < 0.3:
        layers += [Side(conv(4, 4, 1)), nn.Conv2d(8, 4, 1)]
    if rng.random() < 0.3 and not shifts:
        layers += [Positions(4, side)]
    if rng.random() < 0.4 and not shifts:
        layers += [
            rng.choice([nn.MaxPool2d(3, 2, 1), nn.AvgPool2d(3, 2, 1), nn.Conv2d(4, 4, 3, 2, 1), nn.AvgPool2d(3)])
        ]
    layers += [conv(4, 3, 3, dilation=2, padding=2) if rng.random() < 0.3 else conv(4, 3, 3)]
    still = rng.random() < 0.6
    if still:
        layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 4)]
    net, acts = nn.Sequential(*layers), se.Shifts(side, side) if shifts else group
    if not shifts:
        se.soften(net, acts, softness=rng.random() ** 2)
    return net, acts, math.inf, torch.zeros(1, 2, side, side), not still


def action(group: se.Group, x: torch.Tensor, g: se.Element) -> torch.Tensor:
    """g x as the certificate means it: pixels by permutation, else by the representation on the grid."""
    if x.ndim == 2:
        v = se.vector(group)
        return x.unflatten(-1, (-1, v.dim)).matmul(v.rho(g).mT).flatten(-2)
    if isinstance(group, (se.Shifts, se.Reflection)) or group in (se.C(2), se.C(4), se.D(2), se.D(4)):
        return Pictures()(x, g)
    rho = se.grid(group, *x.shape[-2:]).rho(g)
    return (x.flatten(-2) @ rho.mT).reshape(x.shape)


def elements(group: se.Group, within: float, generator: torch.Generator) -> list[se.Element]:
    reach = group.reach(within)
    if group.order <= 16:
        return [g for g in group.elements() if g.length <= reach + 1e-9]
    edge = [group.element(reach, *[0] * (len(group.lie) + len(group.steps) - 1))] if len(group.lie) else []
    return edge + [group.random(generator, within=reach) for _ in range(4)]


def deviation(net: nn.Module, group: se.Group, g: se.Element, x: torch.Tensor, moves: bool) -> torch.Tensor:
    """||F(g x) - g F(x)|| of each sample."""
    before = net(x)
    before = action(group, before, g) if moves else before
    return (net(action(group, x, g)) - before).flatten(1).norm(dim=1)


def measured(net, group, within, example, moves, generator) -> tuple[list[float], list[float]]:
    """Deviations and their certified bounds: random inputs of all sizes, then the worst element's made worse."""
    certificate = certify_network(net, group, within, example.double())
    assert certificate.bounded, certificate.reason
    x = torch.randn(TRIALS, *example.shape[1:], dtype=torch.float64, generator=generator)
    x = x * torch.logspace(-1, 2, TRIALS, dtype=torch.float64).reshape(-1, *[1] * (x.ndim - 1))
    with torch.no_grad():
        sizes, norms = net(x).flatten(1).norm(dim=1), x.flatten(1).norm(dim=1)
        assert bool((sizes <= certificate.size.slope * norms + certificate.size.offset + 1e-9).all())
        near = elements(group, within, generator)
        changes = torch.stack([deviation(net, group, g, x, moves) for g in near])
    bounds = certificate.bound(x).expand_as(changes)
    worst = near[int(changes.sum(1).argmax())]
    for _ in range(ASCENTS if float(bounds.min()) > 1e-9 else 0):
        x = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad((deviation(net, group, worst, x, moves) / certificate.bound(x)).sum(), x)
        step = slope / slope.flatten(1).norm(dim=1).clamp(min=1e-30).reshape(-1, *[1] * (x.ndim - 1))
        x = x + 0.3 * step * x.flatten(1).norm(dim=1).reshape(-1, *[1] * (x.ndim - 1))
    with torch.no_grad():
        last = deviation(net, group, worst, x, moves)
    return [*changes.flatten().tolist(), *last.tolist()], [*bounds.flatten().tolist(), *certificate.bound(x).tolist()]


def test_no_measured_deviation_of_200_networks_exceeds_its_certificate(capsys):
    rng, generator = random.Random(0), torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    ratios = []
    for index in range(NETWORKS):
        drawn = (drawn_mlp, drawn_cnn, drawn_cnn, drawn_typed if index % 8 == 3 else drawn_mlp)[index % 4]
        net, group, within, example, moves = drawn(rng)
        net = net.double().eval()
        changes, bounds = measured(net, group, within, example, moves, generator)
        for change, bound in zip(changes, bounds, strict=True):
            assert change <= bound * (1 + 1e-9) + 1e-9 * max(1.0, bound), (index, group, within, net)
        worst = max((c / b for c, b in zip(changes, bounds, strict=True) if b > 1e-6), default=None)
        if worst is not None:
            ratios.append(worst)
    assert len(ratios) > NETWORKS / 2
    median = sorted(ratios)[len(ratios) // 2]
    with capsys.disabled():
        print(f"\n{NETWORKS} networks: median measured / certified {median:.3f}, largest {max(ratios):.3f}")
    assert median > 0.1


@pytest.mark.parametrize("group", [se.Reflection(), se.Shifts(12)], ids=str)
def test_signals_along_a_line_are_certified_too(group):
    torch.manual_seed(0)
    conv = nn.Conv1d(2, 3, 5, padding=2, padding_mode="circular")
    net = nn.Sequential(conv, nn.Tanh(), nn.Flatten(), nn.Linear(36, 4)).double()
    x = torch.randn(20, 2, 12, dtype=torch.float64)
    bound = certify_network(net, group, math.inf, x[:1]).bound(x)
    moves = [x.flip(-1)] if isinstance(group, se.Reflection) else [x.roll(k, -1) for k in range(12)]
    with torch.no_grad():
        worst = torch.stack([(net(moved) - net(x)).norm(dim=1) / bound for moved in moves]).max()
    assert 0.05 < float(worst) <= 1


@pytest.mark.parametrize("action_name", ["su2", "bilinear"])
def test_other_actions_on_pixels_are_certified_as_they_are(action_name):
    """The paper's resampling is not orthogonal: its growth is part of the bound."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(25, 4), nn.ReLU(), nn.Linear(4, 3))
    se.soften(net, "SO(2)", softness=0.3, grids={"1": (1, 5, 5)}, action=action_name).double()
    x, grid = torch.randn(50, 1, 5, 5, dtype=torch.float64), se.grid(se.SO(2), 5, 5, action=action_name)
    certificate = certify_network(net, "SO(2)", se.degrees(20), x[:1])
    assert certify_network(net, "SO(2)", "20deg", x[:1]) == certificate
    with torch.no_grad():
        for degrees in (-20, -7, 13, 20):
            turned = (x.flatten(1) @ grid.rho(se.SO(2).element(math.radians(degrees))).mT).reshape(x.shape)
            assert bool(((net(turned) - net(x)).norm(dim=1) <= certificate.bound(x)).all())
    assert 0 < certificate.slope < 100


def test_a_bound_that_says_nothing_says_so():
    net = nn.Sequential(*[nn.Conv2d(2, 2, 3, padding=1) for _ in range(6)])
    certificate = certify_network(net, "C4", math.inf, torch.zeros(1, 2, 8, 8))
    assert certificate.idle and "says nothing" in str(certificate)
    se.soften(net, "C4", softness=0.0)
    exact = certify_network(net, "C4", math.inf, torch.zeros(1, 2, 8, 8))
    assert not exact.idle and "says nothing" not in str(exact) and "the whole group" in str(exact)


@pytest.mark.parametrize("value", [math.inf, math.nan, 1e308])
@pytest.mark.parametrize("attribute", ["weight", "bias"])
@pytest.mark.parametrize("layer", [nn.Conv2d(3, 4, 3), nn.Linear(48, 4)], ids=["conv", "linear"])
def test_weights_that_are_not_finite_have_no_bound(layer, attribute, value):
    layer = copy.deepcopy(layer).double()
    with torch.no_grad():
        getattr(layer, attribute).fill_(value)
    net = nn.Sequential(layer) if isinstance(layer, nn.Conv2d) else nn.Sequential(nn.Flatten(), layer)
    reason = certify_network(net, "C4", math.inf, torch.zeros(1, 3, 4, 4, dtype=torch.float64)).reason
    assert "not finite" in reason


def test_an_action_that_cannot_be_undone_has_no_bound():
    net = nn.Sequential(nn.Flatten(), nn.Linear(4, 2))
    certificate = certify_network(net, "C8", 1, torch.zeros(1, 1, 2, 2), action="bilinear")
    assert "cannot be undone" in certificate.reason


def worst_quarter_turn(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """||F(g x) - g F(x)|| of each sample for a quarter turn g."""
    with torch.no_grad():
        before, after = net(x.clone()), net(x.rot90(1, (2, 3)))
    return (after - (before.rot90(1, (2, 3)) if before.ndim == 4 else before)).flatten(1).norm(dim=1)


def test_a_model_that_writes_over_its_input_is_certified_for_what_it_returns():
    torch.manual_seed(0)
    conv, x = nn.Conv2d(3, 4, 3, padding=1).double(), torch.randn(9, 3, 8, 8, dtype=torch.float64)
    net = nn.Sequential(nn.ReLU(inplace=True), conv)
    certificate = certify_network(net, "C4", 1, x[:1])
    assert certificate.slope == certify_network(nn.Sequential(nn.ReLU(), conv), "C4", 1, x[:1]).slope > 0
    assert bool((worst_quarter_turn(net, x) <= certificate.bound(x)).all())


def test_a_constant_that_dropout_leaves_alone_is_one():
    net = Of(lambda m, x: x + F.dropout(m.p, 0.5, m.training), p=torch.ones(2, 1, 1))
    assert certify_network(net, "C4", 1, torch.zeros(1, 2, 4, 4)).bounded


def unsettled_map(n: int) -> SoftLinear:
    """A map that hides its motion from the rates: a resting picture that counts as moving, and one that rests."""
    group = se.SO(2)
    source, target = se.grid(group, n, n), se.frequency(group, 3)
    resting = torch.linalg.eigh(source.rates()[0] - source.lie()[0]).eigenvectors[:, -1]
    rate, flat = float(resting @ source.rates()[0] @ resting), torch.full((n * n,), 1 / n, dtype=torch.float64)
    angle = math.atan2(3, rate)
    aside = torch.tensor([math.cos(angle), math.sin(angle)], dtype=torch.float64) * 3 / math.hypot(3, rate)
    layer = SoftLinear(source, target, se.softness(1), bias=False, dtype=torch.float64)
    with torch.no_grad():
        first = torch.outer(torch.tensor([1.0, 0.0], dtype=torch.float64), flat)
        layer.parametrizations.weight.original.copy_(first + torch.outer(aside, resting))
    return layer


@pytest.mark.parametrize("n", [2, 6])
@pytest.mark.parametrize("t", [0.01, 0.1])
def test_operator_bounds_hold_on_grids_where_resting_pictures_count_as_moving(n, t):
    layer, group = unsettled_map(n), se.SO(2)
    weight, source, target = layer.weight.detach(), se.grid(group, n, n), se.frequency(group, 3)
    moved = [weight @ source.rho(group.element(s)) - target.rho(group.element(s)) @ weight for s in (-t, t)]
    most = max(float(torch.linalg.matrix_norm(m, 2)) for m in moved)
    stated = certify(layer, t)["weight"].operator * float(torch.linalg.matrix_norm(weight, 2))
    network = certify_network(layer, group, t, torch.zeros(1, n * n, dtype=torch.float64))
    for bound in (stated, network.slope):
        assert 0.9 * bound < most <= bound * (1 + 1e-9)


def test_a_border_at_one_end_counts_as_it_is():
    """A circular border of four below four rows: the convolution sees eight rows, not four."""
    net = nn.Conv2d(1, 1, (4, 1), padding=(3, 0), bias=False).double()
    wave = torch.tensor([1.0, -1, 1, -1], dtype=torch.float64)
    with torch.no_grad():
        net.weight.copy_(wave.reshape(1, 1, 4, 1))
    net = nn.Sequential(nn.CircularPad2d((0, 0, 0, 4)), net)
    x = wave.reshape(1, 1, 4, 1).expand(1, 1, 4, 2)
    certificate = certify_network(net, "Reflection", 1, x)
    size = float(net(x).detach().norm())
    assert size <= certificate.size.slope * float(x.norm()) < 1.1 * size


def test_a_picture_with_a_border_at_one_end_can_be_flattened():
    torch.manual_seed(0)
    net = nn.Sequential(nn.ReflectionPad2d((1, 1, 0, 2)), nn.Flatten(), nn.Linear(36, 3)).double()
    x = torch.randn(20, 1, 4, 4, dtype=torch.float64)
    certificate = certify_network(net, "Reflection", 1, x[:1])
    with torch.no_grad():
        worst = float(((net(x.flip(-1)) - net(x)).norm(dim=1) / certificate.bound(x)).max())
    assert 0.05 < worst <= 1


@pytest.mark.parametrize("group", ["D1", "Reflection"])
def test_where_columns_alone_are_flipped_rows_may_differ_at_their_ends(group):
    torch.manual_seed(0)
    net = nn.Sequential(nn.ZeroPad2d((0, 0, 1, 0)), nn.Conv2d(1, 2, 3, bias=False)).double()
    x = torch.randn(20, 1, 6, 6, dtype=torch.float64)
    certificate = certify_network(net, group, 1, x[:1])
    with torch.no_grad():
        change = (net(x.flip(-1)) - net(x).flip(-1)).flatten(1).norm(dim=1)
    assert 0.05 < float((change / certificate.bound(x)).max()) <= 1


def test_a_border_that_a_model_ends_in_counts():
    net = nn.ReplicationPad2d(3)
    certificate = certify_network(net, "C4", 1, torch.zeros(1, 1, 8, 8))
    corner = torch.zeros(1, 1, 8, 8)
    corner[..., 0, 0] = 1
    assert certificate.slope == 0 and certificate.size.slope == pytest.approx(float(net(corner).norm()))
    assert certificate.output == "moves as a picture of 14x14 pixels"


@pytest.mark.parametrize("group", ["SO(2)", "C8", "C4"])
def test_a_convolution_of_one_pixel_is_a_linear_map(group):
    torch.manual_seed(0)
    layer = nn.Conv2d(2, 3, 3, padding=1).double()
    same = nn.Linear(2, 3).double()
    with torch.no_grad():
        same.weight.copy_(layer.weight[..., 1, 1])
        same.bias.copy_(layer.bias)
        layer.weight.zero_()
        layer.weight[..., 1, 1] = same.weight
    first, x = nn.Linear(16, 2).double(), torch.zeros(1, 1, 4, 4, dtype=torch.float64)
    certificate = certify_network(on_one_pixel(layer, first), group, 1.0, x)
    flat = certify_network(nn.Sequential(nn.Flatten(), first, same), group, 1.0, x)
    assert certificate.output == "stands still" and 0 < certificate.slope == pytest.approx(flat.slope)


@pytest.mark.parametrize(("beta", "threshold"), [(1.0, 0.0), (3.0, 0.5), (0.5, 20.0)])
def test_softplus_may_jump_at_its_threshold(beta, threshold):
    """At a network almost equivariant: what the jump adds is more than all the rest."""
    torch.manual_seed(0)
    net = Of(lambda m, x: F.softplus(m.conv(x).mean((2, 3)), beta, threshold), conv=nn.Conv2d(1, 1, 3, bias=False))
    net = net.double()
    with torch.no_grad():
        kernel = net.conv.weight.clone()
        net.conv.weight.copy_(sum(kernel.rot90(k, (2, 3)) for k in range(4)) + 1e-2 * kernel)
    x = torch.randn(3000, 1, 5, 5, dtype=torch.float64)
    certificate = certify_network(net, "C4", 1, x[:1])
    changes, bounds = worst_quarter_turn(net, x), certificate.bound(x)
    assert bool((changes <= bounds).all())
    with torch.no_grad():
        sizes = net(x).norm(dim=1)
    assert bool((sizes <= certificate.size.slope * x.flatten(1).norm(dim=1) + certificate.size.offset).all())
    assert threshold > 0 or float(changes.max()) > 0.9 * certificate.offset  # the jump is there


def test_a_shear_is_no_permutation():
    group = se.group_from(steps=[torch.tensor([[1.0, 1.0], [0.0, 1.0]])], name="shear")
    certificate = certify_network(nn.ReLU(), group, 1, torch.zeros(1, 2), source=se.vector(group))
    assert "single entries" in certificate.reason


def test_a_layer_that_is_held_under_two_names_has_its_space_under_both():
    group = se.SO(3)
    v = 2 * se.vector(group)
    layer = as_trained(SoftLinear(v, v, se.softness(0.5))).double()
    twice = certify_network(Of(lambda m, x: m.b(m.a(x)), a=layer, b=layer), group, 0.3, torch.zeros(1, 6).double())
    named = certify_network(nn.Sequential(layer, copy.deepcopy(layer)), group, 0.3, torch.zeros(1, 6).double())
    assert twice.output == named.output == "moves as 2[V]" and twice.slope == pytest.approx(named.slope)


def test_an_equivariant_network_is_certified_as_one():
    net = nn.Sequential(nn.Conv2d(2, 4, 3, 2, 1), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1), nn.AvgPool2d(3, 2, 1))
    se.soften(net.double(), "D4", softness=0.0)
    certificate = certify_network(net, "D4", math.inf, torch.zeros(1, 2, 17, 17, dtype=torch.float64))
    assert certificate.slope < 1e-12 and certificate.offset < 1e-12
    assert "moves as a picture of 5x5" in str(certificate)


def test_parts_add_up_and_name_the_layers_to_blame():
    net = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1), nn.ReLU())
    se.soften(net, "C4", softness={"0.weight": 0.0, "2.weight": 1.0})
    certificate = certify_network(net, "C4", math.inf, torch.zeros(1, 1, 8, 8))
    assert certificate.slope == pytest.approx(sum(part.slope for part in certificate.parts.values()))
    assert certificate.offset == pytest.approx(sum(part.offset for part in certificate.parts.values()))
    blamed = {name for name, part in certificate.parts.items() if part.slope > 1e-5 * certificate.slope}
    assert blamed == {"2"}  # the first layer's kernel is its own quarter turn up to rounding
    assert str(certificate).splitlines()[4].startswith("2")


@pytest.mark.parametrize(
    ("groups", "stride", "dilation", "circular"),
    [
        (1, 1, 1, False),
        (2, 1, 2, False),
        (1, 2, 1, False),
        (2, 3, 1, False),
        (1, 3, 2, False),
        (1, 1, 1, True),
        (2, 1, 2, True),
    ],
)
def test_the_norm_of_a_convolution_is_at_least_that_of_its_matrix(groups, stride, dilation, circular):
    """Against the matrix of the convolution, made column by column."""
    torch.manual_seed(stride)
    kernel, n = torch.randn(4, 4 // groups, 3, 3, dtype=torch.float64), 7
    basis = torch.eye(4 * n * n, dtype=torch.float64).reshape(-1, 4, n, n)
    if circular:
        basis = nn.functional.pad(basis, [dilation] * 4, mode="circular")
    pad = 0 if circular else 1
    columns = nn.functional.conv2d(basis, kernel, stride=stride, padding=pad, dilation=dilation, groups=groups)
    true = float(torch.linalg.matrix_norm(columns.flatten(1), 2))
    bound = convolution_norm(kernel, [n, n], [stride] * 2, [dilation] * 2, groups, circular)
    assert true <= bound * (1 + 1e-9)
    assert bound == pytest.approx(true, rel=1e-6) if circular else bound < 2.2 * true


@pytest.mark.parametrize(
    "layer",
    [
        nn.GELU(),
        nn.GELU("tanh"),
        nn.SiLU(),
        nn.Mish(),
        nn.Sigmoid(),
        nn.Hardswish(),
        nn.Hardsigmoid(),
        nn.Softplus(),
        nn.Tanh(),
        nn.ELU(2.0),
        nn.SELU(),
        nn.LeakyReLU(0.3),
        nn.ReLU6(),
        nn.Hardtanh(),
    ],
    ids=str,
)
def test_the_constants_of_activations_hold_and_are_not_idle(layer):
    """The slope of the certificate of x -> 1000 f(x) against the steepest slope on a fine line."""
    x = torch.linspace(-12, 12, 200_001, dtype=torch.float64)
    steepest = float((layer(x).diff() / x.diff()).abs().max())
    net = nn.Sequential(nn.Linear(1, 1), layer)
    with torch.no_grad():
        net[0].weight.fill_(1.0)
        net[0].bias.zero_()
    certificate = certify_network(net.double(), "C4", math.inf, x[:1, None], source=se.scalar(se.C(4)))
    assert steepest <= certificate.size.slope * (1 + 1e-6) <= 1.05 * steepest + 1e-9
    assert certificate.size.offset == pytest.approx(abs(float(layer(torch.zeros(1)))), abs=1e-6)


def test_a_tiny_resnet_is_certified_at_an_odd_size_and_refused_at_an_even_one():
    net = se.soften(CASES["resnet"].model(), "C4", softness=0.0)
    certificate = certify_network(net, "C4", math.inf, torch.zeros(1, 3, 33, 33))
    assert certificate.bounded and certificate.slope / certificate.size.slope < 1e-4
    even = certify_network(net, "C4", math.inf, torch.zeros(1, 3, 32, 32))
    assert not even.bounded and "resnet.embedder.embedder.convolution" in even.reason and "pixels over" in even.reason
    with pytest.raises(se.SoftEquivError, match="no certificate"):
        even.bound(torch.zeros(1, 3, 32, 32))


class Cast(nn.Module):
    """x in another dtype, and back."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.to(self.dtype).to(x.dtype)


def test_casts_between_floating_types_are_exact_arithmetic():
    certificate = certify_network(Cast(torch.float64), "C4", math.inf, torch.zeros(1, 1, 4, 4))
    assert (certificate.slope, certificate.offset) == (0, 0) and certificate.size.slope == 1


class Squares(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * x


@pytest.mark.parametrize(
    ("net", "group", "shape", "reason"),
    [
        (CASES["vit"].model, "C4", (3, 20, 20), "layer norm"),
        (CASES["convnext"].model, "C4", (3, 32, 32), "layer norm"),
        (CASES["resnet"].model, "SO(2)", (3, 33, 33), "does not permute pixels"),
        (lambda: nn.Conv2d(2, 2, 3, padding=1), "Shifts(8, 8)", (2, 8, 8), "circular"),
        (lambda: nn.MaxPool2d(2), "Shifts(8, 8)", (2, 8, 8), "circular"),
        (lambda: nn.Conv2d(2, 2, (1, 3), padding=(0, 1)), "C4", (2, 8, 8), "quarter turn"),
        (lambda: nn.Conv2d(2, 2, 3, padding=1), "C4", (2, 8, 9), "not one"),
        (lambda: nn.Conv2d(2, 2, 2, padding="same"), "C4", (2, 8, 8), "one end"),
        (lambda: nn.MaxPool2d(2), "D2", (2, 9, 9), "one end"),
        (lambda: nn.AvgPool2d(2, ceil_mode=True), "Reflection", (2, 9, 8), "ceil_mode"),
        (lambda: nn.Conv1d(2, 2, 3, padding=1), "C4", (2, 8), "not one"),
        (lambda: nn.ReLU(), "SO(2)", (2, 8, 8), "the group mixes"),
        (Squares, "C4", (2, 8, 8), "activations are multiplied by activations"),
        (lambda: Cast(torch.int32), "C4", (2, 8, 8), "jumps"),
        (lambda: nn.Softmax(1), "C4", (2, 8, 8), "attention"),
        (lambda: nn.GroupNorm(1, 2), "C4", (2, 8, 8), "group norm"),
        (lambda: nn.Linear(8, 2), "C4", (2, 8, 8), "last axis"),
        (lambda: nn.PixelShuffle(1), "C4", (2, 8, 8), "no rule"),
        (lambda: nn.Linear(8, 2), "C4", (8,), "give source="),
        (
            lambda: Of(lambda m, x: (m.seen.add_(x), x.relu())[1], seen=torch.ones(2, 2, 8, 8)),
            "C4",
            (2, 8, 8),
            "writes into seen",
        ),
        (lambda: Of(assigned, last=torch.ones(2, 2, 8, 8)), "C4", (2, 8, 8), "writes into last"),
        (lambda: Of(lambda m, x: (2 * m.one, x), one=torch.ones(2)), "C4", (2, 8, 8), "does not depend on its input"),
        (lambda: Of(lambda m, x: 3), "C4", (2, 8, 8), "no tensor"),
        (lambda: Of(lambda m, x: x + torch.randn(2, 1, 1)), "C4", (2, 8, 8), "other numbers in every call"),
        (lambda: Of(lambda m, x: x * torch.bernoulli(m.p), p=torch.full((2, 1, 1), 0.5)), "C4", (2, 8, 8), "bernoulli"),
        (lambda: Of(lambda m, x: x + F.dropout(m.p, 0.5, True), p=torch.ones(2, 1, 1)), "C4", (2, 8, 8), "dropout"),
        (lambda: Of(lambda m, x: x + torch.empty(2, 1, 1)), "C4", (2, 8, 8), "empty"),
        (lambda: Of(lambda m, x: F.pad(x, (0, 0, 2, 2), mode="replicate").mean((2, 3))), "C4", (2, 8, 8), "squares"),
        (lambda: Of(lambda m, x: F.pad(x, (1, 0, 1, 0))), "C4", (2, 8, 8), "one end"),
        (lambda: Of(lambda m, x: F.pad(x, (1, 1, 1, 1))), "Shifts(8, 8)", (2, 8, 8), "does not shift"),
        (lambda: Of(lambda m, x: F.pad(x, (1, 1, -1, -1))), "C2", (2, 8, 8), "crops"),
        (lambda: on_one_pixel(nn.Conv2d(2, 1, 3, padding=2)), "C8", (1, 4, 4), "does not permute pixels"),
        (lambda: on_one_pixel(nn.Conv2d(2, 1, 3, padding=2)), "SO(2)", (1, 4, 4), "does not permute pixels"),
        (lambda: on_one_pixel(nn.ReplicationPad2d(1)), "SO(2)", (1, 4, 4), "does not permute pixels"),
        (lambda: Of(lambda m, x: torch.div(x, 2, rounding_mode="floor")), "C4", (2, 8, 8), "'floor' it jumps"),
        (lambda: Of(lambda m, x: x.mean((2, 3)).view(torch.bfloat16)), "C4", (2, 8, 8), "bfloat16"),
        (lambda: Of(lambda m, x: x.view(torch.float32)), "C4", (2, 8, 8), "bits"),
        (lambda: Cast(torch.float8_e4m3fn), "C4", (2, 8, 8), "rounds activations to torch.float8_e4m3fn"),
        (lambda: Cast(torch.bfloat16), "C4", (2, 8, 8), "rounds activations to torch.bfloat16"),
        (lambda: Of(lambda m, x: x.mean((2, 3), dtype=torch.float16)), "C4", (2, 8, 8), "torch.float16"),
        (lambda: Of(lambda m, x: F.softplus(x, -1.0)), "C4", (2, 8, 8), "beta -1"),
        (lambda: Of(lambda m, x: torch.ops.aten.elu(x, 1.0, 1.0, -1.0)), "C4", (2, 8, 8), "without limit"),
        (lambda: Of(under_autocast, inner=nn.Conv2d(2, 2, 1)), "C4", (2, 8, 8), "autocast"),
        (lambda: nn.Conv2d(2, 2, 3), "Reflection", (8, 8), "samples and channels"),
        (lambda: nn.MaxPool2d(2), "Reflection", (8, 8), "samples and channels"),
        (lambda: nn.AdaptiveAvgPool2d(1), "Reflection", (8, 8), "samples and channels"),
        (
            lambda: nn.Sequential(nn.ConstantPad1d(1, 0.0), nn.Conv2d(2, 2, 3)),
            "Reflection",
            (8, 8),
            "samples and channels",
        ),
    ],
)
def test_what_has_no_bound_is_refused_with_the_reason(net, group, shape, reason):
    certificate = certify_network(net(), group, 1.0, torch.zeros(2, *shape))
    assert not certificate.bounded and certificate.slope is None
    assert reason in certificate.reason
    assert "none" in str(certificate).splitlines()[0]
    assert str(certificate).splitlines()[1] == f"no bound was computed: {certificate.reason}"


def test_an_unbounded_network_keeps_the_certificates_of_its_weights():
    net = se.soften(CASES["vit"].model(), "SO(2)", error=0.2, within=se.degrees(30))
    certificate = certify_network(net, "SO(2)", se.degrees(30), torch.zeros(1, 3, 20, 20))
    assert not certificate.bounded and certificate.layers is not None
    assert certificate.layers.error == pytest.approx(0.2, abs=1e-5)
    assert "layernorm_before" in certificate.reason and "patch_embeddings" in str(certificate)


def test_batch_norm_is_taken_as_in_evaluation_and_the_model_is_left_alone():
    net = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.BatchNorm2d(2))
    net.train()
    assert certify_network(net, "C4", math.inf, torch.zeros(1, 1, 5, 5)).bounded
    assert net.training and net[1].training


@pytest.mark.parametrize("example", [None, torch.zeros(3), torch.zeros(2, 3, dtype=torch.long)])
def test_an_example_must_be_a_batch_of_numbers(example):
    with pytest.raises(se.SoftEquivError, match="floating-point tensor"):
        certify_network(nn.Linear(3, 3), "C4", math.inf, example)


def test_typed_layers_must_fit_what_they_are_given():
    group = se.SO(3)
    net = nn.Sequential(
        SoftLinear(se.vector(group), se.vector(group)), SoftLinear(3 * se.scalar(group), se.scalar(group))
    )
    reason = certify_network(net, group, 0.5, torch.zeros(1, 3)).reason
    assert reason.startswith("linear in 1: its weight is for 3[1], and its input moves as")
