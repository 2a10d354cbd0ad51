"""How are figures drawn in the page? Inline SVG, written here as text: it needs no script, prints, and scales."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from softequiv.report.data import Blame, Levels

WIDTH, HEIGHT = 440, 300
LEFT, RIGHT, TOP, BOTTOM = 56, 16, 16, 48
Scale = Callable[[float], float]  # from values to pixels
SIGNS = ("square", "triangle", "diamond", "cross")  # one for each compared model, told apart without colour


@dataclass(frozen=True)
class Point:
    """A place in a chart; `stop` is the position of the dial that it belongs to."""

    x: float
    y: float
    label: str
    stop: int | None = None
    short: str = ""


@dataclass(frozen=True)
class Series:
    """Points under one name; a line joins those of a dial, single ones have a sign."""

    name: str
    colour: str  # a class of the style sheet: "a", "b", "c"
    points: tuple[Point, ...]
    sign: str = "circle"
    line: bool = True


def chart(series: Sequence[Series], x_label: str, y_label: str, summary: str) -> str:
    """Lines and points over two axes, with a legend below."""
    points = [point for some in series for point in some.points]
    xs, ys = ticks([p.x for p in points]), ticks([p.y for p in points])

    def across(x: float) -> float:
        return LEFT + (x - xs[0]) / (xs[-1] - xs[0]) * (WIDTH - LEFT - RIGHT)

    def up(y: float) -> float:
        return HEIGHT - BOTTOM - (y - ys[0]) / (ys[-1] - ys[0]) * (HEIGHT - TOP - BOTTOM)

    parts = [frame(xs, ys, across, up, x_label, y_label)]
    for some in series:
        if some.line:
            parts += [ending(p, across(p.x), up(p.y)) for p in (some.points[0], some.points[-1])]
            path = " ".join(f"{across(p.x):.1f},{up(p.y):.1f}" for p in some.points)
            parts.append(f'<polyline class="line {some.colour}" points="{path}"/>')
        for p in some.points:
            mark = "" if p.stop is None else f' data-mark="{p.stop}"'
            shape = symbol(some.sign, across(p.x), up(p.y))
            parts.append(f'<g class="point {some.colour}"{mark}>{shape}<title>{escape(p.label)}</title></g>')
    return figure("".join(parts), HEIGHT, summary) + legend(series)


def ending(point: Point, x: float, y: float) -> str:
    """The name of a line's end above it."""
    return f'<text x="{x:.1f}" y="{y - 9:.1f}" text-anchor="middle">{escape(point.short)}</text>'


def frame(xs: list[float], ys: list[float], across: Scale, up: Scale, x_label: str, y_label: str) -> str:
    """Grid lines, numbers and names of the axes."""
    parts = []
    for y in ys:
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{up(y):.1f}" y2="{up(y):.1f}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{up(y) + 4:.1f}" text-anchor="end">{number(y)}</text>')
    for x in xs:
        parts.append(f'<text x="{across(x):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{number(x)}</text>')
    middle, half = (LEFT + WIDTH - RIGHT) / 2, (TOP + HEIGHT - BOTTOM) / 2
    parts.append(f'<text x="{middle}" y="{HEIGHT - 8}" text-anchor="middle">{escape(x_label)}</text>')
    turn = f'transform="rotate(-90 14 {half})"'
    parts.append(f'<text x="14" y="{half}" text-anchor="middle" {turn}>{escape(y_label)}</text>')
    return "".join(parts)


def symbol(sign: str, x: float, y: float) -> str:
    """A mark of about ten pixels."""
    if sign == "circle":
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5"/>'
    corners = {
        "square": ((-5, -5), (5, -5), (5, 5), (-5, 5)),
        "triangle": ((0, -6), (6, 5), (-6, 5)),
        "diamond": ((0, -7), (7, 0), (0, 7), (-7, 0)),
        "cross": (
            (-6, -2),
            (-2, -2),
            (-2, -6),
            (2, -6),
            (2, -2),
            (6, -2),
            (6, 2),
            (2, 2),
            (2, 6),
            (-2, 6),
            (-2, 2),
            (-6, 2),
        ),
    }[sign]
    path = " ".join(f"{x + dx:.1f},{y + dy:.1f}" for dx, dy in corners)
    return f'<polygon points="{path}"/>'


def legend(series: Sequence[Series]) -> str:
    """What each sign and colour stands for."""
    items = "".join(
        f'<li><svg viewBox="0 0 16 16" aria-hidden="true"><g class="point {some.colour}">{symbol(some.sign, 8, 8)}</g>'
        f"</svg>{escape(some.name)}</li>"
        for some in series
    )
    return f'<ul class="legend">{items}</ul>'


