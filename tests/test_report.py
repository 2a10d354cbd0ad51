"""Is the page whole, true and usable? It loads nothing, says what the data says, and its dial works in a browser."""

from __future__ import annotations

import base64
import dataclasses
import io
import math
import re
import shutil
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import nn

import softequiv as se
import zoo
from softequiv.report import ReportData, build, write_report
from softequiv.report.charts import ticks
from softequiv.report.figures import dial_figure
from softequiv.report.layer import show, shown_element, told
from softequiv.report.page import LARGEST_PAGE, certificate_row, figure_text, page
from softequiv.report.png import ANCHORS, photograph, shaded

VOID = {"meta", "img", "input", "br", "hr", "link"}
LEVELS = (0.0, 0.25, 0.5, 1.0)
EVIL = '"><script>alert(1)</script><img src=x onerror=alert(2)>'


def cnn() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 5, padding=2),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 5),
    )


def pictures(size: int, count: int = 6) -> torch.Tensor:
    return torch.rand(count, 3, size, size, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def labelled() -> ReportData:
    model = se.soften(cnn(), "SO(2)", error=0.3, within=se.degrees(30))
    labels = torch.arange(6) % 5
    return build(
        model,
        pictures(17),
        labels,
        group="SO(2)",
        within=se.degrees(30),
        levels=LEVELS,
        title="Soft CNN",
        compared={"plain": cnn()},
    )


@pytest.fixture(scope="module")
def unlabelled() -> ReportData:
    return build(zoo.CASES["vit"].model(), pictures(20), group="C4", levels=(0.0, 1.0), title="A tiny ViT")


class Structure(HTMLParser):
    """Every tag that opens must close, in order; identifiers are unique; what is loaded is collected."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len({name for name, _ in attrs}) == len(attrs), f"<{tag}> repeats an attribute: {attrs}"
        self.found.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-3:]}"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("script", "style"):
            self.text.append(data)


def parsed(text: str) -> Structure:
    structure = Structure()
    structure.feed(text)
    structure.close()
    return structure


@pytest.fixture(params=["labelled", "unlabelled"])
def data(request: pytest.FixtureRequest) -> ReportData:
    found: ReportData = request.getfixturevalue(request.param)
    return found


def test_the_page_is_well_formed(data: ReportData) -> None:
    structure = parsed(page(data))
    assert structure.open == []
    tags = [tag for tag, _ in structure.found]
    assert [tags.count(tag) for tag in ("html", "head", "body", "main", "h1")] == [1] * 5
    ids = [attributes["id"] for _, attributes in structure.found if "id" in attributes]
    assert len(ids) == len(set(ids))
    targets = {attributes["for"] for tag, attributes in structure.found if tag == "label"}
    assert targets <= set(ids)


def test_the_page_loads_nothing(data: ReportData) -> None:
    text = page(data)
    structure = parsed(text)
    assert not re.search(r"(https?:)?//[a-z]", re.sub(r"data:image/png;base64,[^\"]*", "", text))
    for tag, attributes in structure.found:
        assert tag not in ("link", "iframe", "object", "embed")
        for name in ("src", "href", "srcset", "data"):
            if name in attributes:
                assert str(attributes[name]).startswith("data:image/png;base64,"), (tag, attributes)
    assert "@import" not in text and "url(" not in text
    assert "default-src 'none'" in text


def test_every_picture_can_be_read_and_has_an_alternative_text(data: ReportData) -> None:
    found = [attributes for tag, attributes in parsed(page(data)).found if tag == "img"]
    assert len(found) == 2 + 5 * len(data.stops)
    for attributes in found:
        Image.open(io.BytesIO(base64.b64decode(str(attributes["src"]).partition(",")[2]))).verify()
        assert attributes["alt"]
    charts = [attributes for tag, attributes in parsed(page(data)).found if attributes.get("class") == "chart"]
    assert charts and all(attributes["role"] == "img" and attributes["aria-label"] for attributes in charts)


def test_the_page_says_what_the_data_says(data: ReportData) -> None:
    text = page(data)
    blocks = [part for part in re.split(r'(?=<div data-stop=")', text) if part.startswith("<div data-stop")]
    assert len(blocks) == 5 * len(data.stops)  # figures, pictures, spectra, certificates, blame
    for i, stop in enumerate(data.stops):
        own = "".join(block for block in blocks if block.startswith(f'<div data-stop="{i}"'))
        assert stop.view.weights in own and str(stop.view.difference) in own
        shown = next(weight for weight in stop.certified if weight.name == data.layer)
        assert f"<dd>{figure_text('', shown.error)}<small>" in own
        for row in stop.measured:
            if row.name in ("accuracy", "accuracy moved", "iErr", "relative change"):
                assert f"<dd>{figure_text(row.name, row.value)}<small>" in own
        for weight in stop.certified:
            assert all(f">{cell}</t" in own for cell in certificate_row(weight))
    hidden = re.findall(r'<div data-stop="(\d+)"( hidden)?>', text)
    assert {int(stop) for stop, mark in hidden if not mark} == {data.start}


def test_figures_are_those_of_the_library(labelled: ReportData) -> None:
    model = se.soften(cnn(), "SO(2)", softness=0.25)
    stop = labelled.stops[1]
    assert stop.softness == 0.25
    certificate = se.certify(model, se.degrees(30))
    assert [weight.error for weight in stop.certified] == [weight.error for weight in certificate.weights]
    found = se.measure(model, (pictures(17), torch.arange(6) % 5), "SO(2)", se.degrees(30))
    assert stop.measured == found.rows
    assert stop.spectrum.gains == tuple(se.softness(0.25).gamma(se.spectrum(se.grid(se.SO(2), 5, 5))).tolist())
    assert [other.name for other in labelled.compared] == ["as given", "plain"]
    assert math.isclose(labelled.compared[0].certified, 0.3, rel_tol=1e-4)


def test_bounds_on_the_answers_are_those_of_the_library_and_hold_together(labelled: ReportData) -> None:
    model, every = se.soften(cnn(), "SO(2)", softness=0.25), len(labelled.stops) + len(labelled.compared)
    expected = se.certify(model, se.degrees(30), data=pictures(17), confidence=1 - 0.01 / every)
    assert labelled.stops[1].answers.figures == expected.figures
    assert (labelled.confidence, labelled.samples, labelled.drawn) == (0.99, 6, expected.drawn)
    section = page(labelled).partition('id="answers-heading"')[2].partition("</section>")[0]
    rows = re.findall(r'<tr><th scope="row">(.*?)</tr>', section)
    assert len(rows) == every
    for figure in expected.figures:
        assert f"<td>{figure_text('', figure.observed)}</td><td>{figure_text('', figure.bound)}</td>" in rows[1]
    assert "With confidence 99%, all bounds together" in section and "nothing of a single picture" in section
    least = min(row.bound for stop in labelled.stops for row in stop.answers.figures if row.name == "flip rate")
    told = float(re.findall(r"below ([\d.]+): take more", section)[0])
    assert 0 < told <= least + 1e-3


def test_answers_without_a_certificate_say_why() -> None:
    regression = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 1))
    data = build(regression, pictures(3), group="C4", levels=(0.0, 1.0))
    assert "give clip=" in data.stops[0].answers.refused
    assert "Nothing can be certified of these answers: a distance has no largest value" in page(data)


def test_softness_zero_is_exact_under_quarter_turns(unlabelled: ReportData) -> None:
    exact, free = unlabelled.stops
    assert exact.view.error is not None and exact.view.error < 1e-5 < 0.1 < (free.view.error or 0)
    assert exact.blames == () and "nothing to blame" in exact.verdict and len(free.blames) > 1
    assert unlabelled.element == "a turn by 180 degrees"


def test_a_report_without_labels_has_no_accuracy(unlabelled: ReportData, labelled: ReportData) -> None:
    assert "accuracy" not in "".join(parsed(page(unlabelled)).text).lower()
    assert "accuracy against measured error" in page(labelled)


def test_text_of_the_user_is_escaped(labelled: ReportData) -> None:
    stop = labelled.stops[0]
    weights = (dataclasses.replace(stop.certified[0], name=EVIL), *stop.certified[1:])
    evil = dataclasses.replace(
        labelled,
        title=EVIL,
        model=EVIL,
        group=EVIL,
        element=EVIL,
        within=EVIL,
        settings={EVIL: EVIL},
        compared=tuple(dataclasses.replace(other, name=EVIL) for other in labelled.compared),
        stops=(
            dataclasses.replace(
                stop,
                verdict=EVIL,
                certified=(*weights, stop.certified[0]),
                blames=tuple(dataclasses.replace(blame, part=EVIL) for blame in stop.blames),
            ),
            *labelled.stops[1:],
        ),
    )
    before, after = parsed(page(labelled)), parsed(page(evil))
    assert after.open == []
    assert [tag for tag, _ in after.found].count("script") == [tag for tag, _ in before.found].count("script") == 1
    assert not any("onerror" in attributes for _, attributes in after.found)


def test_large_pictures_make_a_small_page(tmp_path: Path) -> None:
    data = build(cnn(), pictures(224, 2), group="C4", levels=[i / 10 for i in range(11)])
    assert write_report(tmp_path / "deep" / "report.html", data).stat().st_size < LARGEST_PAGE
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["report.html"]


def test_a_page_that_would_be_too_large_is_refused(tmp_path: Path, labelled: ReportData) -> None:
    big = dataclasses.replace(labelled, picture="data:image/png;base64," + "A" * LARGEST_PAGE)
    with pytest.raises(se.SoftEquivError, match="fewer levels"):
        write_report(tmp_path / "report.html", big)
    assert list(tmp_path.iterdir()) == []


def test_a_failed_write_leaves_the_old_page(
    tmp_path: Path, labelled: ReportData, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_report(tmp_path / "report.html", labelled)
    before = path.read_bytes()

    def stopped(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("os.replace", stopped)
    with pytest.raises(KeyboardInterrupt):
        write_report(path, dataclasses.replace(labelled, title="another"))
    assert [file.name for file in tmp_path.iterdir()] == ["report.html"] and path.read_bytes() == before


def test_the_model_is_left_as_it_is() -> None:
    model = se.soften(cnn(), "C4", softness=0.6)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    data = build(model, pictures(17, 2), group="C4", levels=(0.0, 1.0))
    assert [stop.softness for stop in data.stops] == [0.0, 0.6, 1.0] and data.start == 1  # its own level is added
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert [weight.soft.gain for weight in se.soft_weights(model)] == [se.softness(0.6)] * 2


def test_layers_without_maps_are_said_to_have_none() -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(3 * 64, 8), nn.ReLU(), nn.Linear(8, 5))
    se.soften(net, "C4", softness=0.5, grids={"1": (3, 8, 8)})
    data = build(net, pictures(8, 2), group="C4", levels=(0.0, 1.0))
    assert data.stops[0].view.features is None and data.stops[0].view.error is None
    assert "no map" in page(data)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pictures": torch.rand(3, 8, 8)}, "pictures .N, C, H, W."),
        ({"pictures": torch.rand(0, 3, 8, 8)}, "pictures .N, C, H, W."),
        ({"labels": torch.zeros(2, dtype=torch.long)}, "3 pictures came with 2 labels"),
        ({"levels": (0.0, 1.5)}, "from 0 to 1"),
        ({"levels": (-0.1,)}, "from 0 to 1"),
        ({"group": "SO(2)"}, "softened for C4"),
    ],
)
def test_what_cannot_be_reported_is_said(change: dict[str, Any], message: str) -> None:
    arguments = {"pictures": pictures(17, 3), "group": "C4", "levels": (0.0, 1.0)} | change
    with pytest.raises(se.SoftEquivError, match=message):
        build(se.soften(cnn(), "C4", softness=0.5), **arguments)


def test_the_shown_move_is_the_farthest_of_the_range() -> None:
    for group, within, words in [
        (se.SO(2), se.degrees(30), "a turn by 30 degrees"),
        (se.O(2), se.degrees(20), "a turn by 20 degrees"),
        (se.C(36), se.degrees(35), "a turn by 30 degrees"),
        (se.C(4), None, "a turn by 180 degrees"),
        (se.Reflection(), None, "the flip s0"),
    ]:
        g = shown_element(group, within)
        assert told(g).replace("by -", "by ") == words  # there may be two, one to each side


def test_scores_per_pixel_are_reported_as_such() -> None:
    case = zoo.CASES["cnn"]
    labels = torch.randint(5, (3, 12, 12), generator=torch.Generator().manual_seed(0))
    data = build(case.model(), pictures(12, 3), labels, group="C4", within="90deg", levels=(0.0, 1.0))
    assert "mIoU against measured error" in page(data) and data.element.endswith("90 degrees")


def test_features_are_moved_as_the_formula_says() -> None:
    model = se.soften(cnn(), "C4", softness=1.0)
    x, g = pictures(17)[0], shown_element(se.C(4), se.degrees(90))
    shown = show(model, x, g)
    with torch.no_grad():
        f, moved = model[0](x[None])[0].double(), model[0](x.rot90(1, (-2, -1))[None])[0].double()
    assert shown.moved is not None and torch.allclose(shown.moved, moved, atol=1e-6)
    expected = (moved - f.rot90(1, (-2, -1))).norm() / f.norm()
    assert shown.error == pytest.approx(float(expected), rel=1e-5)


def test_pictures_are_what_they_show() -> None:
    def pixels(uri: str) -> Image.Image:
        return Image.open(io.BytesIO(base64.b64decode(uri.partition(",")[2])))

    sheet = pixels(shaded(torch.tensor([[-1.0, 0.0], [1.0, math.nan]]), 1.0)).convert("RGBA")
    colours = [sheet.getpixel(place) for place in ((0, 0), (1, 0), (0, 1), (1, 1))]
    assert colours[:3] == [(*ANCHORS[0], 255), (*ANCHORS[5], 255), (*ANCHORS[-1], 255)]
    assert colours[3][3] == 0
    grey = pixels(photograph(torch.tensor([[[-1.0, 2.0], [1.0, 0.5]]]), 0.0, 2.0))
    assert [grey.getpixel(place) for place in ((0, 0), (1, 0), (0, 1), (1, 1))] == [0, 255, 128, 64]
    red = pixels(photograph(torch.stack([torch.ones(2, 3), torch.zeros(2, 3), torch.zeros(2, 3)]), 0.0, 1.0))
    assert red.size == (3, 2) and red.getpixel((0, 0)) == (255, 0, 0)
    assert max(pixels(photograph(torch.rand(3, 500, 300), 0.0, 1.0)).size) <= 192


@pytest.mark.parametrize("values", [[0.0], [0.5, 0.5], [1e-8, 2e-8], [-3.0, 900.0], [0.97, 0.98]])
def test_ticks_enclose_the_values(values: list[float]) -> None:
    found = ticks(values)
    assert found[0] <= min(values) + 1e-12 and found[-1] >= max(values) - 1e-12
    assert 2 <= len(found) <= 8 and found == sorted(set(found))


@pytest.mark.parametrize("ending", ["svg", "png"])
def test_the_static_figure_is_drawn_for_both_groups(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"dial.{ending}"
    dial_figure(path, cnn(), pictures(17)[0], levels=(0.0, 1.0))
    assert path.stat().st_size > 10_000
    with pytest.raises(se.SoftEquivError, match="one picture"):
        dial_figure(path, cnn(), pictures(17))


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("there is no chromium on the path")
    with api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture
def opened(browser: Any, tmp_path: Path, labelled: ReportData) -> Iterator[Any]:
    """The labelled page in a browser that reports what goes wrong, and lets nothing but the file through."""
    path = write_report(tmp_path / "report.html", labelled)
    problems: list[str] = []
    tab = browser.new_page(viewport={"width": 390, "height": 844})
    tab.on("console", lambda message: problems.append(message.text))
    tab.on("pageerror", lambda problem: problems.append(str(problem)))
    tab.on("request", lambda request: request.url[:5] in ("file:", "data:") or problems.append(request.url))
    tab.goto(path.as_uri())
    yield tab
    tab.close()
    assert problems == []


def seen(tab: Any, selector: str) -> list[str]:
    """What a reader sees of these elements: their text, or their picture."""
    found = tab.locator(selector).filter(visible=True)
    return [found.nth(i).get_attribute("src") or found.nth(i).inner_text() for i in range(found.count())]


def test_the_dial_changes_figures_and_pictures(opened: Any, labelled: ReportData) -> None:
    opened.focus("#dial")
    opened.keyboard.press("Home")
    history = []
    for i, stop in enumerate(labelled.stops):
        assert opened.locator("#level").inner_text() == f"{stop.softness:g}"
        assert opened.locator("#dial").get_attribute("aria-valuetext") == f"softness {stop.softness:g}"
        figures, views = seen(opened, ".tiles dd"), seen(opened, ".views img")
        shown = next(weight for weight in stop.certified if weight.name == labelled.layer)
        assert figures[0].startswith(figure_text("", shown.error))
        view = stop.view
        assert views == [view.weights, view.features, view.turned, view.moved, view.difference]
        marks = opened.locator(".point.current").evaluate_all("all => all.map(e => e.dataset.mark)")
        assert set(marks) == {str(i)}
        assert {text for text in seen(opened, "h2 .level")} == {f"{stop.softness:g}"}
        history.append((tuple(figures), tuple(views)))
        opened.keyboard.press("ArrowRight")
    assert len(set(history)) == len(labelled.stops)


def test_the_certificate_is_sorted_by_a_press(opened: Any) -> None:
    def column() -> list[float]:
        return [float(text) for text in seen(opened, "table.sortable tbody td:nth-child(5)")]

    button = opened.locator("table.sortable th:nth-child(5) button").filter(visible=True)
    button.click()
    rising = column()
    assert rising == sorted(rising) and len(set(rising)) == 2
    button.press("Enter")
    assert column() == rising[::-1]


def test_a_phone_shows_all_of_it_without_scrolling_sideways(opened: Any) -> None:
    assert opened.evaluate("document.documentElement.scrollWidth") <= 390
    opened.emulate_media(media="print")
    assert seen(opened, "#dial") == []
    assert len(seen(opened, ".tiles")) == 1


def test_without_scripts_the_page_can_be_read(browser: Any, tmp_path: Path, labelled: ReportData) -> None:
    path = write_report(tmp_path / "report.html", labelled)
    context = browser.new_context(java_script_enabled=False)
    tab = context.new_page()
    tab.goto(path.as_uri())
    text = tab.locator("main").inner_text()
    assert "Without scripts the dial stands still" in text
    for name in ("softness 0.25", "as given", "plain", "Settings and versions"):
        assert name in text
    context.close()
