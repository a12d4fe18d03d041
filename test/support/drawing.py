"""Drawing for the figures of the documentation: SVG without a library.

A `Picture` has rectangles, lines and texts; `chart`, `bars` and `shards` draw more with these. All
sizes are in pixels. A picture has a white ground of its own, so that it can be read on dark pages.
"""

from collections.abc import Iterable, Sequence
from math import log10
from xml.etree.ElementTree import Element, SubElement, indent, tostring

from shardir.algebra.layout import Layout, Shape
from shardir.algebra.mesh import Mesh

INK, FAINT, PALE = "#1f2933", "#7b8794", "#e4e7eb"
COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#bbbbbb")
"""Paul Tol's bright scheme, which people with colour blindness can tell apart."""

Point = tuple[float, float]


class Picture:
    """A picture of a width and a height. `title` is read out by screen readers."""

    def __init__(self, width: float, height: float, title: str):
        self.width, self.height = width, height
        self.root = Element("svg", {
            "xmlns": "http://www.w3.org/2000/svg", "viewBox": f"0 0 {width:g} {height:g}",
            "width": f"{width:g}", "height": f"{height:g}", "role": "img",
            "font-family": "system-ui, sans-serif", "font-size": "13",
        })  # fmt: skip
        SubElement(self.root, "title").text = title
        self.rect(0, 0, width, height, "#ffffff", rx=6)

    def _add(self, tag: str, text: str = "", /, **look: object) -> Element:
        words = {k.replace("_", "-"): f"{v:.4g}" if isinstance(v, float) else str(v)
                 for k, v in look.items()}  # fmt: skip
        element = SubElement(self.root, tag, words)
        element.text = text or None
        return element

    def rect(
        self, x: float, y: float, width: float, height: float, fill: str, stroke: str = "none",
        **look: object,
    ) -> None:  # fmt: skip
        """Draw a rectangle."""
        self._add("rect", x=float(x), y=float(y), width=float(max(width, 0)), height=float(height),
                  fill=fill, stroke=stroke, **look)  # fmt: skip

    def text(
        self, x: float, y: float, text: str, anchor: str = "start", fill: str = INK, **look: object
    ) -> None:
        """Write a text whose base line is at `y`."""
        self._add("text", text, x=float(x), y=float(y), text_anchor=anchor, fill=fill, **look)

    def line(self, points: Sequence[Point], stroke: str = INK, **look: object) -> None:
        """Draw a line through points."""
        at = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self._add("polyline", points=at, fill="none", stroke=stroke, **look)

    def dot(self, x: float, y: float, fill: str, radius: float = 3.5) -> None:
        """Draw a dot."""
        self._add("circle", cx=float(x), cy=float(y), r=radius, fill=fill, fill_opacity=0.8)

    def arrow(self, start: Point, end: Point, text: str = "", below: str = "") -> None:
        """Draw a horizontal arrow, with texts above and below it."""
        (x, y), (to, _) = start, end
        self.line([start, end], FAINT, stroke_width=1.5)
        self.line([(to - 6, y - 4), end, (to - 6, y + 4)], FAINT, stroke_width=1.5)
        self.text((x + to) / 2, y - 8, text, "middle", font_size=12)
        self.text((x + to) / 2, y + 18, below, "middle", FAINT, font_size=12)

    def code(self, x: float, y: float, lines: Sequence[str], marked: str) -> None:
        """Write lines of a program, those with the word `marked` in colour."""
        for i, line in enumerate(lines):
            look = {"font_weight": 600, "fill": COLOURS[0]} if marked in line else {"fill": INK}
            at = {"x": float(x), "y": float(y + 18 * i), "xml:space": "preserve"}
            font = {"font_size": 12.5, "font_family": "ui-monospace, monospace"}
            self._add("text", line, **at, **font, **look)

    def svg(self) -> str:
        """Return the text of the picture."""
        indent(self.root)
        return tostring(self.root, encoding="unicode") + "\n"


# ---- who holds what ----


