"""Emitters of tensor ops and updates to torch: one function per op, a file per family.

An emitter (`Entry`) takes the scope and the op. It returns an expression, or a value whose variable
the result shares, or None if it has written its own lines. Files have the names of the families in
`shardir/dialects/nn/`; updates.py has the updates of parameters, train.py the other ops of the
train dialect.
"""

from xdsl.ir import Operation

from shardir.backend.torch.emit.scope import Entry
from shardir.dialects.families import modules_of

FAMILIES: dict[str, dict[type[Operation], Entry]] = {
    name: module.TORCH for name, module in modules_of(__name__).items() if hasattr(module, "TORCH")
}
TORCH = {op: entry for entries in FAMILIES.values() for op, entry in entries.items()}
