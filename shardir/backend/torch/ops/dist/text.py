"""Lines that call the runtime's collectives."""

from collections.abc import Callable

from xdsl.ir import SSAValue

from shardir.backend.torch.emit.names import item_lines, join_items
from shardir.backend.torch.emit.scope import EmissionScope
from shardir.dialects import dist


def write_fused(s: EmissionScope, op: dist.CollectiveOp, call: str, tail: str) -> None:
    """Write `a, b = rt.call(mesh, [a, b], tail)`, in several lines if it is long. An async call
    returns one object, which `dist.wait` waits for."""
    operands = s.texts(op.values)
    tail += s.placed_results(op)
    if dist.is_started(op):
        targets = [s.result(op.outs[0], op).name]  # for all results: the others are `followers`
        tail += ", wait=False"
    elif s.in_lists(op.outs):
        targets = [s.names.new("results")]
    else:
        targets = [s.result(o, op).name if s.is_read(o) else "_" for o in op.outs]
    _write_call(s, targets, call, operands, tail, alone=len(op.values) == 1)
    if s.in_lists(op.outs) and not dist.is_started(op):
        s.bind(op.outs, targets[0], op)


def _write_call(
    s: EmissionScope, targets: list[str], call: str, operands: list[str], tail: str, alone: bool
) -> None:
    if alone:
        s.line(f"{targets[0]} = rt.{call}(mesh, {operands[0]}, {tail})")
        return
    line = f"{', '.join(targets)} = rt.{call}(mesh, [{', '.join(operands)}], {tail})"
    if len(line) < 96:
        s.line(line)
        return
    head = ", ".join(targets)
    if len(head) < 70:
        s.lines += join_items(f"{head} = rt.{call}(mesh, [", operands, f"], {tail})", s.indent)
        return
    s.line("(")
    s.lines += item_lines(targets, s.indent + 4)
    s.line(f") = rt.{call}(mesh, [")
    s.lines += item_lines(operands, s.indent + 4)
    s.line(f"], {tail})")


def write_each(
    s: EmissionScope, op: dist.CollectiveOp, text: Callable[[SSAValue, SSAValue], str]
) -> None:
    """Write one line per value, for collectives without a common buffer."""
    for v, out in zip(op.values, op.outs, strict=True):
        expression = text(v, out)
        left = s.result(out, op).name if s.is_read(out) else "_"
        s.line(f"{left} = {expression}")


def is_trivial(s: EmissionScope, op: dist.CollectiveOp) -> bool:
    """Whether a collective is over one rank; if so, let results share the operands' variables."""
    if s.mesh is not None and s.mesh.extent(op.axes.data) > 1:
        return False
    for v, out in zip(op.values, op.outs, strict=True):
        s.operand(v)
        s.same(out, v)
    return True


def call(s: EmissionScope, name: str, v: SSAValue, tail: str) -> str:
    return f"rt.{name}(mesh, {s.operand(v)}, {tail})"
