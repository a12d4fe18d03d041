"""The comment of a collective: its group, its bytes, and the ops that cause it."""

from xdsl.ir import Operation

from shardir.algebra.mesh import Axes
from shardir.analysis.causes import producer, readers
from shardir.backend.torch.emit.names import listed_names
from shardir.backend.torch.emit.origins import origin
from shardir.backend.torch.emit.scope import EmissionScope
from shardir.diagnostics import size_text
from shardir.dialects import dist
from shardir.dialects.nn.types import size_of


def explain(s: EmissionScope, op: dist.CollectiveOp, what: str, reason: str) -> None:
    """Write the comment: the collective, its group, the bytes of its message (for each value the
    larger of operand and result on a device), and the reason."""
    pairs = zip(op.values, op.outs, strict=True)
    number = sum(max(size_of(v), size_of(o)) for v, o in pairs)
    packs = not isinstance(op, dist.AllGatherOp | dist.ReduceScatterOp)
    fused = (
        f" of {len(op.values)} tensors {'in one buffer' if packs else 'at once'}"
        if len(op.values) > 1
        else ""
    )
    started = ", started here" if dist.is_started(op) else ""
    s.note(f"{what}{fused} {over_axes(s, op.axes.data)}, {size_text(number)}{started}: {reason}")
    s.left(op)


def over_axes(s: EmissionScope, axes: Axes) -> str:
    assert s.mesh is not None
    names = ", ".join(map(str, axes))
    if s.rank is not None:
        group = next(g for g in s.mesh.groups(axes) if s.rank in g)
        return f"over {names} (ranks {', '.join(map(str, group))})"
    return f"over {names} ({s.mesh.extent(axes)} ranks)"


def made_by(op: dist.CollectiveOp) -> str:
    """The ops that produce the operands, looking through views and other collectives."""
    causes = list(dict.fromkeys(origin(producer(v)) for v in op.values))
    return f"{listed_names(causes)} {'leaves' if len(causes) == 1 else 'leave'}"


def needed_by(s: EmissionScope, op: dist.CollectiveOp) -> str:
    """The first op that reads the results, looking through views and other collectives, and the
    number of other readers."""
    at = s.storages.at
    ops_that_read = dict.fromkeys(reader for out in op.outs for reader in readers(out))
    users = list(
        dict.fromkeys(
            reader_text(r) for r in sorted(ops_that_read, key=lambda r: at.get(r, len(at)))
        )
    )
    return (
        f"{listed_names(users, 1)} {'needs' if len(users) == 1 else 'need'}"
        if users
        else "it gives"
    )


def reader_text(user: Operation) -> str:
    """The text of an op that reads a value."""
    if user.name == "func.return":
        return "the function's result"
    return origin(user.results[0]) if user.results else user.name


def names_of(op: dist.CollectiveOp) -> str:
    return listed_names([f"%{v.name_hint}" if v.name_hint else "a value" for v in op.values])
