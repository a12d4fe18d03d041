"""What each collective is in the runtime, with the comment that says why it is there."""

from collections import deque
from collections.abc import Callable, Iterator
from functools import lru_cache

from xdsl.ir import Operation, OpResult, SSAValue

from shardir.algebra.mesh import Axes, Mesh, shard_bounds
from shardir.backend.torch.emit.names import (
    axes_text,
    joined,
    listed,
    literal,
    size_text,
    tuple_text,
)
from shardir.backend.torch.emit.scope import Scope, Text
from shardir.cost.seconds import size_of
from shardir.diagnostics import Failure
from shardir.dialects import dist, nn

# ---- why ----


def _why(s: Scope, op: dist.CollectiveOp, what: str, reason: str) -> None:
    """The comment: what goes over which ranks, its bytes per device, and the cause."""
    pairs = zip(op.values, op.outs, strict=True)
    number = sum(max(size_of(v), size_of(o)) for v, o in pairs)
    fused = f" of {len(op.values)} tensors in one buffer" if len(op.values) > 1 else ""
    started = ", started here" if dist.is_started(op) else ""
    s.note(f"{what}{fused} {_over(s, op.axes.data)}, {size_text(number)}{started}: {reason}")
    s.left(op)


def _over(s: Scope, axes: Axes) -> str:
    assert s.mesh is not None
    names = ", ".join(map(str, axes))
    if s.rank is not None:
        group = next(g for g in s.mesh.groups(axes) if s.rank in g)
        return f"over {names} (ranks {', '.join(map(str, group))})"
    return f"over {names} ({s.mesh.extent(axes)} ranks)"


def _listed(items: list[str], most: int = 4) -> str:
    shown = items[:most] + ([f"{len(items) - most} more"] if len(items) > most else [])
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"


def _made_by(s: Scope, op: dist.CollectiveOp) -> str:
    """What left the operands as they are: the ops behind views and earlier collectives."""
    causes = list(dict.fromkeys(s.called(_cause(v)) for v in op.values))
    return f"{_listed(causes)} {'leaves' if len(causes) == 1 else 'leave'}"


def _cause(v: SSAValue) -> SSAValue:
    """The value behind views and other collectives."""
    passing = (nn.ReshapeOp, nn.TransposeOp, nn.BroadcastOp, nn.ConvertOp, nn.StopGradientOp)
    while isinstance(v.owner, (*passing, dist.CollectiveOp, dist.WaitOp)):
        assert isinstance(v, OpResult)
        v = v.owner.operands[v.index]
    return v


def _needed_by(s: Scope, op: dist.CollectiveOp) -> str:
    """Who reads the results, behind views and other collectives."""
    users: list[str] = []
    for out in op.outs:
        users += (t for t in _readers(s, out) if t not in users)
    return f"{_listed(users, 2)} {'needs' if len(users) == 1 else 'need'}" if users else "it gives"


def _readers(s: Scope, v: SSAValue) -> Iterator[str]:
    for use in v.uses:
        user = use.operation
        if isinstance(user, dist.CollectiveOp | dist.WaitOp):
            yield from _readers(s, user.results[use.index])
        elif user.name == "func.return":
            yield "the function's result"
        elif user.results:
            yield s.called(user.results[0])
        else:
            yield user.name


# ---- shards that lie within shards ----


@lru_cache(maxsize=4096)
def _nests(total: int, outer: int, inner: int) -> bool:
    """Whether splitting each of `outer` shards into `inner` ones gives the shards of the whole."""
    for k in range(outer):
        first, last = shard_bounds(total, outer, k)
        for j in range(inner):
            have = [first + b for b in shard_bounds(last - first, inner, j)]
            want = list(shard_bounds(total, outer * inner, k * inner + j))
            if have != want and (have[0] != have[1] or want[0] != want[1]):
                return False
    return True


