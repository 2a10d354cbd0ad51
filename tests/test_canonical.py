"""Does canonicalisation make any model equivariant, by the formula, and does it learn?"""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import softequiv as se
from digits import accuracy, roomy_digits, trained, unseen
from softequiv.actions import Acts, Moves, Pictures, Still, Tokens
from softequiv.baselines.augmentation import Augmented
from softequiv.baselines.canonical import Canonical, Energies, Orientation, Scorer, Selection, WithPrior, prior_loss
from softequiv.errors import GroupError, SoftEquivError
from softequiv.groups import Group
from softequiv.groups.base import matrix_key
from softequiv.testing import assert_equivariant, equivariance_error

WIDTHS = (4, 4, 4)
SCORERS: tuple[Scorer, ...] = (Orientation, Energies)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def smooth(samples: int, size: int) -> Tensor:
    """Pictures of a few large waves, (samples, 1, size, size)."""
    return functional.interpolate(drawn(samples, 1, 5, 5), (size, size), mode="bicubic")


def classifier(size: int) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Flatten(), nn.Linear(2 * size**2, 5), nn.Tanh())


def segmenter() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.Tanh(), nn.Conv2d(3, 3, 4, stride=2, padding=1))


def canonical(
    model: nn.Module, group: Group, *, channels: int = 2, scorer: Scorer = Orientation, **options: object
) -> Canonical:
    torch.manual_seed(2)
    return Canonical(model, group, channels, WIDTHS, scorer=scorer, **options).eval()  # type: ignore[arg-type]


# exactly equivariant


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-10)])
@pytest.mark.parametrize("selection", ["straight-through", "soft"])
@pytest.mark.parametrize("scorer", SCORERS)
@pytest.mark.parametrize("group", [se.C(2), se.C(4), se.D(1), se.D(4)], ids=str)
def test_any_model_becomes_exactly_equivariant_where_turns_are_exact(
    group: Group, scorer: Scorer, selection: Selection, dtype: torch.dtype, tolerance: float
) -> None:
    x, pictures = drawn(4, 2, 8, 8), Pictures()
    cases: list[tuple[nn.Module, Acts]] = [(classifier(8), Still()), (segmenter(), pictures)]
    for model, outputs in cases:
        whole = canonical(model, group, scorer=scorer, selection=selection, outputs=outputs).to(dtype)
        assert_equivariant(whole, group, pictures, outputs, inputs=x, tolerance=tolerance)
        assert equivariance_error(whole.model, group, pictures, outputs, inputs=x) > 0.1  # the bare model is not


@pytest.mark.parametrize("pixels", [18, 21])
def test_scores_of_a_smaller_picture_are_as_exact(pixels: int) -> None:
    whole = canonical(classifier(pixels), se.D(4), size=8).double()
    assert_equivariant(whole, se.D(4), Pictures(), Still(), inputs=drawn(3, 2, pixels, pixels), tolerance=1e-10)


@pytest.mark.parametrize("scorer", SCORERS)
@pytest.mark.parametrize("group", [se.C(4), se.D(4)], ids=str)
def test_scores_are_permuted_as_the_picture_turns(group: Group, scorer: Scorer) -> None:
    x, scores = drawn(3, 2, 9, 9), canonical(nn.Identity(), group, scorer=scorer).double().scores
    number = {matrix_key(g.matrix): i for i, g in enumerate(group.elements())}
    plain = scores(x)
    assert float(plain.detach().std(1).min()) > 1e-4  # orientations are told apart
    for u in group.elements():
        sources = [number[matrix_key((u.inverse @ g).matrix)] for g in group.elements()]
        torch.testing.assert_close(scores(Pictures()(x, u)), plain[:, sources], rtol=0, atol=1e-10)


