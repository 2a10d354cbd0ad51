"""A pass of a model filters all weights at once, which are those filtered at each access: values and gradients."""

import copy
import pickle
import threading

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from transformers import ViTConfig, ViTForImageClassification

import softequiv as se
from draws import as_trained
from softequiv.nn import FilteredWeight, Soft, SoftLinear, filtered_together, set_gain, several, soften_weight, together
from softequiv.nn.together import AtOnce

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


def loss_of(answers):
    return getattr(answers, "logits", answers).square().mean()


def gradients(model, x, call=None):
    """The loss and the gradient of every parameter, which must not have one yet."""
    loss = loss_of((call or model)(x))
    loss.backward()
    found = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    model.zero_grad(set_to_none=True)
    return loss.detach(), found


def at_each_access(model, x):
    """The same without the model's own hooks, which come with its call."""
    return gradients(model, x, model.forward)


def assert_same(found, expected, dtype=torch.float32):
    assert torch.allclose(found[0], expected[0], rtol=ROUNDING[dtype])
    for a, b in zip(found[1], expected[1], strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert a.dtype == b.dtype
            assert float((a - b).abs().max()) <= ROUNDING[dtype] * float(b.abs().max())


def in_a_pass(model, x, look):
    """What `look` finds at the end of a pass of the model."""
    found = []
    inner = list(model.modules())[-1] if not hasattr(model, "layers") else model.layers
    hook = inner.register_forward_hook(lambda *_: found.append(look()))
    model(x)
    hook.remove()
    return found[0]


def ready(model):
    """Which weights are ready."""
    return [step.ready.weight is not None for step in model.modules() if isinstance(step, FilteredWeight)]


def served_once(model, x):
    """Whether a pass of the model has filtered every weight ahead, so that each access gives one tensor."""
    weights = list(se.soft_weights(model))

    def one_tensor():
        return [weight.value() is weight.value() for weight in weights]

    return all(in_a_pass(model, x, one_tensor))


EVERY_GAIN = pytest.mark.parametrize("how", GAINS.values(), ids=GAINS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@EVERY_GAIN
def test_values_and_gradients_are_those_without_it(how, dtype):
    model, x = net(dtype, **how), batch(dtype)
    weights = list(se.soft_weights(model))
    expected = [weight.value().detach() for weight in weights]
    values = in_a_pass(model, x, lambda: [weight.value().detach() for weight in weights])
    for value, alone in zip(values, expected, strict=True):
        assert torch.allclose(value, alone, rtol=ROUNDING[dtype], atol=ROUNDING[dtype])
    assert_same(gradients(model, x), at_each_access(model, x), dtype)


@EVERY_GAIN
def test_each_weight_is_filtered_once_a_pass_and_at_each_access_outside(how):
    model, x = net(**how), batch()
    assert served_once(model, x)
    outside = [weight.value() is weight.value() for weight in se.soft_weights(model)]
    assert not any(outside)


def test_a_vision_transformer_with_its_table_of_positions():
    torch.manual_seed(0)
    config = ViTConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, image_size=32, patch_size=8
    )
    model = se.soften(ViTForImageClassification(config).eval(), "SO(2)", error=0.1, within="30deg")
    assert any("position" in weight.name for weight in se.soft_weights(model))
    x = torch.randn(2, 3, 32, 32)
    assert served_once(model, x)
    assert_same(gradients(model, x), at_each_access(model, x))


SPACES = {
    "scalars and vectors": 4 * se.scalar(se.SO(3)) + 4 * se.vector(se.SO(3)),
    "regular": 4 * se.regular(se.C(4)),
}


@pytest.mark.parametrize("gain", [se.least_distortion(0.1, se.degrees(90)), se.softness(0.5)], ids=str)
@pytest.mark.parametrize("space", SPACES.values(), ids=SPACES)
def test_a_network_of_soft_layers_gains_by_it_when_asked(space, gain):
    torch.manual_seed(0)
    layers = [as_trained(SoftLinear(space, space, gain=gain)) for _ in range(2)]
    model, x = nn.Sequential(*layers), torch.randn(5, space.dim)
    expected = gradients(model, x)
    hooks = filtered_together(model)
    assert_same(gradients(model, x), expected)
    at_once = []
    look = model[1].register_forward_pre_hook(lambda layer, _: at_once.append(layer.weight is layer.weight))
    model(x)
    look.remove()
    hooks.remove()
    assert at_once == [True]
    assert not model._forward_hooks and not model._forward_pre_hooks and not model._forward_hooks_always_called


@EVERY_GAIN
def test_frozen_weights_stay_frozen(how):
    model, x = net(**how), batch()
    frozen = list(se.soft_weights(model))[1::2]
    for weight in frozen:
        weight.stored.requires_grad_(False)
    assert not any(in_a_pass(model, x, lambda: [weight.value().requires_grad for weight in frozen]))
    assert_same(gradients(model, x), at_each_access(model, x))


@EVERY_GAIN
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_pass_without_gradients_leaves_nothing_behind(how, mode):
    model, x = net(**how), batch()
    expected = at_each_access(model, x)
    with mode():
        assert torch.allclose(model(x).square().mean(), expected[0])
    assert not any(ready(model))
    assert_same(gradients(model, x), expected)


@EVERY_GAIN
def test_the_gradient_of_a_gradient(how):
    model, x = net(**how), batch()
    stored = [weight.stored for weight in se.soft_weights(model)]

    def twice(call):
        first = torch.autograd.grad(loss_of(call(x)), stored, create_graph=True)
        return torch.zeros(()), torch.autograd.grad(sum(g.square().sum() for g in first), stored)

    assert_same(twice(model), twice(model.forward))


@EVERY_GAIN
def test_many_gradients_at_once(how):
    model, x = net(**how), batch()
    stored = [weight.stored for weight in se.soft_weights(model)]
    answers = model(x)[0, 0, 0]
    together = torch.autograd.grad(answers, stored, torch.eye(len(answers)), is_grads_batched=True, retain_graph=True)
    apart = [torch.autograd.grad(answer, stored, retain_graph=True) for answer in answers]
    assert_same((torch.zeros(()), together), (torch.zeros(()), [torch.stack(g) for g in zip(*apart, strict=True)]))


@EVERY_GAIN
def test_autocast_leaves_the_filter_in_float32(how):
    model, x = net(**how), batch()
    weights = list(se.soft_weights(model))
    expected = [weight.value().detach() for weight in weights]
    with torch.autocast("cpu", torch.bfloat16):
        values = in_a_pass(model, x, lambda: [weight.value().detach() for weight in weights])
        assert model(x).dtype == torch.bfloat16
    for value, alone in zip(values, expected, strict=True):
        assert torch.allclose(value, alone, rtol=1e-5, atol=1e-6)


@EVERY_GAIN
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("kind", [{"foreach": False}, {"foreach": True}, {"fused": True}], ids=str)
def test_what_an_optimiser_changes_is_seen(how, optimizer, kind):
    model, other, x = net(**how), net(**how), batch()
    steps = [optimizer(m.parameters(), lr=0.01, **kind) for m in (model, other)]
    for _ in range(2):  # the second step sees what the first has changed
        for call, step in zip((model, other.forward), steps, strict=True):
            loss_of(call(x)).backward()
            step.step()
            step.zero_grad()
    for mine, theirs in zip(se.soft_weights(model), se.soft_weights(other), strict=True):  # also outside a pass
        assert torch.allclose(mine.value(), theirs.value(), rtol=1e-4, atol=1e-6)
    assert_same(gradients(model, x), at_each_access(model, x))


@EVERY_GAIN
def test_what_is_written_through_data_is_seen(how):
    model, x = net(**how), batch()
    gradients(model, x)
    for parameter in model.parameters():
        parameter.data.mul_(2)
    assert_same(gradients(model, x), at_each_access(model, x))
    before = model.layers[0].weight
    model.layers[0].parametrizations.weight.original.data.mul_(2)
    assert torch.allclose(model.layers[0].weight, 2 * before, rtol=1e-4)


@EVERY_GAIN
def test_gradients_may_gather_over_several_passes(how):
    model, other, x = net(**how), net(**how), batch()
    for part in x.split(1):
        for call in (model, other.forward):
            (loss_of(call(part)) + loss_of(call(2 * part))).backward()
    found, expected = ([p.grad for p in m.parameters()] for m in (model, other))
    assert_same((torch.zeros(()), found), (torch.zeros(()), expected))


@EVERY_GAIN
def test_a_graph_may_be_kept_for_a_second_backward_pass(how):
    model, x = net(**how), batch()
    loss = loss_of(model(x))
    loss.backward(retain_graph=True)
    loss.backward()
    twice = [p.grad / 2 for p in model.parameters()]
    model.zero_grad(set_to_none=True)
    assert_same((loss.detach(), twice), at_each_access(model, x))


def test_a_gradient_goes_through_the_filter_of_its_forward_pass():
    model, x = net(softness=0.5), batch()
    expected = gradients(model, x)
    loss = loss_of(model(x))
    se.set_softness(model, 0)
    loss.backward()
    assert_same((loss.detach(), [p.grad for p in model.parameters()]), expected)


@EVERY_GAIN
def test_a_part_called_by_itself_filters_at_each_access(how):
    model, x = net(**how), batch()
    model.layers[:2](x).square().mean().backward()
    kept = [weight.stored.grad is not None for weight in se.soft_weights(model)]
    assert kept == [True] * 2 + [False] * (len(kept) - 2)


@EVERY_GAIN
def test_a_weight_that_no_loss_uses_has_no_gradient(how):
    model, x = net(**how), batch()
    part = in_a_pass(model, x, lambda: model.layers[:2](x))
    part.square().mean().backward()
    kept = [weight.stored.grad is not None for weight in se.soft_weights(model)]
    assert kept == [True] * 2 + [False] * (len(kept) - 2)


class Towers(nn.Module):
    """Two parts with an answer each; or with a backward pass inside the forward pass."""

    def __init__(self, within=False):
        super().__init__()
        self.left, self.right, self.within = nn.Conv2d(3, 4, 5), nn.Conv2d(3, 4, 3), within

    def forward(self, x):
        if self.within:
            torch.autograd.grad(self.left(x).square().mean(), list(self.left.parameters()))
        return self.left(x), self.right(x)


@EVERY_GAIN
@pytest.mark.parametrize("within", [False, True])
def test_each_part_has_a_backward_pass_of_its_own(how, within):
    torch.manual_seed(0)
    model, x = se.soften(Towers(within), "SO(2)", **how), batch()
    for call in (model, model.forward):
        for part, answer in zip((model.left, model.right), call(x), strict=True):
            answer.square().mean().backward()
            assert all(p.grad is not None for p in part.parameters())
    found = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    for answer in model.forward(x):
        (2 * answer.square().mean()).backward()
    assert_same((torch.zeros(()), found), (torch.zeros(()), [p.grad for p in model.parameters()]))


def test_a_softness_changed_in_a_pass_holds_at_once():
    model, x = net(), batch()

    def turned():
        se.set_softness(model, 0)
        kernel = model.layers[0].weight
        set_gain(next(se.soft_weights(model)), se.softness(1))
        return kernel, model.layers[0].weight

    kernel, free = in_a_pass(model, x, turned)
    assert torch.allclose(kernel, kernel.rot90(1, (-2, -1)), atol=1e-6)
    assert free is next(se.soft_weights(model)).stored


def test_it_follows_the_model():
    model, x = net(), batch()
    for weight in se.soft_weights(model):
        set_gain(weight, se.least_distortion(0.05, se.degrees(30)))
    assert served_once(model, x)
    assert_same(gradients(model, x), at_each_access(model, x))
    model.double()
    assert served_once(model, x.double())
    assert_same(gradients(model, x.double()), at_each_access(model, x.double()), torch.float64)
    se.bake(model)
    assert not model._forward_hooks and not model._forward_pre_hooks


def test_asking_twice_leaves_one_hook():
    model = net()
    filtered_together(model)
    assert served_once(model, batch())
    assert sum(isinstance(hook, AtOnce) for hook in model._forward_pre_hooks.values()) == 1


@EVERY_GAIN
def test_a_soft_part_of_a_larger_model_is_filtered_once(how):
    part, x = net(**how), batch()
    model = nn.Sequential(part)
    filtered_together(model)
    (outer,) = model._forward_pre_hooks.values()
    assert {weight.filtered.ready.during for weight in se.soft_weights(model)} == {None}
    made_for = in_a_pass(part, x, lambda: {id(w.filtered.ready.during) for w in se.soft_weights(part)})
    assert made_for != {id(outer)}
    hook = part.layers.register_forward_hook(
        lambda *_: made_for.update(id(w.filtered.ready.during) for w in se.soft_weights(part))
    )
    made_for.clear()
    model(x)
    hook.remove()
    assert made_for == {id(outer)}
    assert_same(gradients(model, x), at_each_access(part, x))


def test_an_exception_ends_the_pass():
    model, x = net(), batch()
    weights = list(se.soft_weights(model))
    hook = model.layers[-1].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(x)
    hook.remove()
    assert not any(weight.value() is weight.value() for weight in weights)


def test_an_interrupt_leaves_nothing_to_bake():
    model, x = net(), batch()

    def interrupt(*_):
        raise KeyboardInterrupt

    hook = model.layers[-1].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(x)
    hook.remove()
    expected = 2 * model.layers[0].weight.detach()
    for parameter in model.parameters():
        parameter.data.mul_(2)
    assert torch.allclose(se.bake(model, copy=True).layers[0].weight, expected, atol=1e-6)
    assert_same(gradients(model, x), at_each_access(model, x))


@pytest.mark.parametrize("again", [False, True])
def test_threads_may_serve_a_model_while_its_dial_is_turned(again, monkeypatch):
    model, x, sharing, other = net(softness=0.5), batch(), together.sharing, []
    model(x)
    se.set_softness(model, 0.2)

    def interrupted(filters):
        """Another thread has its turn while this one finds out which weights go together."""
        monkeypatch.setattr(together, "sharing", sharing)
        if again:
            se.set_softness(model, 0.8)
        thread = threading.Thread(target=lambda: other.append(model(x)))
        thread.start()
        thread.join()
        return sharing(filters)

    monkeypatch.setattr(together, "sharing", interrupted)
    model(x)
    for answer in (*other, model(x)):
        assert torch.allclose(answer, model.forward(x), atol=1e-6)


def test_a_weight_softened_in_a_pass_is_filtered_at_access():
    model = net()

    def late():
        layer = nn.Conv2d(3, 8, 5)
        soften_weight(layer, "weight", Soft(se.grid(se.C(4), 5, 5), se.softness(0)))
        return layer.weight

    kernel = in_a_pass(model, batch(), late)
    assert torch.allclose(kernel, kernel.rot90(1, (-2, -1)), atol=1e-6)


def test_small_weights_of_a_kind_are_joined_and_large_ones_are_not(monkeypatch):
    joined: list[int] = []
    flatten = torch._C._nn.flatten_dense_tensors
    monkeypatch.setattr(torch._C._nn, "flatten_dense_tensors", lambda own: joined.append(len(own)) or flatten(own))
    small = gradients(net(softness=0.5), batch())
    assert max(joined) > 1
    joined.clear()
    monkeypatch.setattr(several, "LARGE", 1)
    assert_same(gradients(net(softness=0.5), batch()), small)
    assert set(joined) == {1}


@EVERY_GAIN
def test_two_layers_may_share_one_tensor(how):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 3, 5, padding=2), nn.Conv2d(3, 3, 5, padding=2))
    model[1].weight = model[0].weight
    se.soften(model, "SO(2)", **how)
    assert_same(gradients(model, batch()), at_each_access(model, batch()))


