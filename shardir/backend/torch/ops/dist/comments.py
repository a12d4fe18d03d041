"""The comment of a collective: its group, its bytes, and the ops that cause it."""

from collections.abc import Iterator

from xdsl.ir import OpResult, SSAValue

from shardir.algebra.mesh import Axes
from shardir.backend.torch.emit.names import size_text
from shardir.backend.torch.emit.origins import origin
from shardir.backend.torch.emit.scope import EmissionScope
from shardir.dialects import dist, nn, train
from shardir.dialects.nn.types import size_of


def explain(s: EmissionScope, op: dist.CollectiveOp, what: str, reason: str) -> None:
    """Write the comment: the collective, its group, the bytes of its message (of the larger of the
    operands and the results on a device), and the reason."""
    pairs = zip(op.values, op.outs, strict=True)
    number = sum(max(size_of(v), size_of(o)) for v, o in pairs)
    packs = not isinstance(op, dist.AllGatherOp | dist.ReduceScatterOp)
    fused = (
        f" of {len(op.values)} tensors {'in one buffer' if packs else 'at once'}"
        if len(op.values) > 1
        else ""
    )
    started = ", started here" if dist.is_started(op) else ""
    s.note(f"{what}{fused} {over(s, op.axes.data)}, {size_text(number)}{started}: {reason}")
    s.left(op)


def over(s: EmissionScope, axes: Axes) -> str:
    assert s.mesh is not None
    names = ", ".join(map(str, axes))
    if s.rank is not None:
        group = next(g for g in s.mesh.groups(axes) if s.rank in g)
        return f"over {names} (ranks {', '.join(map(str, group))})"
    return f"over {names} ({s.mesh.extent(axes)} ranks)"


def listed_names(items: list[str], most: int = 4) -> str:
    shown = items[:most] + ([f"{len(items) - most} more"] if len(items) > most else [])
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"


def made_by(op: dist.CollectiveOp) -> str:
    """The ops that produce the operands, before views and other collectives."""
    causes = list(dict.fromkeys(origin(producer(v)) for v in op.values))
    return f"{listed_names(causes)} {'leaves' if len(causes) == 1 else 'leave'}"


def producer(v: SSAValue) -> SSAValue:
    """The value before views and other collectives."""
    passing = (nn.ReshapeOp, nn.TransposeOp, nn.BroadcastOp, nn.ConvertOp, nn.StopGradientOp)
    while isinstance(v.owner, (*passing, dist.CollectiveOp, dist.WaitOp, dist.HandsOn)):
        assert isinstance(v, OpResult)
        v = v.owner.operands[0 if isinstance(v.owner, dist.HandsOn) else v.index]
    return v


def needed_by(op: dist.CollectiveOp) -> str:
    """The ops that read the results, after views and other collectives."""
    users: list[str] = []
    for out in op.outs:
        users += (t for t in readers(out) if t not in users)
    return (
        f"{listed_names(users, 2)} {'needs' if len(users) == 1 else 'need'}"
        if users
        else "it gives"
    )


def readers(v: SSAValue, seen: tuple[SSAValue, ...] = ()) -> Iterator[str]:
    for use in v.uses:
        user = use.operation
        if isinstance(user, dist.HandsOn):
            to = user.results[0] if not isinstance(user, train.CarryOp) else user.carried
            if to not in seen:
                yield from readers(to, (*seen, to))
        elif isinstance(user, dist.CollectiveOp | dist.WaitOp):
            yield from readers(user.results[use.index], seen)
        elif user.name == "func.return":
            yield "the function's result"
        elif user.results:
            yield origin(user.results[0])
        else:
            yield user.name


def partial_values(kind: str) -> str:
    return {"sum": "partial sums", "mean": "partial means"}.get(kind, f"a {kind} of its own rows")


def names_of(op: dist.CollectiveOp) -> str:
    return listed_names([f"%{v.name_hint}" if v.name_hint else "a value" for v in op.values])
