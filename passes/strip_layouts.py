"""strip-layouts: the same program for one device: no layouts, strategies or redistributions,
and nothing about them.

   %y = dist.redistribute %x : (tensor<8xf32, #dist.layout<@m, [{d}]>>) -> tensor<8xf32, ...>
   %z = nn.relu %y strategy<((4,),)> : ...
-> %z = nn.relu %x : (tensor<8xf32>) -> tensor<8xf32>
"""

from collections.abc import Iterable
from dataclasses import dataclass

from xdsl.context import Context
from xdsl.dialects.builtin import ModuleOp

from shardir.analysis.functions import is_local_body, values
from shardir.diagnostics import Located
from shardir.dialects.dist import SAME_VALUE, MeshOp, ShardingGroupOp, sharding_of
from shardir.dialects.nn.types import unsharded_type
from shardir.rewriting.bases import Function, FunctionPass
from shardir.rewriting.functions import update_signature
from shardir.rewriting.rewriter import erase, set_type


@dataclass(frozen=True)
class StripLayouts(FunctionPass):
    """Turns a laid-out program back into one for a single device."""

    name = "strip-layouts"

    def check(self, f: Function) -> Iterable[Located]:
        if is_local_body(f.block):
            yield f.op, f"@{f.name} is in the local view; there is no single-device form of it"

    def rewrite(self, f: Function) -> None:
        for op in list(f.block.ops):
            op.properties.pop("strategy", None)
            if isinstance(op, SAME_VALUE):
                op.out.replace_all_uses_with(op.value)
            if isinstance(op, (*SAME_VALUE, ShardingGroupOp)):
                erase(op)
        for v in values(f.block):
            if sharding_of(v) is not None:
                set_type(v, unsharded_type(v))
        update_signature(f.op)

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        super().apply(ctx, op)
        for mesh in [m for m in op.body.ops if isinstance(m, MeshOp)]:
            erase(mesh)
