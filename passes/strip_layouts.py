"""strip-layouts: a program with layouts -> the same program for a single device.

    %y = dist.redistribute %x : (tensor<8xf32, #dist.layout<@m, [{d}]>>) -> tensor<8xf32, ...>
    %z = nn.relu %y strategy<((4,),)> : ...
 -> %z = nn.relu %x : (tensor<8xf32>) -> tensor<8xf32>

1. Afterwards no value and no state has a layout, no op a strategy, and no mesh is declared.
2. Redistributions and propagation barriers are replaced by their operands; sharding groups are
   erased.
3. No other op, name or computed value changes.
4. A function in the local view is an error.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from xdsl.context import Context
from xdsl.dialects.builtin import ModuleOp

from shardir.analysis.functions import is_local_body, values
from shardir.compat.xdsl import set_type
from shardir.diagnostics import Located
from shardir.dialects.blocks import of_kind, ops_of
from shardir.dialects.dist import SAME_VALUE, MeshOp, ShardingGroupOp, sharding_of
from shardir.dialects.dist.manual import ManualOp
from shardir.dialects.nn.types import unsharded_type
from shardir.dialects.train import STATE_LAYOUT, remove_annotations
from shardir.rewriting.bases import Function, FunctionPass
from shardir.rewriting.functions import update_signature
from shardir.rewriting.rewriter import erase


@dataclass(frozen=True)
class StripLayouts(FunctionPass):
    """Turns a program with layouts into one for a single device."""

    name = "strip-layouts"

    def check(self, f: Function) -> Iterable[Located]:
        if is_local_body(f.block):
            message = f"expected @{f.name} in the global view, got the local view"
            yield f.op, f"{message}; a local program has no single-device form"
        for op in of_kind(f.ops, ManualOp):
            message = f"expected ops of one device, got dist.manual @{op.callee.string_value()}"
            yield op, f"{message}; a manual computation has no single-device form"

    def rewrite(self, f: Function) -> None:
        for op in ops_of(f.block):
            op.properties.pop("strategy", None)
            if isinstance(op, SAME_VALUE):
                op.out.replace_all_uses_with(op.value)
            if isinstance(op, (*SAME_VALUE, ShardingGroupOp)):
                erase(op)
        for v in values(f.block):
            if sharding_of(v) is not None:
                set_type(v, unsharded_type(v))
        update_signature(f.op)
        remove_annotations(f.op, STATE_LAYOUT)

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        super().apply(ctx, op)
        for mesh in [m for m in op.body.ops if isinstance(m, MeshOp)]:
            erase(mesh)