class Checkpointed(Net):
    """Activations of both halves are computed again in the backward pass."""

    reentrant = False

    def forward(self, x):
        y = checkpoint(self.layers[:3], x, use_reentrant=self.reentrant)
        return checkpoint(self.layers[3:], y, use_reentrant=self.reentrant)


@EVERY_GAIN
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("passes", [1, 2])
def test_checkpointed_activations(how, reentrant, passes):
    torch.manual_seed(0)
    model, x = se.soften(Checkpointed(), "SO(2)", **how), batch().requires_grad_()
    expected = gradients(model, x, lambda x: model.layers(x))
    model.reentrant = reentrant
    loss = loss_of(model(x))
    for _ in range(passes):
        loss.backward(retain_graph=passes > 1)
    assert_same((loss.detach(), [p.grad / passes for p in model.parameters()]), expected)


@EVERY_GAIN
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("both", [False, True])
def test_checkpointed_parts_beside_the_whole(how, reentrant, both):
    torch.manual_seed(0)
    part = Checkpointed()
    part.reentrant = reentrant
    model, x = se.soften(nn.Sequential(part, nn.Conv2d(4, 4, 5)), "SO(2)", **how), batch().requires_grad_()
    whole = loss_of(model(x))
    if not both:
        whole.backward()
        model.zero_grad(set_to_none=True)
        for parameter in model.parameters():
            parameter.data.mul_(2)
    found = gradients(model, x, lambda x: part(x).square() + (whole if both else 0))
    expected = gradients(model, x, lambda x: part.layers(x).square() + (loss_of(model.forward(x)) if both else 0))
    assert_same(found, expected)


