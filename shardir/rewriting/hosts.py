"""The choice of ops that hosts compute, where layouts leave it open."""

from itertools import dropwhile

from xdsl.dialects.func import FuncOp

from shardir.algebra.mesh import Mesh
from shardir.analysis.roles import retained_arguments
from shardir.compat.xdsl import set_type
from shardir.dialects import nn, train
from shardir.dialects.dist import layout_of, with_layout
from shardir.dialects.nn.base import TensorOp
from shardir.dialects.nn.types import unsharded_type
from shardir.rewriting.placement import layout_at
from shardir.rewriting.rewriter import Rewriter


def place_on_hosts(f: FuncOp, mesh: Mesh) -> None:
    """Put results `on host` where that moves less: results of ops after the mark `train.update`
    that read parameters or states on the host, or only values on the host; and the gradient of a
    table that only updates on the host read."""
    block = f.body.block
    on_host = {v for v in retained_arguments(f) if (l := layout_of(v)) is not None and l.host}
    if not on_host:
        return
    rewriter = Rewriter(mesh)
    for op in list(dropwhile(lambda op: not isinstance(op, train.UpdateOp), block.ops)):
        if not isinstance(op, TensorOp):
            continue
        if not isinstance(op, train.Update) and not on_host.isdisjoint(op.operands):
            rewriter.before(op)
            copies = [rewriter.redistribute(v, layout_at(v).on_host) for v in op.operands]
            op.operands = copies
        if _may_be_on_host(op):
            _put_on_host(op)
    for op in block.ops:
        if isinstance(op, nn.GatherGradOp) and all(
            isinstance(user := use.operation, train.Update) and _may_be_on_host(user)
            for use in op.out.uses
        ):
            _put_on_host(op)


def _may_be_on_host(op: TensorOp) -> bool:
    """Whether hosts can compute an op whose results are on the host."""
    operands, results = ([layout_at(v) for v in values] for values in (op.operands, op.results))
    return op.runs_on_host(operands, [l.on_host for l in results])


def _put_on_host(op: TensorOp) -> None:
    for v in op.results:
        set_type(v, with_layout(unsharded_type(v), layout_at(v).on_host))
