"""Halo exchanges: windows of a split dimension."""

from xdsl.ir import Operation, SSAValue

from shardir.backend.torch.emit.names import axes_text
from shardir.backend.torch.emit.scope import EmissionScope, Entry, Text
from shardir.backend.torch.ops.dist.comments import explain, needed_by
from shardir.backend.torch.ops.dist.text import write_each
from shardir.dialects import dist


def _windows(s: EmissionScope, op: dist.HaloOp) -> Text:
    assert s.mesh is not None
    s.use("windows")
    away, dim, mesh = isinstance(op, dist.HaloFoldOp), op.dim.value.data, s.mesh
    halo = max(
        op.windows(v, o, mesh).halo(mesh.extent(op.axes.data))
        for v, o in zip(op.values, op.outs, strict=True)
    )
    what = "send sums for rows of other ranks" if away else "fetch rows of other ranks"
    explain(s, op, f"halo exchange, {halo} rows at most",
         f"{needed_by(s, op)} windows of dimension {dim}; {what}")  # fmt: skip

    def text(v: SSAValue, out: SSAValue) -> str:
        w = op.windows(v, out, mesh)
        lowest = (
            ", lowest=True" if isinstance(op, dist.HaloUnfoldOp) and op.lowest is not None else ""
        )
        numbers = f"{w.rows}, {w.count}, {w.size}, {w.step}, {w.offset}{lowest}"
        call = "fold_split" if away else "unfold_split"
        axes = axes_text(op.axes.data)
        return f"windows.{call}(mesh, {s.operand(v)}, {dim}, {axes}, {numbers})"

    write_each(s, op, text)
    return None


TORCH: dict[type[Operation], Entry] = {
    dist.HaloUnfoldOp: _windows,
    dist.HaloFoldOp: _windows,
}
