"""Uneven shards of a collective: sizes after gathering, and nested shards."""

from functools import lru_cache

from xdsl.ir import SSAValue

from shardir.algebra.mesh import shard_bounds
from shardir.backend.torch.emit.scope import EmissionScope
from shardir.diagnostics import Failure
from shardir.dialects import dist


@lru_cache(maxsize=4096)
def _nests(total: int, outer: int, inner: int) -> bool:
    """Whether `outer` shards of `total` elements, each split into `inner` shards, are the
    outer * inner shards of `total` elements."""
    for k in range(outer):
        first, last = shard_bounds(total, outer, k)
        for j in range(inner):
            have = [first + b for b in shard_bounds(last - first, inner, j)]
            want = list(shard_bounds(total, outer * inner, k * inner + j))
            if have != want and (have[0] != have[1] or want[0] != want[1]):
                return False
    return True


def check_nesting(
    s: EmissionScope, op: dist.CollectiveOp, v: SSAValue, dim: int, minor: int
) -> None:
    """Raise Failure if a dimension is split twice and its shards are not nested.

    `v` is the value with the finer split; the collective is over the last `minor` of its axes.
    """
    assert s.mesh is not None
    axes = s.axes(v, dim)
    outer = axes[: len(axes) - minor]
    total = s.global_shape(v)[dim]
    if outer and not _nests(total, s.mesh.extent(outer), s.mesh.extent(axes[len(outer) :])):
        cut = s.mesh.extent(outer), s.mesh.extent(axes)
        raise Failure.at(
            op, f"expected nested shards of dimension {dim} of size {total}, got "
            f"{cut[1]} that are not within the {cut[0]} over the major axes; move all of its axes "
            f"in one collective, or make the size a multiple of {cut[1]}",
        )  # fmt: skip


def gathered_size(
    s: EmissionScope, op: dist.CollectiveOp, v: SSAValue, out: SSAValue, dim: int
) -> str | None:
    """The size of a dimension after gathering, if it is not n times the size before; else None."""
    check_nesting(s, op, v, dim, len(op.axes.data))
    return None if s.is_even(v, dim) else s.rows(s.global_shape(out)[dim], s.axes(out, dim))


def gathered_sizes(s: EmissionScope, op: dist.CollectiveOp, dim: int) -> str:
    """`, total=...` if the size of a dimension after gathering is not n times the size before."""
    totals = [gathered_size(s, op, v, o, dim) for v, o in zip(op.values, op.outs, strict=True)]
    if not any(totals):
        return ""
    texts = [t or "None" for t in totals]
    return f", total={texts[0] if len(texts) == 1 else '[' + ', '.join(texts) + ']'}"
