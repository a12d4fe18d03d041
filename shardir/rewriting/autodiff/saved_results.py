"""Results that gradients read beside those of the source: the forward part makes them too.

   %o = nn.attention %q, %k, %v
-> %o, %o_lse = nn.attention %q, %k, %v logsumexp      if a cotangent of %o is asked for

So the backward part need not compute them again. Functions that are not differentiated do not
change.
"""

from xdsl.ir import Block

from shardir.dialects.blocks import ops_of
from shardir.dialects.nn.base import TensorOp
from shardir.rewriting.autodiff.activity import Activity
from shardir.rewriting.rewriter import Rewriter


def add_saved_results(block: Block, activity: Activity) -> None:
    """Let the active ops of a forward part have the results that their gradients read."""
    rewriter = Rewriter()
    activity.mark(block.ops)
    for op in ops_of(block):
        if not isinstance(op, TensorOp) or not any(v in activity.active for v in op.results):
            continue
        if (saving := op.saving()) is None:
            continue
        props, types = saving
        result_types = [v.type for v in op.results]
        new = rewriter.before(op).copy(
            op, types=[*result_types, *types.values()], properties={**op.properties, **props}
        )
        results, saved = new.results[: len(result_types)], new.results[len(result_types) :]
        for name, v in zip(types, saved, strict=True):
            v.name_hint = f"{results[0].name_hint}_{name}" if results[0].name_hint else None
        activity.active.update(v for v, old in zip(results, op.results, strict=True)
                               if old in activity.active)  # fmt: skip
        rewriter.replace(op, results)
