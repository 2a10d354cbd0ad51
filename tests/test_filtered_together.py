"""Weights filtered at once are those filtered at each access: values, gradients, and what may change."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import ViTConfig, ViTForImageClassification

import softequiv as se
from draws import as_trained
from softequiv.nn import Soft, SoftLinear, set_gain, soften_weight

ROUNDING = {torch.float32: 1e-5, torch.float64: 1e-12}  # of sums in another order, relative to the largest entry

GAINS = {
    "softness .5": {"softness": 0.5},
    "error": {"error": 0.2, "within": "30deg"},
    "small error": {"error": 0.02, "within": "30deg"},
}


class Net(nn.Module):
    """Kernels of several sizes, two of each, one depthwise, one grouped and one transposed."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 8, 5, padding=2),
            nn.Conv2d(8, 8, 3, padding=1, groups=8),
            nn.ConvTranspose2d(8, 8, 3, padding=1),
            nn.Conv2d(8, 8, 3, padding=1, groups=2),
            nn.Tanh(),
            nn.Conv2d(8, 256, 3, padding=1),
            nn.Conv2d(256, 8, 3, padding=1),
            nn.Conv2d(8, 4, 5, padding=2),
        )

    def forward(self, x):
        return self.layers(x)


def net(dtype=torch.float32, **how):
    torch.manual_seed(0)
    return se.soften(Net().to(dtype), "SO(2)", **(how or {"error": 0.2, "within": "30deg"}))


def batch(dtype=torch.float32):
    return torch.randn(2, 3, 9, 9, dtype=dtype, generator=torch.Generator().manual_seed(1))


def loss_of(model, x):
    out = model(x)
    return getattr(out, "logits", out).square().mean()


def gradients(model, x):
    """The loss and the gradient of every parameter, which must not have one yet."""
    loss = loss_of(model, x)
    loss.backward()
    found = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    model.zero_grad(set_to_none=True)
    return loss.detach(), found


def assert_same(found, expected, dtype=torch.float32):
    assert torch.allclose(found[0], expected[0], rtol=ROUNDING[dtype])
    for a, b in zip(found[1], expected[1], strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert a.dtype == b.dtype
            assert float((a - b).abs().max()) <= ROUNDING[dtype] * float(b.abs().max())


def prepared(model):
    """Which weights are ready: by what tells one from another, None for those that are not."""
    ready = [weight.filtered.ready.weight for weight in se.soft_weights(model)]
    return [None if weight is None else id(weight) for weight in ready]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("gain", GAINS)
def test_values_and_gradients_are_those_without_it(gain, dtype):
    model, x = net(dtype, **GAINS[gain]), batch(dtype)
    expected = gradients(model, x)
    values = [weight.value().detach() for weight in se.soft_weights(model)]
    with se.filtered_together(model):
        assert all(prepared(model))
        for weight, value in zip(se.soft_weights(model), values, strict=True):
            assert torch.allclose(weight.value(), value, rtol=ROUNDING[dtype], atol=ROUNDING[dtype])
        assert_same(gradients(model, x), expected, dtype)
    assert not any(prepared(model))


def test_a_vision_transformer_with_its_table_of_positions():
    torch.manual_seed(0)
    config = ViTConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, image_size=32, patch_size=8
    )
    model = se.soften(ViTForImageClassification(config).eval(), "SO(2)", error=0.1, within="30deg")
    assert any("position" in weight.name for weight in se.soft_weights(model))
    x = torch.randn(2, 3, 32, 32)
    expected = gradients(model, x)
    with se.filtered_together(model):
        assert_same(gradients(model, x), expected)


SPACES = {
    "scalars and vectors": 4 * se.scalar(se.SO(3)) + 4 * se.vector(se.SO(3)),
    "regular": 4 * se.regular(se.C(4)),
}


@pytest.mark.parametrize("gain", [se.least_distortion(0.1, se.degrees(90)), se.softness(0.5)], ids=str)
@pytest.mark.parametrize("space", SPACES.values(), ids=SPACES)
def test_a_soft_linear_layer(space, gain):
    torch.manual_seed(0)
    layers = [as_trained(SoftLinear(space, space, gain=gain)) for _ in range(2)]
    model, x = nn.Sequential(*layers), torch.randn(5, space.dim)
    expected = gradients(model, x)
    with se.filtered_together(model):
        assert any(prepared(model))
        assert_same(gradients(model, x), expected)


EVERY_GAIN = pytest.mark.parametrize("how", GAINS.values(), ids=GAINS)


@EVERY_GAIN
def test_each_weight_is_filtered_once_however_often_it_is_read(how):
    model = net(**how)
    with se.filtered_together(model):
        for weight in se.soft_weights(model):
            assert weight.value() is weight.value()