def _check_nesting(s: Scope, op: dist.CollectiveOp, v: SSAValue, dim: int, minor: int) -> None:
    """Raises Failure when a dimension is split twice and the shards do not lie within each other.

    `v` is the value with the finer split; `minor` how many of its axes the collective is over.
    """
    assert s.mesh is not None
    axes = s.axes(v, dim)
    outer = axes[: len(axes) - minor]
    total = s.whole(v)[dim]
    if outer and not _nests(total, s.mesh.extent(outer), s.mesh.extent(axes[len(outer) :])):
        cut = s.mesh.extent(outer), s.mesh.extent(axes)
        raise Failure.at(
            op, f"dimension {dim} of {total} rows: its {cut[1]} shards do not lie within its "
            f"{cut[0]} shards over the major axes; move all of its axes in one collective, or make "
            f"the size a multiple of {cut[1]}",
        )  # fmt: skip


def _total(s: Scope, op: dist.CollectiveOp, v: SSAValue, out: SSAValue, dim: int) -> str | None:
    """The size of a dimension after gathering, where that is not n times the one before."""
    _check_nesting(s, op, v, dim, len(op.axes.data))
    return None if s.is_even(v, dim) else s.rows(s.whole(out)[dim], s.axes(out, dim))


# ---- text ----


def _values(s: Scope, op: dist.CollectiveOp) -> str:
    """The operand, or the list of them."""
    given = [s.operand(v) for v in op.values]
    return given[0] if len(given) == 1 else f"[{', '.join(given)}]"


def _write(s: Scope, op: dist.CollectiveOp, call: str, tail: str) -> None:
    """`a, b = rt.call(mesh, [a, b], tail)`, over several lines where that is long. One that is only
    started gives one thing, for which `dist.wait` waits."""
    given = [s.operand(v) for v in op.values]
    if dist.is_started(op):
        first, *more = op.outs
        left = [s.result(first, op).name]
        for out in more:
            s.same(out, first)
        tail += ", wait=False"
    else:
        left = [s.result(o, op).name if s.is_read(o) else "_" for o in op.outs]
    if len(given) == 1:
        s.line(f"{left[0]} = rt.{call}(mesh, {given[0]}, {tail})")
        return
    line = f"{', '.join(left)} = rt.{call}(mesh, [{', '.join(given)}], {tail})"
    if len(line) < 96:
        s.line(line)
        return
    head = ", ".join(left)
    if len(head) < 70:
        s.lines += joined(f"{head} = rt.{call}(mesh, [", given, f"], {tail})", 4)
        return
    s.lines += ["    (", *listed(left, 8), f"    ) = rt.{call}(mesh, ["]
    s.lines += [*listed(given, 8), f"    ], {tail})"]


def _each(s: Scope, op: dist.CollectiveOp, text: Callable[[SSAValue, SSAValue], str]) -> None:
    """One line per value, for what does not travel together."""
    for v, out in zip(op.values, op.outs, strict=True):
        expression = text(v, out)
        left = s.result(out, op).name if s.is_read(out) else "_"
        s.line(f"{left} = {expression}")


def _trivial(s: Scope, op: dist.CollectiveOp) -> bool:
    """A collective over one rank is nothing."""
    if s.mesh is not None and s.mesh.extent(op.axes.data) > 1:
        return False
    for v, out in zip(op.values, op.outs, strict=True):
        s.operand(v)
        s.same(out, v)
    return True


def _all_reduce(s: Scope, op: dist.AllReduceOp) -> Text:
    if _trivial(s, op):
        return None
    kind = op.reduction.data
    _why(s, op, f"all-reduce {kind}", f"{_made_by(s, op)} {_partials(kind)}")
    tail = f"{literal(kind)}, {axes_text(op.axes.data)}"
    (first, *more) = op.values
    s.operand(first)
    if not more and s.storages.is_free(first, op):
        s.storages.join(op.outs[0], first)
        tail += ", donate=True"
    _write(s, op, "all_reduce", tail)
    return None


def _partials(kind: str) -> str:
    return {"sum": "partial sums", "mean": "partial means"}.get(kind, f"a {kind} of its own rows")


