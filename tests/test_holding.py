"""Does each piece that is to hold the whole network do what its formula says?"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import softequiv as se
from digits import digits, trained
from softequiv.actions import Moves, Pictures, Points, Still, Tokens
from softequiv.baselines.penalty import Penalised
from softequiv.errors import SoftEquivError, WeightError
from softequiv.gains import least_distortion
from softequiv.holding import (
    HeldByMeasurement,
    HeldCallback,
    Mixture,
    freeze_rest,
    limit_gain,
    noisy,
    split_target,
    total_variation,
    untouched,
)
from softequiv.holding.gain import schatten_norm
from softequiv.nn import soft_weights, soften_weight

QUARTERS = Moves(Pictures(), se.C(4), elements=list(se.C(4).elements())[1:])


def reader(seed: int = 0) -> nn.Sequential:
    """A small network for digits that tells directions apart everywhere."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(),
        nn.Flatten(), nn.Linear(256, 10),
    )  # fmt: skip


def invariant_reader(seed: int = 0) -> nn.Sequential:
    """A network that quarter turns do not change, once its kernels are softened to 0."""
    torch.manual_seed(seed)
    net = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10),
    )  # fmt: skip
    return se.soften(net, "C4", softness=0.0)


@torch.no_grad()
def turned_kl(model: Callable[[Tensor], Tensor], x: Tensor) -> float:
    """mean KL[F(x) || F(g x)] over the three quarter turns, from the formula."""
    p = model(x).double().log_softmax(1)
    turned = [model(x.rot90(k, (-2, -1))).double().log_softmax(1) for k in (1, 2, 3)]
    return sum(float((p.exp() * (p - q)).sum(1).mean()) for q in turned) / 3


# A target held by a price


@pytest.fixture(scope="module")
def plain_kl() -> float:
    return turned_kl(trained(reader(), digits(), 10, 3e-3), digits()[0][:600])


@pytest.mark.parametrize("target", [0.1, 0.6])
def test_training_ends_at_the_target(target: float, plain_kl: float) -> None:
    held = HeldByMeasurement(QUARTERS, target)
    found = turned_kl(trained(reader(), digits(), 10, 3e-3, held), digits()[0][:600])
    assert plain_kl > 5  # else nothing was to be held
    assert 0.6 * target < found < 1.4 * target
    assert held.price > 0


def test_a_loose_target_is_plain_training() -> None:
    held = HeldByMeasurement(QUARTERS, target=1e3)
    free, loose = trained(reader(), digits(), 2, 3e-3), trained(reader(), digits(), 2, 3e-3, held)
    assert held.price == 0 and held.calls == 50
    for one, other in zip(free.parameters(), loose.parameters(), strict=True):
        assert torch.allclose(one, other, atol=1e-4)  # to rounding: batches are larger


def test_the_price_follows_its_recursion() -> None:
    """Against a model whose error is known: answers turn from one side to the other by a fixed margin."""
    scale = nn.Parameter(torch.tensor(1.0))

    class Leaning(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            lean = scale * x.flatten(1)[:, :1]
            return torch.cat([lean, -lean], 1)

    x = torch.zeros(6, 1, 2, 2)
    x[:, 0, 0, 0] = 1  # every turn moves the one pixel that is looked at
    held = HeldByMeasurement(QUARTERS, target=0.05, rate=0.3, divergence="squared", share=0.5)
    model, level, mean = Leaning(), 0.0, None
    for size in [0.4, 0.2, 0.15, 0.1, *[0.01] * 40]:
        with torch.no_grad():
            scale.fill_(size)
        term = held.term(model, x)
        error = 2 * size**2
        mean = error if mean is None else 0.9 * mean + 0.1 * error
        over = min(mean / 0.05 - 1, 1.0)
        level = max(0.0, level + 0.3 * over)
        price = max(0.0, level + over)
        assert held.price == pytest.approx(price, rel=1e-4)
        assert float(term.detach()) == pytest.approx(price * (error - 0.05), rel=1e-4)
    assert held.price == 0 == term and not term.requires_grad


@pytest.mark.parametrize(("share", "measured"), [(0.5, 6), (1.0, 12), (0.25, 3), (0.01, 1)])
def test_the_stated_cost_is_the_cost(share: float, measured: int) -> None:
    """1 + share forward passes a step, and one sample at least; twice the share in a loop of one's own."""
    seen = []
    net, x = reader(), torch.rand(12, 1, 8, 8)
    net.register_forward_pre_hook(lambda _, args: seen.append(len(args[0])))
    held = HeldByMeasurement(QUARTERS, 0.1, share=share)
    held(net, x, torch.zeros(12).long(), functional.cross_entropy)
    held.term(net, x)
    assert seen == [12 + measured, 2 * measured] and held.calls == 2


def test_the_loss_sees_moved_targets_where_it_is_told_how_they_move() -> None:
    x, quarter = torch.rand(4, 1, 8, 8), Moves(Pictures(), se.C(4), elements=list(se.C(4).elements())[1:2])
    seen: list[tuple[Tensor, Tensor]] = []

    def loss(answers: Tensor, known: Tensor) -> Tensor:
        seen.append((answers.detach(), known))
        return answers.mean()

    upright = HeldByMeasurement(quarter, 1.0, divergence="squared", outputs=Pictures())
    upright(nn.Identity(), x, x, loss)
    both = HeldByMeasurement(quarter, 1.0, share=0.5, divergence="squared", outputs=Pictures(), targets=Pictures())
    both(nn.Identity(), x, x, loss)
    turned = torch.cat([x, x[:2].rot90(1, (-2, -1))])
    assert all(torch.equal(found, x) for found in seen[0])
    assert all(torch.allclose(found, turned, atol=1e-6) for found in seen[1])
    HeldByMeasurement(quarter, 1.0, targets=se.Still())(reader(), x, torch.arange(4) % 3, functional.cross_entropy)


def test_batch_norms_add_nothing_to_the_error() -> None:
    """An invariant network is found to be so in training mode: upright and moved samples share their statistics."""
    torch.manual_seed(0)
    parts = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.BatchNorm1d(1), nn.Linear(1, 3)]
    net, x = nn.Sequential(*parts), torch.rand(8, 1, 8, 8)
    held = HeldByMeasurement(QUARTERS, 1e-5)
    for term in (held.term(net, x), held(net, x, torch.zeros(8).long(), lambda answers, _: 0 * answers.sum())):
        assert held.error < 1e-7 and held.price == 0 == term