@EVERY_GAIN
def test_frozen_weights_stay_frozen(how):
    model, x = net(**how), batch()
    frozen = list(se.soft_weights(model))[1::2]
    for weight in frozen:
        weight.stored.requires_grad_(False)
    expected = gradients(model, x)
    with se.filtered_together(model):
        assert not any(weight.value().requires_grad for weight in frozen)
        assert_same(gradients(model, x), expected)


@EVERY_GAIN
def test_a_weight_frozen_or_thawed_inside_is_filtered_anew(how):
    model, x = net(**how), batch()
    first, second = list(se.soft_weights(model))[:2]
    first.stored.requires_grad_(False)
    with se.filtered_together(model):
        first.stored.requires_grad_(True)
        second.stored.requires_grad_(False)
        found = gradients(model, x)
    assert_same(found, gradients(model, x))
    assert first.value().requires_grad and not second.value().requires_grad


@EVERY_GAIN
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_what_was_prepared_without_gradients_is_not_trained_on(how, mode):
    model, x = net(**how), batch()
    expected = gradients(model, x)
    with mode():
        once = se.filtered_together(model)
        once.__enter__()
        assert torch.allclose(model(x).square().mean(), expected[0])
    assert_same(gradients(model, x), expected)
    once.__exit__(None, None, None)


@EVERY_GAIN
def test_the_gradient_of_a_gradient(how):
    model, x = net(**how), batch()
    stored = [weight.stored for weight in se.soft_weights(model)]

    def twice():
        first = torch.autograd.grad(loss_of(model, x), stored, create_graph=True)
        return torch.zeros(()), torch.autograd.grad(sum(g.square().sum() for g in first), stored)

    expected = twice()
    with se.filtered_together(model):
        assert_same(twice(), expected)


@EVERY_GAIN
def test_autocast_leaves_the_filter_in_float32(how):
    model, x = net(**how), batch()
    values = [weight.value().detach() for weight in se.soft_weights(model)]
    upstream = [torch.randn_like(value) for value in values]
    expected = torch.autograd.grad(
        [weight.value() for weight in se.soft_weights(model)],
        [weight.stored for weight in se.soft_weights(model)],
        upstream,
    )
    with torch.autocast("cpu", torch.bfloat16), se.filtered_together(model):
        weights = list(se.soft_weights(model))
        for weight, value in zip(weights, values, strict=True):
            assert torch.allclose(weight.value(), value, rtol=1e-5, atol=1e-6)
        assert model(x).dtype == torch.bfloat16
        with torch.autocast("cpu", enabled=False):
            found = torch.autograd.grad([w.value() for w in weights], [w.stored for w in weights], upstream)
    assert_same((torch.zeros(()), found), (torch.zeros(()), expected))


@EVERY_GAIN
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("kind", [{"foreach": False}, {"foreach": True}, {"fused": True}], ids=str)
def test_a_weight_that_the_optimiser_changed_inside_is_filtered_anew(how, optimizer, kind):
    model, other, x = net(**how), net(**how), batch()
    steps = [optimizer(m.parameters(), lr=0.01, **kind) for m in (model, other)]
    with se.filtered_together(model):
        for _ in range(2):  # the second step sees what the first has changed
            for m, step in zip((model, other), steps, strict=True):
                loss_of(m, x).backward()
                step.step()
                step.zero_grad()
            assert all(prepared(model))
        assert_same(gradients(model, x), gradients(other, x))


def test_the_optimiser_of_another_model_changes_nothing():
    model, other = net(), nn.Linear(2, 2)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    with se.filtered_together(model):
        before = prepared(model)
        other(torch.zeros(1, 2)).sum().backward()
        optimizer.step()
        assert prepared(model) == before


@EVERY_GAIN
def test_gradients_may_gather_over_several_backward_passes(how):
    model, other, x = net(**how), net(**how), batch()
    with se.filtered_together(model):
        for part in x.split(1):
            for m in (model, other):
                (loss_of(m, part) + loss_of(m, 2 * part)).backward()
    found, expected = ([p.grad for p in m.parameters()] for m in (model, other))
    assert_same((torch.zeros(()), found), (torch.zeros(()), expected))


def test_a_gradient_goes_through_the_filter_of_its_forward_pass():
    model, x = net(softness=0.5), batch()
    expected = gradients(model, x)
    with se.filtered_together(model):
        loss = loss_of(model, x)
        se.set_softness(model, 0)
        loss.backward()
    assert_same((loss.detach(), [p.grad for p in model.parameters()]), expected)