def _reduce_scatter(s: Scope, op: dist.ReduceScatterOp) -> Text:
    if _trivial(s, op):
        return None
    kind, dim = op.reduction.data, op.dim.value.data
    for out in op.outs:
        _check_nesting(s, op, out, dim, len(op.axes.data))
    reason = f"{_made_by(s, op)} {_partials(kind)}, {_needed_by(s, op)} a shard of dimension {dim}"
    _why(s, op, f"reduce-scatter {kind}", reason)
    _write(s, op, "reduce_scatter", f"{literal(kind)}, {dim}, {axes_text(op.axes.data)}")
    return None


def _all_gather(s: Scope, op: dist.AllGatherOp) -> Text:
    if _trivial(s, op):
        return None
    dim = op.dim.value.data
    _why(s, op, "all-gather", f"{_needed_by(s, op)} dimension {dim} of {_names(s, op)} whole")
    tail = f"{dim}, {axes_text(op.axes.data)}{_totals(s, op, dim)}"
    _write(s, op, "all_gather", tail)
    return None


def _totals(s: Scope, op: dist.CollectiveOp, dim: int) -> str:
    """`, total=...` where the sizes of the dimension after gathering are to be said."""
    totals = [_total(s, op, v, o, dim) for v, o in zip(op.values, op.outs, strict=True)]
    if not any(totals):
        return ""
    each = [t or "None" for t in totals]
    return f", total={each[0] if len(each) == 1 else '[' + ', '.join(each) + ']'}"


def _names(s: Scope, op: dist.CollectiveOp) -> str:
    return _listed([f"%{v.name_hint}" if v.name_hint else "a value" for v in op.values])


def _slice(s: Scope, op: dist.AllSliceOp) -> Text:
    if _trivial(s, op):
        return None
    dim = op.dim.value.data
    for out in op.outs:
        _check_nesting(s, op, out, dim, len(op.axes.data))
    s.note(f"own shard of dimension {dim} {_over(s, op.axes.data)}, no communication: "
           f"{_needed_by(s, op)} no more")  # fmt: skip
    s.left(op)
    _each(s, op, lambda v, _: _call(s, "slice", v, f"{dim}, {axes_text(op.axes.data)}"))
    return None


def _call(s: Scope, name: str, v: SSAValue, tail: str) -> str:
    return f"rt.{name}(mesh, {s.operand(v)}, {tail})"


def _all_to_all(s: Scope, op: dist.AllToAllOp) -> Text:
    if _trivial(s, op):
        return None
    split, concat = op.split.value.data, op.concat.value.data
    for out in op.outs:
        _check_nesting(s, op, out, split, len(op.axes.data))
    _why(s, op, "all-to-all", f"{_needed_by(s, op)} {_names(s, op)} split in dimension {split}, "
         f"not {concat}")  # fmt: skip
    tail = f"{split}, {concat}, {axes_text(op.axes.data)}{_totals(s, op, concat)}"
    _write(s, op, "all_to_all", tail)
    return None


def _exchange(s: Scope, op: dist.ExchangeOp) -> Text:
    assert s.mesh is not None
    s.use("moves")
    _why(s, op, "exchange", f"{_needed_by(s, op)} {_names(s, op)} split otherwise")

    def text(v: SSAValue, out: SSAValue) -> str:
        shape = tuple_text(list(map(str, s.whole(v))))
        ends = [
            tuple_text([axes_text(s.axes(x, d)) for d in range(len(s.whole(x)))]) for x in (v, out)
        ]
        return f"moves.exchange(mesh, {s.operand(v)}, {shape}, {', '.join(ends)})"

    _each(s, op, text)
    return None