def test_state_survives_an_interruption() -> None:
    def steps(net: nn.Module, held: HeldByMeasurement, numbers: range) -> None:
        for number in numbers:
            generator = torch.Generator().manual_seed(number)
            x, y = (part[32 * number : 32 * number + 32] for part in digits())
            net.zero_grad()
            held(net, x, y, functional.cross_entropy, generator).backward()
            with torch.no_grad():
                for weight in net.parameters():
                    weight -= 1e-3 * weight.grad

    whole, through = trained(reader(), digits(), 2, 1e-2), HeldByMeasurement(QUARTERS, 0.5)
    first, before = copy.deepcopy(whole), HeldByMeasurement(QUARTERS, 0.5)
    steps(whole, through, range(20))
    steps(first, before, range(11))
    after = HeldByMeasurement(QUARTERS, 0.5)
    after.load_state_dict(before.state_dict())
    steps(first, after, range(11, 20))
    assert after.price == through.price > 0 and after.error == through.error
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), first.parameters(), strict=True))


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"target": 0}, "softness=0"),
        ({"target": math.nan}, "above 0"),
        ({"target": 1, "rate": -1}, "rate"),
        ({"target": 1, "rate": 0}, "got 0$"),
        ({"target": 1, "share": 1.5}, "up to 1"),
        ({"target": 1, "share": "a"}, "share is a number; got 'a', a str"),
        ({"target": "a"}, "the target is a number; got 'a', a str"),
        ({"target": 1, "divergence": "l2"}, "unknown divergence"),
    ],
)
def test_wrong_settings_are_refused(wrong: dict[str, Any], sentence: str) -> None:
    with pytest.raises(SoftEquivError, match=sentence):
        HeldByMeasurement(QUARTERS, **wrong)


@pytest.mark.parametrize("number", [np.float32(0.5), np.float64(0.5), np.array(0.5), torch.tensor(0.5)], ids=repr)
def test_numbers_of_numpy_and_torch_are_numbers(number: Any) -> None:
    x, net = torch.randn(40, 1, 8, 8), reader()
    held = HeldByMeasurement(QUARTERS, number, share=number, rate=number)
    mixture = Mixture(net, net, number)
    found = [held.target, held.share, held.rate, Penalised(QUARTERS, number).strength, mixture.eps]
    found += [limit_gain(net, number).limits["0.weight"] / limit_gain(net, 1).limits["0.weight"]]
    found += [se.certify(net, "90deg", "C4", data=x, confidence=number, clip=number).confidence]
    assert all(isinstance(value, float) for value in found) and found == pytest.approx([0.5] * len(found))
    assert mixture.bound(number) == 0.75
    noisy(se.soften(reader(), "C4", softness=1.0), "90deg", number)
    assert split_target(net, number, x, QUARTERS, "90deg") == split_target(net, 0.5, x, QUARTERS, "90deg")


def test_what_moves_samples_must_be_moves() -> None:
    with pytest.raises(SoftEquivError, match=r"such as Moves\(Pictures\(\), 'C4'\); got 'C4', a str"):
        HeldByMeasurement("C4", 0.1)  # type: ignore[arg-type]


def test_a_batch_without_samples_is_refused() -> None:
    held, nothing = HeldByMeasurement(QUARTERS, 0.1), torch.rand(0, 1, 8, 8)
    for ask in (
        lambda: held.term(reader(), nothing),
        lambda: held(reader(), nothing, torch.zeros(0).long(), functional.cross_entropy),
    ):
        with pytest.raises(SoftEquivError, match=r"a batch of \(0, 1, 8, 8\) has no sample"):
            ask()
    assert held.calls == 0


