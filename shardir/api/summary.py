"""What a compiled program is, in about ten lines, for a prompt and for a notebook.

Sequential on 4 devices
  mesh        @m <dp = 2, tp = 2>
  plan        fsdp(dp) * megatron(tp)
  parameters  19,210 elements, 75.0 KiB; 18.8 KiB on a device
  @step       2.47 ms estimated, of which 2.29 ms wait for communication; 173.1 KiB on a device
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from math import prod
from typing import NamedTuple

from xdsl.dialects.builtin import ModuleOp
from xdsl.passes import ModulePass

from shardir.cost.report import FunctionCost
from shardir.diagnostics import seconds_text, size_text
from shardir.dialects.nn.types import size_of, unsharded_type
from shardir.dialects.train import Role, arguments
from shardir.reports.plan_text import plan_text
from shardir.rewriting.functions import bodies


@dataclass(frozen=True)
class Summary:
    """Rows of a name and a text below a title."""

    title: str
    rows: Sequence[tuple[str, str]]

    def __str__(self) -> str:
        width = max((len(name) for name, _ in self.rows), default=0)
        return "\n".join([self.title, *(f"  {name:{width}}  {text}" for name, text in self.rows)])

    def html(self) -> str:
        """Return the table in HTML."""
        rows = "".join(
            f'<tr><th style="text-align: left">{escape(name)}</th>'
            f'<td style="text-align: left">{escape(text)}</td></tr>'
            for name, text in self.rows
        )
        return f"<table><caption>{escape(self.title)}</caption>{rows}</table>"


class Weights(NamedTuple):
    """The elements of all parameters of a program, and their bytes."""

    elements: int
    bytes: int


def rows_of(
    original: ModuleOp, lowered: ModuleOp, passes: Sequence[ModulePass], costs: list[FunctionCost]
) -> Iterator[tuple[str, str]]:
    """Yield the rows of a program.

    Args:
        original: the program for one device.
        lowered: the program after its `passes`.
        costs: of the public functions of the lowered program.
    """
    for mesh in dict.fromkeys(c.mesh for c in costs):
        yield "mesh", str(mesh)
    yield "plan", plan_text(lowered, passes)
    weights = _weights(original)
    text = f"{weights.elements:,} elements, {size_text(weights.bytes)}"
    if costs:
        on_device = max(c.memory.parts["parameters"] for c in costs)
        text += f"; {size_text(on_device)} on a device"
    yield "parameters", text
    for c in costs:
        waits = sum(c.exposed.values())
        of = f", of which {seconds_text(waits)} wait for communication" if waits else ""
        memory = f"{size_text(c.memory.peak)} on a device"
        yield f"@{c.name}", f"{seconds_text(c.seconds)} estimated{of}; {memory}"


def _weights(original: ModuleOp) -> Weights:
    """Return the elements and bytes of the parameters of a program, each once."""
    values = {
        a.key: v
        for f, block in bodies(original)
        for a, v in zip(arguments(f), block.args, strict=True)
        if a.role is Role.PARAMETER
    }
    shapes = [unsharded_type(v).get_shape() for v in values.values()]
    return Weights(sum(map(prod, shapes)), sum(map(size_of, values.values())))
