"""strip-layouts: the same program for one device: no layouts, strategies or redistributions,
and nothing about them.

   %y = dist.redistribute %x : (tensor<8xf32, #dist.layout<@m, [{d}]>>) -> tensor<8xf32, ...>
   %z = nn.relu %y strategy<((4,),)> : ...
-> %z = nn.relu %x : (tensor<8xf32>) -> tensor<8xf32>
"""

from dataclasses import dataclass

from xdsl.context import Context
from xdsl.dialects.builtin import ModuleOp
from xdsl.passes import ModulePass

from shardir.analysis.functions import is_local_body, name_of, values
from shardir.dialects.dist import SAME_VALUE, MeshOp, ShardingGroupOp, sharding_of
from shardir.dialects.nn.base import plain
from shardir.rewriting.functions import bodies, update_signature
from shardir.rewriting.rewriter import erase, set_type
from shardir.syntax.diagnostics import Failure


@dataclass(frozen=True)
class StripLayouts(ModulePass):
    """Turns a laid-out program back into one for a single device."""

    name = "strip-layouts"

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        for f, block in bodies(op):
            if is_local_body(block):
                message = "is in the local view; there is no single-device form of it"
                raise Failure([(f, f"@{name_of(f)} {message}")])
            for inner in list(block.ops):
                inner.properties.pop("strategy", None)
                if isinstance(inner, SAME_VALUE):
                    inner.out.replace_all_uses_with(inner.value)
                if isinstance(inner, (*SAME_VALUE, ShardingGroupOp)):
                    erase(inner)
            for v in values(block):
                if sharding_of(v) is not None:
                    set_type(v, plain(v))
            update_signature(f)
        for mesh in [m for m in op.body.ops if isinstance(m, MeshOp)]:
            erase(mesh)