class Shaped(nn.Module):
    """Answers of any shape, which change as the samples move."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.shape = shape

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1)[:, :1].expand(-1, math.prod(self.shape)).unflatten(1, self.shape)


@pytest.mark.parametrize(
    ("shape", "outputs"), [((1,), Still()), ((5, 2), Still()), ((5, 2), Points()), ((1, 8, 8), Pictures())], ids=str
)
def test_a_kl_of_what_is_no_class_score_is_refused(shape: tuple[int, ...], outputs: se.Acts) -> None:
    """Of one number the softmax is 1 whatever happens, and an error of 0 would be reported."""
    x = torch.rand(6, 1, 8, 8)
    held = HeldByMeasurement(QUARTERS, 0.1, outputs=outputs)
    with pytest.raises(SoftEquivError, match=r"a KL is taken of class scores.*give divergence='squared'"):
        held.term(Shaped(*shape), x)
    assert held.calls == 0 and math.isnan(held.error)
    squared = HeldByMeasurement(QUARTERS, 0.1, outputs=outputs, divergence="squared")
    squared.term(Shaped(*shape), x)
    assert squared.error > 0


@pytest.mark.parametrize(
    ("shape", "outputs"), [((2,), Still()), ((4, 3), Tokens(2, 2)), ((3, 8, 8), Pictures())], ids=str
)
def test_class_scores_of_samples_tokens_and_pixels_have_a_kl(shape: tuple[int, ...], outputs: se.Acts) -> None:
    held = HeldByMeasurement(QUARTERS, 0.1, outputs=outputs)
    held.term(Shaped(*shape), torch.rand(6, 1, 8, 8))
    assert held.calls == 1


def test_an_error_that_is_no_number_is_refused() -> None:
    net = reader()
    with torch.no_grad():
        net[0].weight.fill_(math.nan)
    with pytest.raises(SoftEquivError, match="became nan"):
        HeldByMeasurement(QUARTERS, 0.1)(net, torch.rand(4, 1, 8, 8), torch.zeros(4).long(), functional.cross_entropy)


# The same in transformers' Trainer


def tiny_vit() -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.ViTConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, image_size=8, patch_size=2,
        num_channels=1, num_labels=10, initializer_range=0.5, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return transformers.ViTForImageClassification(config)


class Answering(nn.Module):
    """A model that gives its own loss, as those of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.net = trained(reader(), digits(), 1, 1e-2)

    def forward(self, pixel_values: Tensor, labels: Tensor | None = None) -> Any:
        from transformers.modeling_outputs import ImageClassifierOutput

        logits = self.net(pixel_values)
        return ImageClassifierOutput(None if labels is None else functional.cross_entropy(logits, labels), logits)


