"""The text of each tensor op and update in torch: one entry per op, a file per family.

An entry takes the scope and the op, and returns an expression, or a value whose variable the result
shares, or None when it has written its own lines. The files are
found by their names, which are those of the families in `shardir/dialects/nn/`; updates.py has the
updates of parameters, train.py the other ops of the train dialect.
"""

from xdsl.ir import Operation

from shardir.backend.torch.emit.scope import Entry
from shardir.dialects.families import modules_of

FAMILIES: dict[str, dict[type[Operation], Entry]] = {
    name: module.TORCH for name, module in modules_of(__name__).items() if hasattr(module, "TORCH")
}
TORCH = {op: entry for entries in FAMILIES.values() for op, entry in entries.items()}
