"""retain-gathered: a value is gathered once where to gather it again frees no memory at the peak.

    %w1 = dist.all_gather %w dim 0 over <dp>
    %y = nn.matmul %x, %w1
    train.backward
    %w2 = dist.all_gather %w dim 0 over <dp> {recompute}
    %d_x = nn.matmul %d_y, %w2
 -> %w1 = dist.all_gather %w dim 0 over <dp>
    %y = nn.matmul %x, %w1
    train.backward
    %d_x = nn.matmul %d_y, %w1

Repetitions free what they repeat for the time between. That of the last layer is short, and over
before the peak, which is where gradients and the buffers of their reductions are live too.

1. Peak memory does not grow, whatever the memory of a device: the mark `recompute` asks for that.
2. A repetition is of the same values, by equal gathers of one run of the same loop; casts of one
   value to one type are equal. With several values (of `fuse-communication`) it is removed with all
   of them.
3. The first repetitions are removed first: their values are retained for the shortest time.
4. A collective that is `async` stays as it is.
"""

from dataclasses import dataclass

from shardir.cost.repeated_gathers import needless_gathers
from shardir.dialects import nn
from shardir.rewriting.bases import Function, LocalPass
from shardir.rewriting.rewriter import Rewriter, erase


@dataclass(frozen=True)
class RetainGathered(LocalPass):
    """Removes repeated gathers that free no memory at the peak."""

    name = "retain-gathered"

    def rewrite(self, f: Function) -> None:
        if f.mesh is None:
            return
        for op, values in needless_gathers(f.op, f.mesh):
            makers = [v.owner for v in op.values]
            Rewriter.replace(op, values)
            for maker in makers:
                if isinstance(maker, nn.ConvertOp) and maker.out.first_use is None:
                    erase(maker)