def _windows(s: Scope, op: dist.WindowsOp) -> Text:
    assert s.mesh is not None
    s.use("windows")
    away, dim, mesh = isinstance(op, dist.HaloFoldOp), op.dim.value.data, s.mesh
    halo = max(
        op.windows(v, o, mesh).halo(mesh.extent(op.axes.data))
        for v, o in zip(op.values, op.outs, strict=True)
    )
    what = "send rows of others, to be added" if away else "fetch rows of others"
    _why(s, op, f"halo exchange, {halo} rows at most",
         f"{_needed_by(s, op)} windows of dimension {dim}; {what}")  # fmt: skip

    def text(v: SSAValue, out: SSAValue) -> str:
        w = op.windows(v, out, mesh)
        lowest = (
            ", lowest=True" if isinstance(op, dist.HaloUnfoldOp) and op.lowest is not None else ""
        )
        numbers = f"{w.rows}, {w.count}, {w.size}, {w.step}, {w.offset}{lowest}"
        call = "fold_split" if away else "unfold_split"
        axes = axes_text(op.axes.data)
        return f"windows.{call}(mesh, {s.operand(v)}, {dim}, {axes}, {numbers})"

    _each(s, op, text)
    return None


def _contribute(s: Scope, op: dist.ReplicatedToPartialOp) -> Text:
    if _trivial(s, op):
        return None
    if op.reduction.data != "sum":
        for v, out in zip(op.values, op.outs, strict=True):
            s.operand(v)
            s.same(out, v)
        return None
    s.use("ops")
    s.note(f"a partial sum {_over(s, op.axes.data)}, no communication: the first rank has it all")
    s.left(op)
    _each(s, op, lambda v, _: f"ops.contribute(mesh, {s.operand(v)}, {axes_text(op.axes.data)})")
    return None


def _pad(s: Scope, op: dist.ShardedToPartialOp) -> Text:
    if _trivial(s, op):
        return None
    dim = op.dim.value.data
    s.use("ops")
    s.note(f"a partial sum {_over(s, op.axes.data)}, no communication: zeros but in the rank's own "
           f"shard of dimension {dim}")  # fmt: skip
    s.left(op)

    def text(v: SSAValue, out: SSAValue) -> str:
        total = _total(s, op, v, out, dim)
        tail = f", total={total}" if total else ""
        return f"ops.pad(mesh, {s.operand(v)}, {dim}, {axes_text(op.axes.data)}{tail})"

    _each(s, op, text)
    return None


def _broadcast(s: Scope, op: dist.BroadcastFromRootOp) -> Text:
    if _trivial(s, op):
        return None
    root = op.root.value.data
    _why(s, op, f"broadcast from position {root}", f"{_needed_by(s, op)} {_names(s, op)}")
    _each(s, op, lambda v, _: _call(s, "broadcast", v, f"{root}, {axes_text(op.axes.data)}"))
    return None


def _gather(s: Scope, op: dist.GatherToRootOp) -> Text:
    if _trivial(s, op):
        return None
    dim, root = op.dim.value.data, op.root.value.data
    _why(s, op, f"gather to position {root}", f"{_needed_by(s, op)} dimension {dim} whole there")

    def text(v: SSAValue, out: SSAValue) -> str:
        total = _total(s, op, v, out, dim)
        tail = f", total={total}" if total else ""
        return _call(s, "gather", v, f"{dim}, {root}, {axes_text(op.axes.data)}{tail}")

    _each(s, op, text)
    return None


def _scatter(s: Scope, op: dist.ScatterFromRootOp) -> Text:
    if _trivial(s, op):
        return None
    dim, root = op.dim.value.data, op.root.value.data
    for out in op.outs:
        _check_nesting(s, op, out, dim, len(op.axes.data))
    _why(s, op, f"scatter from position {root}", f"{_needed_by(s, op)} a shard of dimension {dim}")
    _each(s, op, lambda v, _: _call(s, "scatter", v, f"{dim}, {root}, {axes_text(op.axes.data)}"))
    return None


