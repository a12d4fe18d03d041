"""The graph of costs as SVG, without a library: nodes in layers, each below those that it takes
values from, in the order that crosses few edges (Sugiyama, Tagawa and Toda 1981). What is said of
an edge stands above the node that it goes to."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from xml.etree.ElementTree import Element, SubElement, indent, tostring

from shardir.search.picture import Described, Row, along, heading, rows, title

CHAR, LINE, PAD, GAP = 6.7, 15.0, 8.0, 28.0
"""A character's width, a line's height, a margin, and the room between nodes, in pixels."""
SWEEPS = 8

NODE = {"fill": "#ffffff", "stroke": "#333333"}
EDGE = {"fill": "none", "stroke": "#888888"}
TAKEN = "#ffe08a"
"""The colour of what is taken."""


@dataclass
class Box:
    """Where something stands."""

    width: float
    height: float
    x: float = 0.0
    y: float = 0.0

    @property
    def middle(self) -> float:
        return self.x + self.width / 2

    @property
    def low(self) -> float:
        return self.y + self.height


def as_svg(graphs: Sequence[Described]) -> str:
    root = Element("svg", {
        "xmlns": "http://www.w3.org/2000/svg", "font-family": "monospace", "font-size": "11",
    })  # fmt: skip
    width = height = 0.0
    for graph in graphs:
        _words(root, PAD, height + LINE + PAD, heading(graph), weight="bold")
        right, height = _draw(root, graph, height + LINE + 2 * PAD)
        width = max(width, right, _wide([heading(graph)]))
    root.set("width", f"{width:.0f}")
    root.set("height", f"{height:.0f}")
    root.set("viewBox", f"0 0 {width:.0f} {height:.0f}")
    indent(root)
    return tostring(root, encoding="unicode") + "\n"


def _draw(root: Element, graph: Described, top: float) -> tuple[float, float]:
    """Draws one graph below `top`; the right and the lower end."""
    nodes, edges, found = graph["nodes"], graph["edges"], rows(graph)
    titles = [f"{title(n)}{' (stated)' if n['stated'] else ''}" for n in nodes]
    boxes = [
        Box(_wide([t, *(f"{what}  {time}" for what, time, _ in r)]), (len(r) + 1) * LINE + PAD)
        for t, r in zip(titles, found, strict=True)
    ]
    said = [along(graph, e) for e in edges]
    words = [Box(_wide(lines), len(lines) * LINE) for lines in said]
    layers = layered(graph)
    right = max(sum(boxes[i].width + GAP for i in layer) for layer in layers)
    for layer in layers:
        into = [k for k, e in enumerate(edges) if e["to"] in layer]
        top += max((words[k].height for k in into), default=-2 * GAP) + 2 * GAP
        _beside([boxes[i] for i in layer], right, top)
        for k in into:
            a, b = boxes[edges[k]["from"]], boxes[edges[k]["to"]]
            words[k].x = (a.middle + b.middle) / 2
        _apart([words[k] for k in into], top - GAP)
        top += max(boxes[i].height for i in layer)
    for k, e in enumerate(edges):
        _curve(root, boxes[e["from"]], words[k])
        _curve(root, words[k], boxes[e["to"]])
    for b, lines in zip(words, said, strict=True):
        _rect(root, b, {"fill": "#ffffff"})
        for k, line in enumerate(lines, 1):
            _words(root, b.x + PAD, b.y + k * LINE - 4, line)
    for i, node in enumerate(nodes):
        _node(root, boxes[i], titles[i], found[i], node)
    return max(b.x + b.width for b in (*boxes, *words)) + PAD, top + PAD


def _beside(layer: Sequence[Box], room: float, top: float) -> None:
    """Nodes beside each other, in the middle of the room."""
    at = PAD + (room - sum(b.width + GAP for b in layer)) / 2
    for b in layer:
        b.x, b.y = at, top
        at += b.width + GAP


def _apart(words: Sequence[Box], low: float) -> None:
    """Words as close to where their middles should be (their `x`) as the others allow."""
    at = PAD
    for b in sorted(words, key=lambda b: b.x):
        b.x, b.y = max(b.x - b.width / 2, at), low - b.height
        at = b.x + b.width + PAD


def layered(graph: Described) -> list[list[int]]:
    """The nodes from above: each below those that it takes values from, an argument close to its
    first user; in a layer, near to what they are connected with."""
    n = len(graph["nodes"])
    above: list[list[int]] = [[] for _ in range(n)]
    below: list[list[int]] = [[] for _ in range(n)]
    for e in graph["edges"]:
        above[e["to"]].append(e["from"])
        below[e["from"]].append(e["to"])
    level = [0] * n
    for i in range(n):
        level[i] = max((level[a] + 1 for a in above[i]), default=0)
    for i in range(n):
        if not above[i] and below[i]:
            level[i] = min(level[b] for b in below[i]) - 1
    layers: list[list[int]] = [[] for _ in range(max(level, default=0) + 1)]
    for i in range(n):
        layers[level[i]].append(i)
    place = {i: k / len(layer) for layer in layers for k, i in enumerate(layer)}

    def near(neighbours: list[list[int]]) -> Callable[[int], float]:
        def mean(i: int) -> float:
            found = [place[j] for j in neighbours[i]]
            return sum(found) / len(found) if found else place[i]

        return mean

    for sweep in range(SWEEPS):
        downwards = sweep % 2 == 0
        for layer in layers if downwards else layers[::-1]:
            layer.sort(key=near(above if downwards else below))
            place.update({i: k / len(layer) for k, i in enumerate(layer)})
    return [layer for layer in layers if layer]


# ---- elements ----


def _node(root: Element, b: Box, name: str, found: Sequence[Row], node: Described) -> None:
    group = SubElement(root, "g")
    SubElement(group, "title").text = node["at"]
    _rect(group, b, {**NODE, "rx": "0" if node["op"] else "8"})
    _words(group, b.x + PAD, b.y + LINE, name, weight="bold")
    for k, (what, time, taken) in enumerate(found, 1):
        if taken:
            _rect(group, Box(b.width - 2, LINE, b.x + 1, b.y + k * LINE + 4), {"fill": TAKEN})
        _words(group, b.x + PAD, b.y + (k + 1) * LINE, what)
        _words(group, b.x + b.width - PAD, b.y + (k + 1) * LINE, time, anchor="end")


def _curve(parent: Element, a: Box, b: Box) -> None:
    """A line from below the one to the top of the other."""
    between = (a.low + b.y) / 2
    ends = ((a.middle, a.low), (a.middle, between), (b.middle, between), (b.middle, b.y))
    start, *others = (f"{x:.1f} {y:.1f}" for x, y in ends)
    SubElement(parent, "path", {**EDGE, "d": f"M {start} C {', '.join(others)}"})


def _rect(parent: Element, b: Box, look: dict[str, str]) -> None:
    place = {"x": b.x, "y": b.y, "width": b.width, "height": b.height}
    SubElement(parent, "rect", {**{k: f"{v:.1f}" for k, v in place.items()}, **look})


def _words(
    parent: Element, x: float, y: float, text: str, weight: str = "normal", anchor: str = "start"
) -> None:
    look = {"font-weight": weight, "text-anchor": anchor}
    SubElement(parent, "text", {"x": f"{x:.1f}", "y": f"{y:.1f}", **look}).text = text


def _wide(lines: Sequence[str]) -> float:
    return max(map(len, lines)) * CHAR + 2 * PAD
