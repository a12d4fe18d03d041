"""What a program in the local view costs: a table per function, and the same as Python values.

@step on @m <dp = 2, tp = 2>: 1.29e-03 s
  op                          place      flops    bytes   seconds
  %y = nn.matmul              x.ir:5       192      176  5.00e-06
  %s_1 = dist.all_reduce      x.ir:6         -        6  9.00e-04  ring over {dp, tp}
  calculation                              ...
  communication over {dp}                    -       48  3.00e-04
"""

from collections.abc import Iterator
from dataclasses import dataclass

from xdsl.dialects.builtin import ModuleOp
from xdsl.dialects.func import FuncOp
from xdsl.ir import Operation

from shardir.algebra.cluster import Cluster
from shardir.algebra.mesh import Axes, Mesh, axes_text
from shardir.cost.functions import functions, is_global
from shardir.cost.seconds import OpCost, cost_of
from shardir.dialects.places import file_place


@dataclass(frozen=True)
class FunctionCost:
    """What one call of a function costs a device: its ops one after the other, no two at once."""

    name: str
    mesh: Mesh
    ops: tuple[OpCost, ...]

    @property
    def seconds(self) -> float:
        return sum(c.seconds for c in self.ops)

    @property
    def flops(self) -> int:
        return sum(c.flops for c in self.ops)

    @property
    def calculation(self) -> float:
        """The seconds of what does not communicate."""
        return sum(c.seconds for c in self.ops if not c.communicates)

    @property
    def communication(self) -> dict[Axes, tuple[int, float]]:
        """Bytes received, and seconds, by the axes over which they are communicated."""
        found: dict[Axes, tuple[int, float]] = {}
        for c in self.ops:
            if c.communicates:
                received, seconds = found.get(c.axes, (0, 0.0))
                found[c.axes] = received + c.bytes, seconds + c.seconds
        return found

    def __str__(self) -> str:
        rows = [("op", "place", "flops", "bytes", "seconds", "")]
        rows += [_row(c) for c in self.ops if c.seconds]
        touched = sum(c.bytes for c in self.ops if not c.communicates)
        rows.append(("calculation", "", str(self.flops), str(touched), _s(self.calculation), ""))
        for axes, (received, seconds) in self.communication.items():
            what = f"communication over {axes_text(axes)}"
            rows.append((what, "", "-", str(received), _s(seconds), ""))
        return "\n".join([f"@{self.name} on {self.mesh}: {_s(self.seconds)} s", *table(rows)])


def report(module: ModuleOp, cluster: Cluster | None = None) -> list[FunctionCost]:
    """What the functions in the local view, and those without layouts, cost.

    Args:
        cluster: the devices and wires, if not those that the meshes are on.

    Raises:
        ShardirError: a mesh is no part of the cluster, or nothing is known of an op.
    """
    return [cost_of_function(f, mesh) for f, mesh in functions(module, cluster) if not is_global(f)]


def cost_of_function(f: FuncOp, mesh: Mesh) -> FunctionCost:
    """What a function in the local view costs on the mesh's cluster."""
    found = (cost_of(op, mesh) for op in f.body.block.ops)
    return FunctionCost(f.sym_name.data, mesh, tuple(c for c in found if c is not None))


def _row(c: OpCost) -> tuple[str, ...]:
    how = f"{c.form} over {axes_text(c.axes)}" if c.communicates else ""
    flops = "-" if c.communicates else str(c.flops)
    return called(c.op), place(c.op), flops, str(c.bytes), _s(c.seconds), how


def called(op: Operation) -> str:
    """`%y = nn.matmul`"""
    names = [f"%{v.name_hint}" for v in op.results if v.name_hint]
    shown = names if len(names) < 4 else [names[0], "...", names[-1]]
    return f"{', '.join(shown)}{' = ' if names else ''}{op.name}"


def place(op: Operation) -> str:
    """`net.ir:22`, or nothing where it is not known."""
    found = file_place(op.location)
    return f"{found[0]}:{found[1]}" if found else ""


def table(rows: list[tuple[str, ...]]) -> Iterator[str]:
    """Lines with their columns below each other, indented: two of text, then numbers, then text."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    last = len(widths) - 1
    for row in rows:
        cells = [
            text.ljust(w) if i < 2 else text if i == last else text.rjust(w)
            for i, (text, w) in enumerate(zip(row, widths, strict=True))
        ]
        yield f"  {'  '.join(cells)}".rstrip()


def _s(seconds: float) -> str:
    return f"{seconds:.3g}"