@EVERY_GAIN
def test_activations_of_which_products_are_kept(how):
    def kept():
        return create_selective_checkpoint_contexts([torch.ops.aten.mm.default, torch.ops.aten._to_copy.default])

    class Selective(Net):
        def forward(self, x):
            return checkpoint(self.layers, x, use_reentrant=False, context_fn=kept)

    torch.manual_seed(0)
    model, x = se.soften(Selective(), "SO(2)", **how), batch().requires_grad_()
    expected = gradients(model, x, lambda x: model.layers(x))
    assert_same(gradients(model, x), expected)
    assert_same(at_each_access(model, x), expected)


@EVERY_GAIN
def test_activations_are_kept_of_a_part_with_hooks_of_its_own(how):
    def kept():
        return create_selective_checkpoint_contexts([torch.ops.aten.mm.default, torch.ops.aten.convolution.default])

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.part = net(**how)

        def forward(self, x):
            return checkpoint(self.part, x, use_reentrant=False, context_fn=kept)

    model, x = Outer(), batch().requires_grad_()
    filtered_together(model)
    assert_same(gradients(model, x), gradients(model, x, model.part.forward))


@EVERY_GAIN
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_layer_inside_and_outside_of_a_checkpoint(how, reentrant):
    class Twice(nn.Sequential):
        def forward(self, x):
            return self[0](checkpoint(self[0], x, use_reentrant=reentrant))

    torch.manual_seed(0)
    model, x = se.soften(Twice(nn.Conv2d(3, 3, 5, padding=2)), "SO(2)", **how), batch().requires_grad_()
    assert_same(gradients(model, x), gradients(model, x, lambda x: model[0](model[0](x))))