def trainer(model: Any, folder: Path, held: HeldByMeasurement, steps: int, batch: int = 16, **settings: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    pictures, labels = digits()
    data = [{"pixel_values": x, "labels": y} for x, y in zip(pictures[:320], labels[:320], strict=True)]
    arguments = transformers.TrainingArguments(
        str(folder), max_steps=steps, per_device_train_batch_size=batch, learning_rate=5e-3, report_to=[], use_cpu=True,
        logging_steps=5, save_steps=6, disable_tqdm=True, lr_scheduler_type="constant", **settings,
    )  # fmt: skip
    return transformers.Trainer(model, arguments, train_dataset=data, callbacks=[HeldCallback(held)])


# one element: what is measured does not hang on torch's own generator
QUARTER = Moves(Pictures(), se.C(4), elements=QUARTERS.elements[:1])


def held_target() -> HeldByMeasurement:
    return HeldByMeasurement(QUARTER, 1.0)


def test_trainer_holds_logs_and_resumes(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    through, model = held_target(), Answering()
    run = trainer(model, tmp_path / "a", through, 12)
    run.train()
    assert through.calls == 12 and through.price > 0
    assert run.state.log_history[0]["held_error"] > 0
    assert float(model.train()(digits()[0][:4], torch.zeros(4).long()).loss.detach()) > 0
    assert through.calls == 12  # the hook is off

    half = held_target()
    trainer(Answering(), tmp_path / "b", half, 6).train()
    resumed, again = held_target(), Answering()
    trainer(again, tmp_path / "b", resumed, 12).train(resume_from_checkpoint=str(tmp_path / "b" / "checkpoint-6"))
    assert half.price != resumed.price == pytest.approx(through.price, rel=1e-6)
    assert resumed.calls == 12 and resumed.error == pytest.approx(through.error, rel=1e-5)
    torch.testing.assert_close(again.net[-1].weight, model.net[-1].weight)


def test_trainer_holds_a_model_of_transformers(tmp_path: Path) -> None:
    """Eight steps at a high price bring the answers of a small ViT closer to those under a quarter turn."""
    turned = {}
    for target in (1e-3, 1e6):
        held = HeldByMeasurement(QUARTERS, target, rate=1.0)
        model = tiny_vit()
        trainer(model, tmp_path / str(target), held, 8).train()
        turned[held.price > 0] = turned_kl(lambda x, model=model: model.eval()(x).logits, digits()[0][:100])
    assert turned[True] < 0.5 * turned[False]


class Fixed(HeldByMeasurement):
    """A price of 1, whatever is measured."""

    price = 1.0


def first_gradient(model: Any, folder: Path, held: HeldByMeasurement, batches: int) -> Tensor:
    """Of the last weight, in a step of 16 samples in so many batches, clipped by nothing."""
    transformers = pytest.importorskip("transformers")
    found: list[Tensor] = []

    class Look(transformers.TrainerCallback):
        def on_pre_optimizer_step(self, *_: Any, model: nn.Module, **__: Any) -> None:
            found.append([weight.grad.clone() for weight in model.parameters() if weight.ndim > 1][-1])

    run = trainer(model, folder, held, 1, 16 // batches, gradient_accumulation_steps=batches, max_grad_norm=1e9)
    run.add_callback(Look())
    run.train()
    return found[0]


@pytest.mark.parametrize("build", [tiny_vit, Answering], ids=["the model counts labels", "the Trainer takes the mean"])
def test_a_held_target_weighs_the_same_however_gradients_are_accumulated(
    build: Callable[[], Any], tmp_path: Path
) -> None:
    def gradient(batches: int, held: HeldByMeasurement) -> Tensor:
        return first_gradient(build(), tmp_path / f"{batches}", held, batches)

    plain, whole = (gradient(1, held) for held in (HeldByMeasurement(QUARTER, 1e9), Fixed(QUARTER, 1e-6)))
    assert float((whole - plain).norm()) > 0.1 * float(plain.norm())
    torch.testing.assert_close(gradient(4, Fixed(QUARTER, 1e-6)), whole, rtol=1e-3, atol=1e-5)


class Interrupted(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Digits, of which the 40th that is read breaks off once."""

    def __init__(self) -> None:
        self.read = 0

    def __len__(self) -> int:
        return 64

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        self.read += 1
        if self.read == 40:
            raise OSError("the disk is away")
        pictures, labels = digits()
        return {"pixel_values": pictures[number], "labels": labels[number]}


def test_a_training_begun_again_after_an_interruption_is_charged_once_a_step(tmp_path: Path) -> None:
    held = held_target()
    run = trainer(tiny_vit(), tmp_path, held, 4)
    run.train_dataset = Interrupted()
    with pytest.raises(OSError, match="the disk is away"):
        run.train()
    before = held.calls
    run.train()
    assert held.calls == before + 4


def test_trainer_with_a_loss_of_its_own_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SoftEquivError, match="no loss of its own"):
        trainer(tiny_vit(), tmp_path, held_target(), 2, label_smoothing_factor=0.1).train()


# Noise after soft layers


@pytest.mark.parametrize("within", [se.degrees(30), se.degrees(180)])
def test_noise_has_the_certified_size_in_training_only(within: float) -> None:
    torch.manual_seed(0)
    conv = se.soften(nn.Conv2d(2, 16, 5), "SO(2)", error=0.2, within=se.degrees(30))
    x = torch.randn(64, 2, 9, 9)
    clean = conv(x).detach()
    handle = noisy(conv, within, scale=3.0)
    added = (conv(x) - clean).detach()
    expected = 3 * se.certify(conv, within).error * clean.square().mean().sqrt()
    assert float(added.std()) == pytest.approx(float(expected), rel=0.02)
    assert abs(float(added.mean())) < 0.03 * float(expected)
    assert torch.equal(conv.eval()(x), clean)
    conv.train()
    handle.remove()
    assert torch.equal(conv(x), clean)


def test_white_inputs_change_by_the_certified_ratio() -> None:
    """The statement behind the scale: rms((W_g - W) x) / rms(W x) = ||W_g - W||_F / ||W||_F for white x."""
    torch.manual_seed(0)
    W = torch.randn(8, 1, 3, 3)
    turned = W.rot90(1, (-2, -1))
    x = torch.randn(20000, 1, 3, 3)
    found = functional.conv2d(x, turned - W).square().mean() / functional.conv2d(x, W).square().mean()
    assert float(found.sqrt()) == pytest.approx(float((turned - W).norm() / W.norm()), rel=0.05)


def test_an_exact_layer_gets_no_noise() -> None:
    net, x = invariant_reader(), torch.rand(3, 1, 8, 8)
    clean = net(x)
    noisy(net, se.degrees(90), scale=100.0)
    torch.testing.assert_close(net(x), clean, rtol=1e-3, atol=1e-3)


def test_noise_follows_the_weight_and_lets_gradients_through() -> None:
    conv = se.soften(nn.Conv2d(1, 4, 3), "C4", softness=1.0)
    x = torch.randn(16, 1, 6, 6)
    noisy(conv, se.degrees(90))
    with torch.no_grad():
        weight = next(w for w in soft_weights(conv) if w.attribute == "weight")
        weight.stored.copy_(torch.ones_like(weight.stored))  # at rest under every turn
    assert torch.allclose(conv(x), conv(x), atol=1e-4)
    conv(x).sum().backward()
    assert weight.stored.grad is not None


def test_noise_is_refused_where_it_would_mean_something_else() -> None:
    class Rooted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pos_embed = nn.Parameter(torch.randn(1, 9, 4))
            self.patches = nn.Conv2d(1, 4, 3, stride=3)

        def forward(self, x: Tensor) -> Tensor:
            return self.patches(x).flatten(2).mT + self.pos_embed

    net = se.soften(Rooted(), "C4", softness=1.0)
    with pytest.raises(WeightError, match="pos_embed belongs to the model itself"):
        noisy(net, se.degrees(90))
    assert len(noisy(net, se.degrees(90), skip=["pos_*"]).hooks) == 1
    with pytest.raises(WeightError, match="no soft weights"):
        noisy(reader(), se.degrees(90))
    with pytest.raises(SoftEquivError, match="at least 0"):
        noisy(net, se.degrees(90), scale=-1)


@pytest.mark.parametrize("copied", [True, False])
@pytest.mark.parametrize("mode", ["parametrize", "project"])
def test_a_baked_model_is_plain_and_has_no_noise(copied: bool, mode: str) -> None:
    seen: list[int] = []
    net = se.soften(nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3)), "SO(2)", softness=1.0, mode=mode)
    handle, x = noisy(net, "30deg"), torch.randn(2, 1, 9, 9)
    net[0].register_forward_hook(lambda *_: seen.append(1))  # of the user's own, which stays
    plain = se.bake(net, copy=copied).train()
    assert torch.equal(plain(x), plain(x)) and len(seen) == 2
    assert torch.equal(net(x), net(x)) != copied
    handle.remove()
    assert torch.equal(net(x), net(x))


@pytest.mark.parametrize("soft", [{"softness": 0.5}, {"softness": 1.0}])
def test_noise_without_a_known_size_is_refused(soft: dict[str, float]) -> None:
    """A bilinear turn cannot be undone, and what it does to a weight is bounded by no number that could be used."""
    net = nn.Sequential(nn.Conv2d(1, 4, 5), nn.Flatten(), nn.Linear(25, 4))
    se.soften(net, "C8", action="bilinear", **soft)
    with pytest.raises(WeightError, match=r"0\.weight has a certified error of .*skip=\['0\.weight'\]"):
        noisy(net, "90deg")
    exact = se.soften(nn.Conv2d(1, 4, 5), "C8", **soft)
    noisy(exact, "90deg")
    assert bool(torch.isfinite(exact(torch.rand(2, 1, 9, 9))).all())


def test_what_noise_is_to_skip_must_exist() -> None:
    net = se.soften(nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3)), "SO(2)", softness=1.0)
    with pytest.raises(SoftEquivError, match=r"'2\.wieght' names no soft weight; close to it: 2\.weight"):
        noisy(net, "30deg", skip=["2.wieght"])
    with pytest.raises(SoftEquivError, match=r"given as a list, .* got '0\.weight'"):
        noisy(net, "30deg", skip="0.weight")
    assert len(noisy(net, "30deg", skip=["0"]).hooks) == 1


# Limits on what is downstream


def norms(net: nn.Module) -> dict[str, float]:
    """Spectral norms of all matrices, in full."""
    return {
        name: float(torch.linalg.matrix_norm(weight.detach().flatten(1).double(), 2))
        for name, weight in net.named_parameters()
        if weight.ndim > 1
    }


@pytest.mark.parametrize("bound", [1.0, 1.5])
def test_no_layer_grows_beyond_its_limit(bound: float) -> None:
    free, net = reader(), reader()
    first, limit = norms(net), limit_gain(net, bound)
    optimiser = torch.optim.Adam(net.parameters(), 1e-2)
    optimiser.register_step_post_hook(lambda *_: limit())
    grown = torch.optim.Adam(free.parameters(), 1e-2)
    x, y = (part[:64] for part in digits())
    for _ in range(30):
        for model, steps in ((net, optimiser), (free, grown)):
            steps.zero_grad()
            functional.cross_entropy(model(x), y).backward()
            steps.step()
        assert all(norm <= limit.limits[name] * (1 + 1e-5) for name, norm in norms(net).items())
    assert all(limit.limits[name] <= 1.05 * bound * norm for name, norm in first.items())
    assert max(norm / first[name] for name, norm in norms(free).items()) > 1.6  # else nothing was limited


@pytest.mark.parametrize("shape", [(1, 5), (7, 3), (40, 40), (64, 200)])
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_the_norm_is_that_of_the_singular_values(shape: tuple[int, int], scale: float) -> None:
    matrix = scale * torch.randn(shape, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(matrix.double())
    expected = float(values[0] * (values / values[0]).pow(128).sum().pow(1 / 128))
    assert float(schatten_norm(matrix)) == pytest.approx(expected, rel=1e-5)
    assert float(schatten_norm(torch.zeros(shape))) < 1e-12


def test_soft_layers_and_skipped_ones_are_free() -> None:
    net = invariant_reader()
    assert set(limit_gain(net).limits) == {"6.weight"} and untouched(net) == ["6"]
    assert set(limit_gain(reader(), skip=["0.*"]).limits) == {"3.weight", "6.weight"}
    assert set(limit_gain(reader(), only=["0.*"]).limits) == {"0.weight"}
    assert set(limit_gain(reader(), skip=["0", "3"]).limits) == {"6.weight"}
    with pytest.raises(SoftEquivError, match=r"'7\.wei' names no weight of a linear .*; close to it: 6\.weight"):
        limit_gain(reader(), skip=["7.wei"])
    with pytest.raises(SoftEquivError, match="above 0"):
        limit_gain(reader(), 0)
    with pytest.raises(SoftEquivError, match="left to limit"):
        limit_gain(nn.Sequential(nn.ReLU()))


def test_layers_that_cannot_be_limited_are_named() -> None:
    """A bound times nothing would hold a layer that starts at 0 there; a weight that others make is not scaled back."""
    zero, made = reader(), reader()
    nn.init.zeros_(zero[6].weight)
    nn.utils.parametrizations.weight_norm(made[3])
    for net, sentence, name in ((zero, r"6\.weight is 0 everywhere", "6"), (made, r"3\.weight is no parameter", "3")):
        with pytest.raises(WeightError, match=rf"{sentence}.*skip=\['{name}\.weight'\]"):
            limit_gain(net, 2.0)
        assert len(limit_gain(net, 2.0, skip=[f"{name}.weight"]).limits) == 2


@pytest.mark.parametrize("sizes", [{}, {"kdim": 6, "vdim": 4}])
def test_the_projections_inside_attention_are_limited(sizes: dict[str, int]) -> None:
    net = nn.MultiheadAttention(8, 2, **sizes)
    limit, before = limit_gain(net), norms(net)
    assert set(limit.limits) == set(before)
    with torch.no_grad():
        for weight in net.parameters():
            weight.mul_(7)
    limit()
    assert norms(net) == pytest.approx(before, rel=1e-3)
    assert set(limit_gain(net, only=["out_proj.*"]).limits) == {"out_proj.weight"}


def test_a_limit_exceeds_the_factor_by_what_the_docs_say() -> None:
    """At worst: of a norm that all directions share, one alone is left."""
    layer = nn.Linear(768, 768, bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.eye(768))
    limit = limit_gain(layer)
    with torch.no_grad():
        layer.weight.zero_()[0, 0] = 9.0
    limit()
    assert 1.05 < float(torch.linalg.matrix_norm(layer.weight.detach(), 2)) < 1.06


def test_limits_survive_an_interruption() -> None:
    net = reader()
    limit = limit_gain(net)
    grown = copy.deepcopy(net)
    with torch.no_grad():
        for weight in grown.parameters():
            weight.mul_(3)
    again = limit_gain(grown)
    again.load_state_dict(limit.state_dict())
    again()
    assert norms(grown) == pytest.approx(norms(net), rel=1e-3)
    with pytest.raises(SoftEquivError, match="other layers"):
        limit_gain(invariant_reader()).load_state_dict(limit.state_dict())


def test_only_soft_weights_norms_and_head_learn() -> None:
    model = se.soften(tiny_vit(), "C4", softness=0.5)
    learning = freeze_rest(model, learn=["*cls_token"])
    soft = {id(weight.stored) for weight in soft_weights(model)}
    for name, weight in model.named_parameters():
        expected = id(weight) in soft or "layernorm" in name or name.startswith("classifier") or "cls_token" in name
        assert weight.requires_grad == expected == (name in learning), name
    with pytest.raises(SoftEquivError, match="names no parameter of this model; close to it: classifier"):
        freeze_rest(model, learn=["classifier.wieght"])
    with pytest.raises(SoftEquivError, match="no soft weights"):
        freeze_rest(reader())


class Headed(nn.Module):
    """Heads that stand before what they read from."""

    def __init__(self, *heads: str, outputs: int = 3) -> None:
        super().__init__()
        for name in heads:
            setattr(self, name, nn.Linear(16, outputs))
        self.embed, self.body = nn.Conv2d(1, 8, 3), nn.Linear(8, 16)


class Telling(Headed):
    """Heads that the model itself names."""

    def get_classifier(self) -> Any:
        return self.first, self.second


def test_the_head_learns_wherever_it_stands() -> None:
    def learning(net: nn.Module, learn: tuple[str, ...] = ()) -> set[str]:
        names = freeze_rest(se.soften(net, "C4", softness=0.5), learn)
        return {name.partition(".")[0] for name in names} - {"embed"}

    assert learning(Headed("head")) == {"head"}
    assert learning(Telling("first", "second")) == {"first", "second"}
    with pytest.raises(SoftEquivError, match=r"each of first, second may be the head.*learn=\['first\.\*'\]"):
        learning(Headed("first", "second"))
    assert learning(Headed("first", "second"), ("second",)) == {"second"}
    assert learning(Headed("first", outputs=16)) == {"body"}  # outputs that a layer takes: the last one, as ever
    maps = Headed("scale", outputs=32)
    maps.last = nn.Conv2d(8, 3, 1)
    assert learning(maps) == {"last"}


def test_lora_on_untouched_layers_leaves_soft_ones_alone() -> None:
    peft = pytest.importorskip("peft")
    model = se.soften(tiny_vit(), "C4", error=0.2, within=se.degrees(90))
    certificate = se.certify(model)
    names = [name for name in untouched(model) if name != "classifier"]
    assert len(names) == 6 and not any("projection" in name for name in names)
    tuned = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=names, modules_to_save=["classifier"]))
    optimiser = torch.optim.Adam([weight for weight in tuned.parameters() if weight.requires_grad], 1e-2)
    x, y = (part[:32] for part in digits())
    before = tuned(pixel_values=x).logits.detach()
    for _ in range(3):
        optimiser.zero_grad()
        functional.cross_entropy(tuned(pixel_values=x).logits, y).backward()
        optimiser.step()
    after = tuned(pixel_values=x).logits.detach()
    assert not torch.allclose(before, after)
    merged = tuned.merge_and_unload()
    torch.testing.assert_close(merged(pixel_values=x).logits, after, rtol=1e-4, atol=1e-5)
    assert certificate.verify(merged)


# A mixture at the output


class Fickle(nn.Module):
    """As far from itself as can be: a class for pictures brighter in the upper half, another for all others."""

    def forward(self, x: Tensor) -> Tensor:
        half = x.shape[-2] // 2
        upper = (x[..., :half, :].sum((1, 2, 3)) > x[..., half:, :].sum((1, 2, 3))).to(x.dtype)
        return 1e3 * torch.stack([upper, 1 - upper, *[torch.zeros_like(upper)] * 8], 1)


@torch.no_grad()
def test_the_bound_is_never_violated_and_attained() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(1000, 1, 8, 8, generator=generator)
    strict = invariant_reader()
    for eps in (0.0, 0.03, 0.5, 1.0):
        for free in (reader(1), Fickle()):
            with torch.no_grad():
                for weight in free.parameters():
                    weight.mul_(5)
            mixture = Mixture(strict, free, eps)
            moved = QUARTERS(x, QUARTERS.draw(1000, generator))
            found = total_variation(mixture(x), mixture(moved))
            assert float(found.max()) <= mixture.bound() + 1e-6
            if isinstance(free, Fickle):
                assert float(found.max()) == pytest.approx(mixture.bound(), abs=1e-5)


class Level(nn.Module):
    """Ten classes, all alike whatever is shown, in the precision of the input."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.arange(10.0).to(x).expand(len(x), 10)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("eps", [1e-4, 1e-2])
def test_the_bound_holds_in_half_precision(dtype: torch.dtype, eps: float) -> None:
    """The strict part is exact here, so that nothing but the mixture rounds."""
    x = torch.rand(500, 1, 8, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    mixture = Mixture(Level(), Fickle(), eps)
    found = total_variation(mixture(x), mixture(x.rot90(1, (-2, -1))))
    assert mixture(x).dtype == torch.float32
    assert 0.99 * eps < float(found.max()) <= mixture.bound() + 1e-6


@torch.no_grad()
def test_the_bound_counts_what_the_strict_part_moves() -> None:
    x, strict = torch.rand(200, 1, 8, 8), reader(2)
    moved = x.rot90(1, (-2, -1))
    tv = float(total_variation(strict(x), strict(moved)).max())
    mixture = Mixture(strict, Fickle(), 0.2)
    assert mixture.bound(tv) == 0.2 + 0.8 * tv
    assert float(total_variation(mixture(x), mixture(moved)).max()) <= mixture.bound(tv) + 1e-6


@pytest.mark.parametrize("eps", [0.0, 0.25, 1.0])
def test_probabilities_are_mixed_and_gradients_finite(eps: float) -> None:
    strict, free, x = nn.Linear(4, 3), nn.Linear(4, 3), 50 * torch.randn(6, 4)
    mixture = Mixture(strict, free, eps)
    expected = (1 - eps) * strict(x).softmax(1) + eps * free(x).softmax(1)
    torch.testing.assert_close(mixture(x).exp(), expected)
    mixture(x)[:, 0].sum().backward()
    assert all(weight.grad is None or bool(torch.isfinite(weight.grad).all()) for weight in mixture.parameters())


def test_a_shared_trunk_is_asked_once() -> None:
    trunk = invariant_reader()[:4]
    calls: list[int] = []
    trunk.register_forward_pre_hook(lambda *_: calls.append(1))
    strict = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10))
    mixture = Mixture(strict, nn.Sequential(nn.Flatten(), nn.Linear(512, 10)), 0.3, trunk)
    x = torch.rand(50, 1, 8, 8)
    found = total_variation(mixture(x), mixture(x.rot90(1, (-2, -1)))).detach()
    assert len(calls) == 2 and 0 < float(found.max()) <= mixture.bound() + 1e-6


def test_wrong_mixtures_are_refused() -> None:
    with pytest.raises(SoftEquivError, match="from 0 to 1"):
        Mixture(nn.Identity(), nn.Identity(), 1.2)
    for parts in ((lambda x: x, nn.Identity()), (nn.Identity(), lambda x: x)):
        with pytest.raises(SoftEquivError, match="torch modules; got function: wrap"):
            Mixture(*parts, 0.1)
    with pytest.raises(SoftEquivError, match="torch modules; got str"):
        Mixture(nn.Identity(), nn.Identity(), 0.1, trunk="trunk")
    with pytest.raises(SoftEquivError, match="answer alike"):
        Mixture(nn.Linear(2, 3), nn.Linear(2, 4), 0.5)(torch.rand(1, 2))
    with pytest.raises(SoftEquivError, match="between 0 and 1"):
        Mixture(nn.Identity(), nn.Identity(), 0.5).bound(2)
    with pytest.raises(SoftEquivError, match="a total variation is a number; got 'a', a str"):
        Mixture(nn.Identity(), nn.Identity(), 0.5).bound("a")
    with pytest.raises(SoftEquivError, match="eps is a number; got 'a', a str"):
        Mixture(nn.Identity(), nn.Identity(), "a")


# A target shared out among the layers


def softened(net: nn.Module, errors: dict[str, float]) -> nn.Module:
    """A copy with these certified errors within a quarter turn."""
    net = copy.deepcopy(net)
    for planned in se.plan(net, "C4", softness=0.0).weights:
        soft = type(planned.soft)(
            planned.soft.rep, least_distortion(errors[planned.found.name], se.degrees(90)), planned.soft.layout
        )
        soften_weight(net.get_submodule(planned.found.module), planned.found.attribute, soft)
    return net


@pytest.fixture(scope="module")
def pooled_reader() -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(1, 12, 3, padding=1), nn.ReLU(), nn.Conv2d(12, 12, 3, padding=1), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, 10),
    )  # fmt: skip
    return trained(net, digits(), 6, 1e-2)


@pytest.mark.parametrize("part", [0.5, 0.1, 0.01])
def test_the_split_network_meets_its_target(pooled_reader: nn.Module, part: float) -> None:
    x = digits()[0][:300]
    before = {name: value.clone() for name, value in pooled_reader.state_dict().items()}
    target = part * turned_kl(pooled_reader, x)
    errors = split_target(pooled_reader, target, x, QUARTERS, se.degrees(90))
    net = softened(pooled_reader, errors)
    assert 0.9 * target < turned_kl(net, x) <= 1.001 * target
    found = {weight.name: weight.error for weight in se.certify(net, se.degrees(90)).weights}
    assert all(found[name] <= eta + 1e-5 for name, eta in errors.items())
    assert all(torch.equal(value, before[name]) for name, value in pooled_reader.state_dict().items())


@pytest.mark.parametrize("samples", [1, 2, 5])
def test_few_samples_are_tried_on_every_turn(pooled_reader: nn.Module, samples: int) -> None:
    """With the identity in the pool too, as `soften` has it, which asks for nothing."""
    x = digits()[0][:samples]
    target = 0.1 * turned_kl(pooled_reader, x)
    errors = split_target(pooled_reader, target, x, Moves(Pictures(), "C4"), se.degrees(90))
    assert 0.9 * target < turned_kl(softened(pooled_reader, errors), x) <= 1.001 * target


def test_a_large_pool_is_drawn_from_and_a_still_one_refused(pooled_reader: nn.Module) -> None:
    x, moves = digits()[0][:40], Moves(Pictures(), "SO(2)", "30deg", count=500)
    network = copy.deepcopy(pooled_reader)
    target = 0.3 * float(drawn_kl(network, x, moves))
    errors = split_target(network, target, x, moves, se.degrees(30))
    soft = se.soften(network, "SO(2)", error=errors, within=se.degrees(30))
    assert 0.7 * target < float(drawn_kl(soft, x, moves)) < 1.3 * target  # over all elements, of which some are drawn
    with pytest.raises(SoftEquivError, match="identity alone"):
        split_target(pooled_reader, 0.1, x, Moves(Pictures(), "C4", elements=[se.C(4).identity]), se.degrees(90))


@torch.no_grad()
def drawn_kl(net: nn.Module, x: Tensor, moves: Moves) -> Tensor:
    """mean KL[F(x) || F(g x)] over every element of a pool, from the formula."""
    p = net(x).double().log_softmax(1)
    q = torch.stack([net(moves(x, torch.full((len(x),), i))) for i in range(len(moves))]).double().log_softmax(2)
    return (p.exp() * (p - q)).sum(2).mean()


def test_a_target_above_the_error_asks_for_nothing(pooled_reader: nn.Module) -> None:
    errors = split_target(pooled_reader, 1e3, digits()[0][:50], QUARTERS, se.degrees(90))
    own = {weight.name: weight.error for weight in se.certify(pooled_reader, se.degrees(90), "C4").weights}
    assert errors == pytest.approx(own, rel=1e-5)


def test_a_target_out_of_reach_is_said(pooled_reader: nn.Module) -> None:
    with pytest.raises(SoftEquivError, match="tells where"):
        split_target(trained(reader(), digits(), 1, 1e-2), 1e-3, digits()[0][:50], QUARTERS, se.degrees(90))
    with pytest.raises(SoftEquivError, match="above 0"):
        split_target(pooled_reader, 0, digits()[0][:50], QUARTERS, se.degrees(90))
    with pytest.raises(SoftEquivError, match="the target is a number; got 'a', a str"):
        split_target(pooled_reader, "a", digits()[0][:50], QUARTERS, se.degrees(90))


# Strides


@torch.no_grad()
def test_kernels_softened_under_shifts_alias_less_at_equal_energy() -> None:
    """A strided layer cannot follow a shift by one pixel; kernels without high frequencies have less to follow."""
    torch.manual_seed(0)
    x = torch.randn(16, 3, 32, 32)
    changes, kept = [], []
    for group, s in ((se.Shifts(5, 5), 0.5), (se.SO(2), 0.45)):
        layer = nn.Conv2d(3, 64, 5, stride=2, padding=2, bias=False)
        plain = layer.weight.clone()
        se.soften(layer, group, softness=s)
        kept.append(float(layer.weight.norm() / plain.norm()))
        inner = slice(4, -4)  # of 16 x 16, away from the border
        y, moved = layer(x)[..., inner, inner], layer(x.roll(1, -1))[..., inner, inner]
        changes.append(float((moved - y).norm() / y.norm()))
    assert kept[0] >= kept[1]
    assert changes[0] < 0.9 * changes[1]