def _permute(s: Scope, op: dist.PermuteOp) -> Text:
    ends = zip(op.pairs.data[::2], op.pairs.data[1::2], strict=True)
    pairs = tuple_text([f"({a}, {b})" for a, b in ends])
    _why(s, op, "permute", f"{_needed_by(s, op)} what another rank has")

    def text(v: SSAValue, out: SSAValue) -> str:
        tail = f"{pairs}, {axes_text(op.axes.data)}"
        even = all(s.is_even(v, d) for d in range(len(s.shape_of(v))))
        return _call(s, "permute", v, tail if even else f"{tail}, {tuple_text(s.sizes(out))}")

    _each(s, op, text)
    return None


def _ends(s: Scope, op: dist.SendOp | dist.RecvOp) -> str:
    return f"{op.source.value.data}, {op.target.value.data}, {axes_text(op.axes.data)}"


def _send(s: Scope, op: dist.SendOp) -> Text:
    s.mail.setdefault(_ends(s, op), deque()).append(op)
    number = size_text(size_of(op.value))
    ends = f"from position {op.source.value.data} to {op.target.value.data}"
    cause = s.called(_cause(op.value))
    s.note(f"send {ends} {_over(s, op.axes.data)}, {number}: {cause} is used there")
    s.line(f"rt.send(mesh, {s.operand(op.value)}, {_ends(s, op)})")
    s.place = None
    return None


def _recv(s: Scope, op: dist.RecvOp) -> Text:
    waiting = s.mail.get(_ends(s, op))
    if not waiting:
        raise Failure.at(op, "[C11] a dist.recv without a dist.send before it: a deadlock")
    sent = waiting.popleft().value
    if s.shape_of(sent) != s.shape_of(op.out) or s.element(sent) != s.element(op.out):
        raise Failure.at(op, f"[C11] what is sent is {sent.type}, what is received {op.out.type}")
    number = size_text(size_of(op.out))
    users = _listed(list(dict.fromkeys(_readers(s, op.out))) or ["nobody"], 2)
    s.note(f"receive at position {op.target.value.data} from {op.source.value.data} "
           f"{_over(s, op.axes.data)}, {number}: for {users}")  # fmt: skip
    s.place = None
    return f"rt.recv(mesh, {tuple_text(s.sizes(op.out))}, {s.dtype(op.out)}, {_ends(s, op)})"


def _wait(s: Scope, op: dist.WaitOp) -> Text:
    assert s.mesh is not None
    if s.mesh.extent(op.started.axes.data) == 1:
        for v, out in zip(op.values, op.outs, strict=True):
            s.same(out, v)
        return None
    right = f"{s.operand(op.values[0])}.wait()"
    left = [s.result(o, op).name if s.is_read(o) else "_" for o in op.outs]
    line = f"{', '.join(left)} = {right}"
    s.lines += [f"    {line}"] if len(line) < 96 else joined("(", left, f") = {right}", 4)
    return None


def groups_of(mesh: Mesh | None, ops: Iterator[Operation]) -> list[Axes]:
    """The axes of all collectives, each once, in the order of the program."""
    found: dict[Axes, None] = {}
    for op in ops:
        if isinstance(op, dist.LOCAL) or mesh is None:
            continue
        if isinstance(op, dist.CollectiveOp | dist.SendOp | dist.RecvOp):
            axes = op.axes.data
            if mesh.extent(axes) > 1:
                found.setdefault(axes)
    return list(found)


TORCH_DIST: dict[type[Operation], Callable[..., Text]] = {
    dist.AllReduceOp: _all_reduce,
    dist.ReduceScatterOp: _reduce_scatter,
    dist.AllGatherOp: _all_gather,
    dist.AllSliceOp: _slice,
    dist.AllToAllOp: _all_to_all,
    dist.ExchangeOp: _exchange,
    dist.HaloUnfoldOp: _windows,
    dist.HaloFoldOp: _windows,
    dist.ReplicatedToPartialOp: _contribute,
    dist.ShardedToPartialOp: _pad,
    dist.BroadcastFromRootOp: _broadcast,
    dist.GatherToRootOp: _gather,
    dist.ScatterFromRootOp: _scatter,
    dist.PermuteOp: _permute,
    dist.SendOp: _send,
    dist.RecvOp: _recv,
    dist.WaitOp: _wait,
}