def test_a_weight_that_no_loss_uses_has_no_gradient():
    model, x = net(softness=0.5), batch()
    with se.filtered_together(model):
        model.layers[:2](x).square().mean().backward()
    kept = [weight.stored.grad is not None for weight in se.soft_weights(model)]
    assert kept == [True] * 2 + [False] * (len(kept) - 2)


def test_a_softness_changed_inside_holds_at_once():
    model = net()
    with se.filtered_together(model):
        se.set_softness(model, 0)
        kernel = model.layers[0].weight
        assert torch.allclose(kernel, kernel.rot90(1, (-2, -1)), atol=1e-6)
        set_gain(next(se.soft_weights(model)), se.softness(1))
        assert model.layers[0].weight is next(se.soft_weights(model)).stored


def test_a_context_that_is_kept_follows_the_model():
    model, x = net(), batch()
    once = se.filtered_together(model)
    with once:
        pass
    for weight in se.soft_weights(model):
        set_gain(weight, se.least_distortion(0.05, se.degrees(30)))
    expected = gradients(model, x)
    with once:
        assert all(prepared(model))
        assert_same(gradients(model, x), expected)
    model.double()
    expected = gradients(model, x.double())
    with once:
        assert all(prepared(model))
        assert_same(gradients(model, x.double()), expected, torch.float64)
    se.bake(model)
    with once:
        model(x.double())


def test_a_fused_step_in_an_inner_context_is_seen_in_the_outer_one():
    model, other, x = net(), net(), batch()
    with se.filtered_together(model):
        for m in (model, other):
            with se.filtered_together(m):
                loss_of(m, x).backward()
                torch.optim.AdamW(m.parameters(), lr=0.01, fused=True).step()
                m.zero_grad()
        assert_same(gradients(model, x), gradients(other, x))


def test_an_exception_ends_it():
    model = net()
    with pytest.raises(ZeroDivisionError), se.filtered_together(model):
        raise ZeroDivisionError
    assert not any(prepared(model))


def test_a_weight_softened_inside_is_filtered_at_access():
    model = net()
    with se.filtered_together(model):
        late = nn.Conv2d(3, 8, 5)
        model.late = late
        soften_weight(late, "weight", Soft(se.grid(se.C(4), 5, 5), se.softness(0)))
        assert torch.allclose(late.weight, late.weight.rot90(1, (-2, -1)), atol=1e-6)


@EVERY_GAIN
def test_two_layers_may_share_one_tensor(how):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 3, 5, padding=2), nn.Conv2d(3, 3, 5, padding=2))
    model[1].weight = model[0].weight
    se.soften(model, "SO(2)", **how)
    expected = gradients(model, batch())
    with se.filtered_together(model):
        assert_same(gradients(model, batch()), expected)


@EVERY_GAIN
def test_checkpointed_activations(how):
    model, x = net(**how), batch().requires_grad_()
    expected = gradients(model, x)
    first, rest = model.layers[:3], model.layers[3:]
    with se.filtered_together(model):
        y = checkpoint(first, x, use_reentrant=False)
        loss = checkpoint(rest, y, use_reentrant=False).square().mean()
        loss.backward()
    assert_same((loss.detach(), [p.grad for p in model.parameters()]), expected)


def test_a_functional_call_uses_the_tensors_it_is_given():
    model, x = net(), batch()
    others = {name: 2 * parameter.detach() for name, parameter in model.named_parameters()}
    expected = torch.func.functional_call(model, others, x)
    with se.filtered_together(model):
        assert torch.allclose(torch.func.functional_call(model, others, x), expected)


def test_a_copy_made_inside_filters_for_itself():
    model, x = net(), batch()
    expected = gradients(model, x)
    with se.filtered_together(model):
        copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model.layers[0].parametrizations.weight[0]))]
    assert not any(prepared(copies[0])) and copies[1].ready.weight is None
    assert_same(gradients(copies[0], x), expected)


def test_nothing_prepared_enters_the_state():
    model = net()
    names = set(model.state_dict())
    with se.filtered_together(model):
        assert set(model.state_dict()) == names


@pytest.mark.slow
def test_a_compiled_model_filters_in_its_own_graph():
    model, x = net(), batch()
    expected = gradients(model, x)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with se.filtered_together(model):
        loss = compiled(x).square().mean()
        loss.backward()
        assert_same((loss.detach(), [p.grad for p in model.parameters()]), expected)


def test_a_model_in_project_mode_or_without_soft_weights_is_left_alone():
    model = net(softness=0.5, mode="project")
    with se.filtered_together(model), se.filtered_together(nn.Linear(2, 2)):
        assert not any(prepared(model))


def test_what_is_no_model_is_refused():
    with pytest.raises(se.SoftEquivError, match="must be a torch module"):
        se.filtered_together(lambda x: x)