def test_a_transformers_model_is_made_invariant() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.ViTConfig(
        image_size=8, patch_size=4, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    vit = transformers.ViTForImageClassification(config)
    x = drawn(4, 3, 8, 8)
    whole = canonical(vit, se.C(4), channels=3)
    assert whole(x.float()).shape == (4, 2)
    assert_equivariant(whole, se.C(4), Pictures(), Still(), inputs=x, tolerance=1e-5)
    assert equivariance_error(lambda z: vit(z).logits, se.C(4), Pictures(), Still(), inputs=x.float()) > 1e-2


# nearly equivariant


@pytest.mark.parametrize("scorer", SCORERS)
def test_for_finer_turns_the_choice_learns_to_follow_the_picture(scorer: Scorer) -> None:
    group, data = se.C(8), roomy_digits()
    number = {matrix_key(g.matrix): i for i, g in enumerate(group.elements())}
    whole = Canonical(nn.Sequential(nn.Flatten(), nn.Linear(256, 10)), group, 1, WIDTHS, scorer=scorer)
    trained(whole, data, 3, 5e-3, WithPrior(1.0))
    x = unseen(data)[0][:100]
    with torch.no_grad():
        chosen = whole.scores(x).argmax(1)
        for u in group.elements():
            found = whole.scores(Pictures("bilinear")(x, u)).argmax(1)
            expected = torch.tensor([number[matrix_key((u @ g).matrix)] for g in group.elements()])[chosen]
            assert float((found == expected).double().mean()) > 0.6  # by chance 1 / 8


# by the formula


@pytest.mark.parametrize("group", [se.C(4), se.C(6)], ids=str)
def test_the_picture_is_turned_by_the_inverse_of_the_best_element_and_the_answer_back(group: Group) -> None:
    x, turns, back = drawn(5, 2, 8, 8), Pictures("bilinear", "border"), Pictures("bicubic")
    whole = canonical(segmenter(), group, outputs=back).double()
    found, elements = whole(x), tuple(group.elements())
    for i, best in enumerate(whole.scores(x).argmax(1).tolist()):
        answer = back(whole.model(turns(x[i : i + 1], elements[best].inverse)), elements[best])
        torch.testing.assert_close(found[i : i + 1], answer)


def test_soft_selection_is_the_convex_combination() -> None:
    group, x, turns = se.C(6), drawn(3, 2, 8, 8), Pictures("bilinear", "border")
    whole = canonical(segmenter(), group, selection="soft", outputs=Pictures()).double()
    shares = whole.scores(x).softmax(1).T[..., None, None, None]
    upright = sum(p * turns(x, g.inverse) for p, g in zip(shares, group.elements(), strict=True))
    answers = whole.model(upright)
    expected = sum(p * Pictures()(answers, g) for p, g in zip(shares, group.elements(), strict=True))
    torch.testing.assert_close(whole(x), expected)


def test_straight_through_turns_hard_and_learns_soft() -> None:
    group, x = se.C(4), drawn(3, 2, 6, 6)
    whole = canonical(nn.Identity(), group).double()
    slopes = drawn(3, 2, 6, 6, seed=5)
    with torch.no_grad():
        hard = whole(x)
    learned = whole(x)
    assert torch.equal(learned, hard)
    found = torch.autograd.grad((learned * slopes).sum(), list(whole.scorer.parameters()))
    shares = whole.scores(x).softmax(1)  # the gradient is that of sum_g p_g <slopes, g^-1 x>
    parts = torch.stack([(Pictures()(x, g.inverse) * slopes).flatten(1).sum(1) for g in group.elements()], 1)
    expected = torch.autograd.grad((shares * parts).sum(), list(whole.scorer.parameters()))
    torch.testing.assert_close(found, expected)
    assert any(float(part.abs().max()) > 0 for part in found)


def test_energies_are_those_of_one_network_on_every_turned_copy() -> None:
    group, x = se.D(3), drawn(2, 1, 9, 9)
    torch.manual_seed(0)
    scorer = Energies(group, 1, WIDTHS).double().eval()
    for i, g in enumerate(group.elements()):
        energy = scorer.head(scorer.features(Pictures("bilinear")(x, g.inverse)).mean((-2, -1)))
        torch.testing.assert_close(scorer(x)[:, i], -energy[:, 0])


def test_the_prior_is_the_cross_entropy_to_the_turn_of_the_picture() -> None:
    scores, turned = drawn(4, 6), torch.tensor([0, 5, 2, 2])
    p = scores.exp() / scores.exp().sum(1, keepdim=True)
    torch.testing.assert_close(prior_loss(scores, turned), -p[torch.arange(4), turned].log().mean())
    group, x, y = se.C(6), drawn(3, 2, 6, 6), drawn(3, 72)
    whole, seeded = canonical(nn.Flatten(), group).double(), torch.Generator().manual_seed
    chosen = whole.turns.draw(3, seeded(4))
    elements = tuple(group.elements())
    each = [
        prior_loss(whole.scores(whole.turns.acts(x[i : i + 1], elements[c])), chosen[i : i + 1])
        for i, c in enumerate(chosen.tolist())
    ]
    expected = functional.mse_loss(whole(x), y) + 3 * torch.stack(each).mean()
    wrapped = nn.Sequential(whole)  # as DistributedDataParallel holds it
    torch.testing.assert_close(WithPrior(3.0)(wrapped, x, y, functional.mse_loss, seeded(4)), expected)


def test_where_turns_are_exact_the_prior_is_that_of_the_picture_as_it_comes() -> None:
    whole, x, y = canonical(nn.Flatten(), se.D(4)).double(), drawn(3, 2, 6, 6), drawn(3, 72)
    upright = prior_loss(whole.scores(x), torch.zeros(3, dtype=torch.int64))
    torch.testing.assert_close(
        WithPrior(1.0)(whole, x, y, functional.mse_loss), functional.mse_loss(whole(x), y) + upright
    )


# what the model has seen


def test_pixels_that_were_turned_out_of_the_frame_are_not_valid() -> None:
    group, x, back = se.C(8), drawn(6, 2, 9, 9), Pictures("bilinear")
    whole = canonical(nn.Identity(), group, outputs=back).double()
    chosen, elements = whole.scores(x).argmax(1).tolist(), tuple(group.elements())
    found = whole.valid(x)
    assert found is not None and found.shape == (6, 9, 9) and not found.all()
    for mask, best in zip(found, chosen, strict=True):
        alone = back.valid(x, elements[best])
        assert torch.equal(mask, torch.ones_like(mask) if alone is None else alone)
    soft = canonical(nn.Identity(), group, outputs=back, selection="soft").double().valid(x)
    masks = [mask for mask in (back.valid(x, g) for g in elements) if mask is not None]
    assert soft is not None and torch.equal(soft, torch.stack(masks).all(0).expand(6, -1, -1))
    assert canonical(nn.Identity(), se.C(4), outputs=back).double().valid(x) is None


def test_a_margin_keeps_the_corners() -> None:
    group, x, back = se.C(8), smooth(8, 32), Pictures("bilinear")
    errors = []
    for margin in (0, 8):  # 0.21 of 32 pixels is 6.6
        whole = canonical(nn.Identity(), group, channels=1, outputs=back, margin=margin).double()
        assert (whole.scores(x).argmax(1) % 2 == 1).any()  # some pictures are turned by odd eighths
        found, valid = whole(x), whole.valid(x)
        assert found.shape == x.shape and valid is not None and bool(valid.all()) == bool(margin)
        errors.append(float((found - x).detach().norm() / x.norm()))
    assert errors[1] < 0.05 and errors[0] > 0.1
    halved = canonical(nn.AvgPool2d(2), group, channels=1, outputs=back, margin=8).double()
    assert halved(x).shape == (8, 1, 16, 16)
    assert_equivariant(
        canonical(segmenter(), se.C(4), outputs=back, margin=2).double(), se.C(4), back, back, inputs=drawn(3, 2, 8, 8)
    )
    with pytest.raises(SoftEquivError, match="no whole margin to crop"):
        canonical(nn.AvgPool2d(2), group, channels=1, outputs=back, margin=7).double()(x)


# as a citizen of torch


def test_a_copy_and_a_state_dict_answer_alike_and_scores_are_not_rounded_by_autocast() -> None:
    whole, x = canonical(segmenter(), se.C(6), outputs=Pictures()), drawn(3, 2, 8, 8).float()
    assert torch.equal(copy.deepcopy(whole)(x), whole(x))
    torch.manual_seed(9)
    other = Canonical(segmenter(), se.C(6), 2, WIDTHS, outputs=Pictures()).eval()
    assert not torch.equal(other.scores(x), whole.scores(x))
    other.load_state_dict(whole.state_dict())
    assert torch.equal(other(x), whole(x))
    with torch.autocast("cpu", torch.bfloat16):
        assert whole.scores(x.bfloat16()).dtype == whole.scores(x).dtype == torch.float32
        inside_autocast = whole.scores(x)
    assert torch.equal(inside_autocast, whole.scores(x))


@pytest.mark.parametrize("selection", ["straight-through", "soft"])
@pytest.mark.parametrize("scorer", SCORERS)
def test_no_pictures_have_no_answers(scorer: Scorer, selection: Selection) -> None:
    whole = Canonical(segmenter(), se.C(4), 2, WIDTHS, scorer=scorer, selection=selection, outputs=Pictures()).eval()
    assert whole(torch.zeros(0, 2, 8, 8)).shape == (0, 3, 4, 4)


@pytest.mark.parametrize(
    ("mistake", "error", "sentence"),
    [
        (lambda: Canonical(nn.Identity(), se.SO(2)), GroupError, r"over C\(n\) and D\(n\); got SO\(2\)"),
        (lambda: Canonical(nn.Identity(), se.C(4), selection="best"), SoftEquivError, "unknown selection 'best'"),
        (lambda: Canonical(nn.Identity(), se.C(4), widths=()), SoftEquivError, "the width of one layer"),
        (lambda: Canonical(nn.Identity(), se.C(4), size=1), SoftEquivError, "size is a whole number"),
        (lambda: Canonical(nn.Identity(), se.C(4), margin=-1), SoftEquivError, "margin is a whole number"),
        (lambda: Canonical(nn.Identity(), se.C(4), margin=1, outputs=Tokens(2, 2)), SoftEquivError, "no margin"),
        (lambda: Canonical(nn.Identity(), se.C(4))(torch.ones(3, 8, 8)), SoftEquivError, "got \\(3, 8, 8\\)"),
        (lambda: Canonical(nn.Identity(), se.C(4))(torch.ones(1, 1, 8, 8)), SoftEquivError, "3, H, W"),
        (lambda: Canonical(nn.Identity(), se.C(4), scorer=Energies)(torch.ones(1, 1, 8, 8)), SoftEquivError, "3, H, W"),
        (
            lambda: Canonical(nn.Identity(), se.C(4), widths=(), scorer=Energies),
            SoftEquivError,
            "the width of one layer",
        ),
        (lambda: Energies(se.C(4), 1, (4, 0)), SoftEquivError, "a width is a whole number of at least 1; got 0"),
        (
            lambda: Canonical(nn.Identity(), se.C(4), selection="soft")(torch.ones(1, 3, 8, 8).long()),
            SoftEquivError,
            "soft selection mixes pictures and needs floating-point ones; got torch.int64",
        ),
        (lambda: WithPrior(-1.0), SoftEquivError, "got -1.0"),
        (lambda: WithPrior()(nn.Identity(), *[torch.ones(1)] * 2, functional.mse_loss), SoftEquivError, "no Canonical"),
    ],
)
def test_mistakes_are_named(mistake: Callable[[], object], error: type[Exception], sentence: str) -> None:
    with pytest.raises(error, match=sentence):
        mistake()


# and it learns


def reader() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 10))


@pytest.mark.parametrize("scorer", SCORERS)
def test_digits_are_read_at_every_quarter_turn_though_learned_upright(scorer: Scorer) -> None:
    data = roomy_digits()
    whole = Canonical(reader(), se.C(4), 1, WIDTHS, scorer=scorer)
    trained(whole, data, 6, 5e-3, WithPrior(1.0))
    turns, (upright, labels) = Moves(Pictures(), se.C(4)), unseen(data)
    turned = turns(upright, turns.cycle(0, len(upright)))
    assert accuracy(whole, upright, labels) == accuracy(whole, turned, labels) > 0.7  # by chance 0.1
    assert accuracy(whole.model, turned, labels) < 0.6
    with torch.no_grad():
        assert float((whole.scores(upright).argmax(1) == 0).float().mean()) > 0.7  # by chance 0.25


def test_digits_are_learned_without_a_prior_from_turned_ones() -> None:
    data = roomy_digits()
    whole = Canonical(reader(), se.C(4), 1, WIDTHS)
    trained(whole, data, 6, 5e-3, transform=Augmented(Moves(Pictures(), se.C(4))))
    assert accuracy(whole, *unseen(data)) > 0.7  # by chance 0.1