def shards(
    p: Picture, x: float, y: float, name: str, layout: Layout, mesh: Mesh, shape: Shape,
    cell: float = 14,
) -> None:  # fmt: skip
    """Draw a value of one or two dimensions: in each part the ranks that hold it.

    A partial value has a dashed border, and `+` between the ranks that hold its summands.
    """
    rows = shape[0] if len(shape) == 2 else 1
    p.text(x, y - 8, f"{name}  {'x'.join(map(str, shape))}", font_weight="600")
    holders: dict[tuple[tuple[int, int], ...], list[int]] = {}
    for rank in range(mesh.size):
        parts = layout.slices(mesh, shape, rank)
        holders.setdefault(tuple((s.start, s.stop) for s in parts), []).append(rank)
    dash = {"stroke_dasharray": "5 3"} if layout.partial else {}
    for part, ranks in holders.items():
        down, across = part if len(part) == 2 else ((0, 1), *part)
        wide, high = (across[1] - across[0]) * cell, (down[1] - down[0]) * cell
        left, top = x + across[0] * cell, y + down[0] * cell
        own = len(ranks) == 1
        p.rect(left + 1, top + 1, wide - 2, high - 2, COLOURS[ranks[0]] if own else "#f5f7fa",
               INK, fill_opacity=0.8, **dash)  # fmt: skip
        turned = wide < 20 * len(ranks) and high > wide
        size = min((high if turned else wide) / len(ranks), wide if turned else high, 22) - 4
        for i, rank in enumerate(ranks):
            away = (i - (len(ranks) - 1) / 2) * (size + 6)
            cx, cy = left + wide / 2 + away * (not turned), top + high / 2 + away * turned
            if not own:
                p.rect(cx - size / 2, cy - size / 2, size, size, COLOURS[rank], rx=size / 2)
            p.text(cx, cy + 4, str(rank), "middle", "#ffffff", font_size=11, font_weight="700")
            if i and layout.partial:
                p.text(cx - (size / 2 + 3) * (not turned), cy + 4 - (size / 2 + 3) * turned, "+",
                       "middle", font_weight="700")  # fmt: skip
    text = str(layout).partition(", ")[2].replace("partial sum", "partial")
    p.text(x, y + rows * cell + 16, text, fill=FAINT, font_size=11, font_family="monospace")


# ---- charts ----


class Axes:
    """The plotting area of a chart: `x` and `y` give the pixels of a value."""

    def __init__(
        self, p: Picture, box: tuple[float, float, float, float], xs: tuple[float, float],
        ys: tuple[float, float], logarithmic: str = "",
    ):  # fmt: skip
        self.p, self.box, self.xs, self.ys, self.logarithmic = p, box, xs, ys, logarithmic

    def _share(self, value: float, ends: tuple[float, float], axis: str) -> float:
        low, high = ends
        if axis in self.logarithmic:
            low, high, value = log10(low), log10(high), log10(max(value, low))
        return (value - low) / (high - low)

    def x(self, value: float) -> float:
        left, _, width, _ = self.box
        return left + width * self._share(value, self.xs, "x")

    def y(self, value: float) -> float:
        _, top, _, height = self.box
        return top + height * (1 - self._share(value, self.ys, "y"))

    def ticks(
        self, across: Iterable[tuple[float, str]], up: Iterable[tuple[float, str]], x_title: str,
        y_title: str,
    ) -> None:  # fmt: skip
        """Draw the grid, the texts of values, and the titles of both axes."""
        left, top, width, height = self.box
        for value, text in up:
            self.p.line([(left, self.y(value)), (left + width, self.y(value))], PALE)
            self.p.text(left - 8, self.y(value) + 4, text, "end", FAINT, font_size=11)
        for value, text in across:
            self.p.line([(self.x(value), top), (self.x(value), top + height)], PALE)
            self.p.text(self.x(value), top + height + 16, text, "middle", FAINT, font_size=11)
        self.p.line([(left, top), (left, top + height), (left + width, top + height)], FAINT)
        self.p.text(left + width / 2, top + height + 34, x_title, "middle", font_size=12)
        self.p.text(left, top - 10, y_title, font_size=12)


def bars(
    p: Picture, x: float, y: float, width: float, rows: Sequence[tuple], most: float,
    label: float = 150, height: float = 22, unit: str = "",
) -> float:  # fmt: skip
    """Draw horizontal bars, and return the y below them.

    Args:
        rows: name, value, colour, and perhaps the ends of an error bar.
        label: the width of the names.
    """
    scale = (width - label - 70) / most
    for name, value, colour, *span in rows:
        p.text(x + label - 8, y + height * 0.65, name, "end", font_size=12)
        p.rect(x + label, y + 3, value * scale, height - 6, colour, rx=2)
        end = value
        if span:
            low, high = span[0]
            at = y + height / 2
            p.line([(x + label + low * scale, at), (x + label + high * scale, at)], INK)
            for edge in (low, high):
                p.line([(x + label + edge * scale, at - 4), (x + label + edge * scale, at + 4)])
            end = max(end, high)
        p.text(x + label + end * scale + 6, y + height * 0.65, f"{number(value)}{unit}",
               font_size=12)  # fmt: skip
        y += height
    return y


def legend(p: Picture, x: float, y: float, items: Sequence[tuple[str, str]]) -> None:
    """Draw the names of colours in a row."""
    for name, colour in items:
        p.rect(x, y - 10, 12, 12, colour, rx=2)
        p.text(x + 18, y, name, font_size=12)
        x += 34 + 6.6 * len(name)


def number(value: float) -> str:
    """Return a number in three digits."""
    if value >= 100 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.3g}"
