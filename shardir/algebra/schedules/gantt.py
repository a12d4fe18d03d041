"""The timeline of a schedule as SVG, without a library."""

from collections.abc import Sequence
from xml.etree.ElementTree import Element, SubElement, indent, tostring

from shardir.algebra.schedules.schedule import Action

ROW, PAD, LABEL, WIDTH = 24.0, 8.0, 56.0, 960.0
"""The height of a row, a margin, the width of the names of ranks, and the width of the time axis,
in pixels."""
MIN_TEXT = 7.0
"""The minimum width of an action, in pixels a character, for its microbatch to be written into
it."""

COLOURS = {"F": "#9ecae1", "I": "#a1d99b", "W": "#fdd0a2", "B": "#c7e9c0"}
"""The colours of actions. The stages of a rank have darker ones from the second on."""
NAMES = {
    "F": "forward",
    "I": "gradients of inputs",
    "W": "gradients of weights",
    "B": "all gradients",
}
DARKER = 0.8
"""The ratio of the colour of a stage to the colour of the stage before it on its rank."""

Runs = Sequence[tuple[float, float, Action]]
"""The begin and the end of the actions of a rank, in seconds."""


def as_svg(ranks: Sequence[Runs]) -> str:
    """Return a drawing of what ranks do: a row for each, time to the right."""
    makespan = max((end for runs in ranks for _, end, _ in runs), default=0.0)
    scale = WIDTH / makespan if makespan else 0.0
    height = (len(ranks) + 1) * ROW + 3 * PAD
    root = Element("svg", {
        "xmlns": "http://www.w3.org/2000/svg", "font-family": "monospace", "font-size": "10",
        "width": f"{LABEL + WIDTH + 2 * PAD:.0f}", "height": f"{height:.0f}",
        "viewBox": f"0 0 {LABEL + WIDTH + 2 * PAD:.0f} {height:.0f}",
    })  # fmt: skip
    SubElement(root, "rect", {"width": "100%", "height": "100%", "fill": "#ffffff"})
    for rank, runs in enumerate(ranks):
        y = PAD + rank * ROW
        _text(root, PAD, y + ROW / 2, f"rank {rank}", "start")
        _rect(root, LABEL, y, WIDTH, "#eeeeee")
        stages = sorted({a.stage for _, _, a in runs})
        for begin, end, a in runs:
            group = SubElement(root, "g")
            SubElement(group, "title").text = f"{a}: {begin:.4g} to {end:.4g}"
            x, width = LABEL + begin * scale, (end - begin) * scale
            _rect(group, x, y, width, _colour(a.kind, stages.index(a.stage)), "#ffffff")
            label = str(a.microbatch)
            if width >= MIN_TEXT * len(label):
                _text(group, x + width / 2, y + ROW / 2, label)
    _legend(root, ranks, len(ranks) * ROW + 2 * PAD, makespan)
    indent(root)
    return tostring(root, encoding="unicode") + "\n"


def _legend(root: Element, ranks: Sequence[Runs], y: float, makespan: float) -> None:
    x = LABEL
    kinds = {a.kind for runs in ranks for _, _, a in runs}
    for kind in (k for k in NAMES if k in kinds):
        _rect(root, x, y, ROW, _colour(kind, 0))
        _text(root, x + ROW + PAD, y + ROW / 2, f"{kind} {NAMES[kind]}", "start")
        x += WIDTH / 5
    _text(root, LABEL + WIDTH, y + ROW / 2, f"{makespan:.4g} s", "end")


def _colour(kind: str, index: int) -> str:
    """Return the colour of an action of the index-th stage of its rank."""
    red, green, blue = (int(COLOURS[kind][k : k + 2], 16) for k in (1, 3, 5))
    factor = DARKER**index
    return "#" + "".join(f"{round(each * factor):02x}" for each in (red, green, blue))


def _rect(parent: Element, x: float, y: float, width: float, fill: str, edge: str = "none") -> None:
    look = {"x": f"{x:.1f}", "y": f"{y:.1f}", "width": f"{width:.1f}", "height": f"{ROW - 2:.0f}"}
    SubElement(parent, "rect", {**look, "fill": fill, "stroke": edge})


def _text(parent: Element, x: float, y: float, text: str, anchor: str = "middle") -> None:
    look = {"x": f"{x:.1f}", "y": f"{y + 2:.1f}", "text-anchor": anchor}
    SubElement(parent, "text", look).text = text