@EVERY_GAIN
def test_a_functional_call_uses_the_tensors_it_is_given(how):
    model, x = net(**how), batch()
    others = {name: 2 * parameter.detach() for name, parameter in model.named_parameters()}
    doubled = copy.deepcopy(model)
    doubled.load_state_dict(others, strict=False)
    assert torch.allclose(torch.func.functional_call(model, others, x), doubled.forward(x), atol=1e-6)
    both = {name: torch.stack([parameter.detach()] * 2) for name, parameter in model.named_parameters()}
    stacked = torch.vmap(lambda own: torch.func.functional_call(model, own, x))(both)
    assert torch.allclose(stacked[1], model(x), atol=1e-5)


@EVERY_GAIN
def test_derivatives_in_forward_mode(how):
    model, x = net(**how), batch()
    names, values = zip(*model.named_parameters(), strict=True)
    along = [torch.randn_like(value) for value in values]
    found = torch.autograd.grad(loss_of(model.forward(x)), values)
    expected = sum(float((g * v).sum()) for g, v in zip(found, along, strict=True))
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(value, v) for value, v in zip(values, along, strict=True)]
        answers = torch.func.functional_call(model, dict(zip(names, duals, strict=True)), x)
        tangent = forward_ad.unpack_dual(loss_of(answers)).tangent
    assert float(tangent.detach()) == pytest.approx(expected, rel=1e-4)