def spectrum_chart(levels: Levels) -> str:
    """Energy at each level before (grey) and after the filter (blue), with the gain as a line over it."""
    total = sum(levels.before) or 1.0
    shares = [value / total for value in levels.before]
    kept = [value / total for value in levels.after]
    count = len(shares)
    top = max([*shares, *kept]) or 1.0
    step = (WIDTH - LEFT - LEFT) / count
    floor = HEIGHT - BOTTOM

    def up(share: float) -> float:
        return floor - share * (floor - TOP)

    parts = []
    for tick in (0.0, 0.5, 1.0):
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - LEFT}" y1="{up(tick):.1f}" y2="{up(tick):.1f}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{up(tick) + 4:.1f}" text-anchor="end">{100 * tick * top:.0f}%</text>')
        parts.append(f'<text class="c" x="{WIDTH - LEFT + 8}" y="{up(tick) + 4:.1f}">{tick:g}</text>')
    every = max(1, math.ceil(count / 12))
    line = []
    for i, level in enumerate(levels.levels):
        left, width = LEFT + i * step + step * 0.15, step * 0.7
        for share, kind in ((shares[i], "before"), (kept[i], "after")):
            inset = 0.0 if kind == "before" else width * 0.2
            height = floor - up(share / top)
            parts.append(
                f'<rect class="{kind}" x="{left + inset:.1f}" y="{floor - height:.1f}" '
                f'width="{width - 2 * inset:.1f}" height="{height:.1f}"/>'
            )
        line.append((left + width / 2, up(min(levels.gains[i], 1.0))))
        if i % every == 0:
            parts.append(f'<text x="{left + width / 2:.1f}" y="{floor + 18}" text-anchor="middle">{level:.3g}</text>')
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in line)
    parts.append(f'<polyline class="line c" points="{path}"/>')
    parts += [f'<g class="point c">{symbol("circle", x, y)}</g>' for x, y in line]
    parts.append(
        f'<text x="{WIDTH / 2}" y="{HEIGHT - 8}" text-anchor="middle">level: how fast the group moves it</text>'
    )
    half = (TOP + floor) / 2
    turn = f'transform="rotate(-90 14 {half})"'
    parts.append(f'<text x="14" y="{half}" text-anchor="middle" {turn}>share of the energy</text>')
    turn = f'transform="rotate(90 {WIDTH - 12} {half})"'
    parts.append(f'<text class="c" x="{WIDTH - 12}" y="{half}" text-anchor="middle" {turn}>gain</text>')
    told = "; ".join(
        f"level {level:.3g}: {100 * share:.1f}% of the energy, gain {gain:.2g}"
        for level, share, gain in zip(levels.levels, shares, levels.gains, strict=True)
    )
    return figure("".join(parts), HEIGHT, f"Spectrum of the weight. {told}")


def blame_bars(blames: Sequence[Blame]) -> str:
    """One bar for each part of the network, in the order in which they run."""
    row, start = 40, 10
    height = row * len(blames) + 16
    low = min(0.0, *(blame.share for blame in blames))
    high = max(0.01, *(blame.share for blame in blames))
    zero = start + (-low / (high - low)) * (WIDTH - 80)
    scale = (WIDTH - 80) / (high - low)
    worst = max(blame.share for blame in blames)
    parts = []
    for i, blame in enumerate(blames):
        y = i * row + 8
        width = abs(blame.share) * scale
        left = zero if blame.share >= 0 else zero - width
        kind = "worst" if blame.share == worst else "after"
        parts.append(f'<text x="{zero + 6:.1f}" y="{y + 9}">{escape(shortened(blame.part))}</text>')
        parts.append(
            f'<rect class="{kind}" x="{left:.1f}" y="{y + 14}" width="{max(width, 0.5):.1f}" height="13">'
            f"<title>{escape(blame.why or 'no cause found')}</title></rect>"
        )
        parts.append(f'<text x="{max(left + width, zero) + 6:.1f}" y="{y + 25}">{100 * blame.share:.1f}%</text>')
    parts.append(f'<line class="axis" x1="{zero:.1f}" x2="{zero:.1f}" y1="8" y2="{height - 8}"/>')
    told = "; ".join(f"{blame.part} {100 * blame.share:.1f}%" for blame in blames)
    return figure("".join(parts), height, f"Shares of the error: {told}")


def shortened(name: str, most: int = 56) -> str:
    """The end of a long name."""
    return name if len(name) <= most else "..." + name[-most + 3 :]


def figure(content: str, height: float, summary: str) -> str:
    """An SVG picture that a screen reader reads as its summary."""
    return (
        f'<svg class="chart" viewBox="0 0 {WIDTH} {height:g}" role="img" aria-label="{escape(summary)}">{content}</svg>'
    )


def ticks(values: Sequence[float]) -> list[float]:
    """Four to seven round numbers that enclose the values.

    >>> ticks([0.02, 0.93])
    [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    """
    low, high = min(values), max(values)
    span = high - low or abs(high) or 1.0
    step = 10.0 ** math.floor(math.log10(span / 4))
    step *= next(factor for factor in (1, 2, 5, 10) if span / (step * factor) <= 5)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(i * step, 12) for i in range(first, max(last, first + 1) + 1)]


def number(value: float) -> str:
    """A number of an axis."""
    return f"{value:.4g}"
