"""The cost graph as SVG, without a library.

Nodes are in layers, each below those that its operands come from, in an order with few crossings
of edges (Sugiyama, Tagawa and Toda 1981). The label of an edge is above the node that it leads to.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from xml.etree.ElementTree import Element, SubElement, indent, tostring

from shardir.search.picture import CandidateRow, Described, edge_lines, heading, rows, title

CHAR, LINE, PAD, GAP = 6.7, 15.0, 8.0, 28.0
"""The width of a character, the height of a line, a margin, and the distance of nodes, in
pixels."""

ORDERING_SWEEPS = 8
"""How many times the layers are sorted, downwards and upwards in turns."""

NODE = {"fill": "#ffffff", "stroke": "#333333"}
EDGE = {"fill": "none", "stroke": "#888888"}
CHOSEN_COLOUR = "#ffe08a"
"""The colour of the chosen candidates."""


@dataclass
class Box:
    """A rectangle, with its upper left corner at x, y, in pixels."""

    width: float
    height: float
    x: float = 0.0
    y: float = 0.0

    @property
    def middle(self) -> float:
        return self.x + self.width / 2

    @property
    def bottom(self) -> float:
        return self.y + self.height


def as_svg(graphs: Sequence[Described]) -> str:
    root = Element("svg", {
        "xmlns": "http://www.w3.org/2000/svg", "font-family": "monospace", "font-size": "11",
    })  # fmt: skip
    width = height = 0.0
    for graph in graphs:
        _text(root, PAD, height + LINE + PAD, heading(graph), weight="bold")
        right, height = _draw(root, graph, height + LINE + 2 * PAD)
        width = max(width, right, _width([heading(graph)]))
    root.set("width", f"{width:.0f}")
    root.set("height", f"{height:.0f}")
    root.set("viewBox", f"0 0 {width:.0f} {height:.0f}")
    indent(root)
    return tostring(root, encoding="unicode") + "\n"


def _draw(root: Element, graph: Described, top: float) -> tuple[float, float]:
    """Draw a graph below `top`, and return its right and its lower end."""
    nodes, edges, found = graph["nodes"], graph["edges"], rows(graph)
    boxes = [
        Box(
            _width([title(n), *(f"{name}  {time}" for name, time, _ in r)]),
            (len(r) + 1) * LINE + PAD,
        )
        for n, r in zip(nodes, found, strict=True)
    ]
    texts = [edge_lines(graph, e) for e in edges]
    labels = [Box(_width(lines), len(lines) * LINE) for lines in texts]
    layers = layered(graph)
    right = max(sum(boxes[i].width + GAP for i in layer) for layer in layers)
    for layer in layers:
        into = [k for k, e in enumerate(edges) if e["to"] in layer]
        top += max((labels[k].height for k in into), default=-2 * GAP) + 2 * GAP
        _place_nodes([boxes[i] for i in layer], right, top)
        for k in into:
            a, b = boxes[edges[k]["from"]], boxes[edges[k]["to"]]
            labels[k].x = (a.middle + b.middle) / 2
        _place_labels([labels[k] for k in into], top - GAP)
        top += max(boxes[i].height for i in layer)
    for k, e in enumerate(edges):
        _curve(root, boxes[e["from"]], labels[k])
        _curve(root, labels[k], boxes[e["to"]])
    for b, lines in zip(labels, texts, strict=True):
        _rect(root, b, {"fill": "#ffffff"})
        for k, line in enumerate(lines, 1):
            _text(root, b.x + PAD, b.y + k * LINE - 4, line)
    for i, node in enumerate(nodes):
        _node(root, boxes[i], found[i], node)
    return max(b.x + b.width for b in (*boxes, *labels)) + PAD, top + PAD


def _place_nodes(layer: Sequence[Box], width: float, top: float) -> None:
    """Place nodes side by side, centred in the width."""
    at = PAD + (width - sum(b.width + GAP for b in layer)) / 2
    for b in layer:
        b.x, b.y = at, top
        at += b.width + GAP


def _place_labels(labels: Sequence[Box], bottom: float) -> None:
    """Place labels side by side, each as close to its intended middle (its `x`) as the others
    allow."""
    at = PAD
    for b in sorted(labels, key=lambda b: b.x):
        b.x, b.y = max(b.x - b.width / 2, at), bottom - b.height
        at = b.x + b.width + PAD


def layered(graph: Described) -> list[list[int]]:
    """Return the layers of nodes from the top: each node below those that its operands come from,
    an argument just above its first user; in a layer, near to the nodes connected with it."""
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
    position = {i: k / len(layer) for layer in layers for k, i in enumerate(layer)}

    def near(neighbours: list[list[int]]) -> Callable[[int], float]:
        def mean(i: int) -> float:
            found = [position[j] for j in neighbours[i]]
            return sum(found) / len(found) if found else position[i]

        return mean

    for sweep in range(ORDERING_SWEEPS):
        downwards = sweep % 2 == 0
        for layer in layers if downwards else layers[::-1]:
            layer.sort(key=near(above if downwards else below))
            position.update({i: k / len(layer) for k, i in enumerate(layer)})
    return [layer for layer in layers if layer]


# ---- elements ----


def _node(root: Element, b: Box, found: Sequence[CandidateRow], node: Described) -> None:
    group = SubElement(root, "g")
    SubElement(group, "title").text = node["at"]
    _rect(group, b, {**NODE, "rx": "0" if node["op"] else "8"})
    _text(group, b.x + PAD, b.y + LINE, title(node), weight="bold")
    for k, (name, time, chosen) in enumerate(found, 1):
        if chosen:
            look = {"fill": CHOSEN_COLOUR}
            _rect(group, Box(b.width - 2, LINE, b.x + 1, b.y + k * LINE + 4), look)
        _text(group, b.x + PAD, b.y + (k + 1) * LINE, name)
        _text(group, b.x + b.width - PAD, b.y + (k + 1) * LINE, time, anchor="end")


def _curve(parent: Element, a: Box, b: Box) -> None:
    """Draw a line from the bottom of one rectangle to the top of another."""
    between = (a.bottom + b.y) / 2
    ends = ((a.middle, a.bottom), (a.middle, between), (b.middle, between), (b.middle, b.y))
    start, *others = (f"{x:.1f} {y:.1f}" for x, y in ends)
    SubElement(parent, "path", {**EDGE, "d": f"M {start} C {', '.join(others)}"})


def _rect(parent: Element, b: Box, look: dict[str, str]) -> None:
    area = {"x": b.x, "y": b.y, "width": b.width, "height": b.height}
    SubElement(parent, "rect", {**{k: f"{v:.1f}" for k, v in area.items()}, **look})


def _text(
    parent: Element, x: float, y: float, text: str, weight: str = "normal", anchor: str = "start"
) -> None:
    look = {"font-weight": weight, "text-anchor": anchor}
    SubElement(parent, "text", {"x": f"{x:.1f}", "y": f"{y:.1f}", **look}).text = text


def _width(lines: Sequence[str]) -> float:
    return max(map(len, lines)) * CHAR + 2 * PAD