@EVERY_GAIN
def test_gradients_for_many_directions_at_once(how):
    model, x = net(**how), batch()
    parameters = list(model.parameters())

    def rows(call):
        losses = call(x).square().mean((1, 2, 3))
        return torch.vmap(lambda v: torch.autograd.grad(losses, parameters, v, retain_graph=True))(torch.eye(2))

    for found, expected in zip(rows(model), rows(model.forward), strict=True):
        assert torch.allclose(found, expected, rtol=1e-4, atol=1e-6)


@EVERY_GAIN
def test_gradients_that_carry_tangents(how):
    model, x = net(**how), batch()
    parameters, along = list(model.parameters()), torch.randn(2, 4, 9, 9)

    def tangents(call):
        answers = call(x)
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(torch.ones_like(answers), along)
            return [forward_ad.unpack_dual(g).tangent for g in torch.autograd.grad(answers, parameters, dual)]

    for found, expected in zip(tangents(model), tangents(model.forward), strict=True):
        assert torch.allclose(found, expected, rtol=1e-4, atol=1e-5)


@EVERY_GAIN
def test_a_copy_filters_for_itself(how):
    model, x = net(**how), batch()
    expected = gradients(model, x)
    made = in_a_pass(model, x, lambda: copy.deepcopy(model))
    step = pickle.loads(pickle.dumps(model.layers[0].parametrizations.weight[0]))
    assert step.ready.weight is None and not any(ready(made))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert_same(gradients(made, x), expected)
    assert served_once(made, x)


def test_nothing_prepared_enters_the_state():
    model = net()
    names = set(model.state_dict())
    assert in_a_pass(model, batch(), lambda: set(model.state_dict())) == names


@pytest.mark.slow
def test_a_compiled_model_filters_in_its_own_graph():
    model, x = net(), batch()
    expected = at_each_access(model, x)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    loss = compiled(x).square().mean()
    loss.backward()
    assert_same((loss.detach(), [p.grad for p in model.parameters()]), expected)
    assert not any(ready(model))


def test_what_torch_compile_returned_may_be_softened():
    model = Net()
    compiled = torch.compile(model, backend="eager")
    se.soften(compiled, "SO(2)", softness=0.5)
    assert not compiled._forward_pre_hooks and served_once(model, batch())
    assert torch.allclose(compiled(batch()), model(batch()), atol=1e-6)


def test_a_model_in_project_mode_or_without_soft_weights_is_left_alone():
    for model in (net(softness=0.5, mode="project"), nn.Linear(2, 2)):
        filtered_together(model).remove()
        assert not model._forward_hooks and not model._forward_pre_hooks


def test_what_is_no_model_is_refused():
    with pytest.raises(se.SoftEquivError, match="must be a torch module"):
        se.filtered_together(lambda x: x)
