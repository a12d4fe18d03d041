"""The table of ATen ops: one entry for each, in files by subject.

    "gelu": lambda t, x, approximate="none": nn.gelu(x, exact=approximate == "none")

An entry gets the translation `t` of the current node, with the `shape` and `dtype` of the result,
and the node's arguments, with tensors as values. A key is the name of an op, for all overloads, or
of one overload: `pow.Tensor_Scalar`. No op of an exported graph writes in place.
"""

from shardir.dialects.families import modules_of
from shardir.frontends.torch.aten import shape
from shardir.frontends.torch.translation import AtenEntry

TABLE: dict[str, AtenEntry] = {}
for module in modules_of(__name__).values():
    TABLE |= module.TABLE

MOVEMENTS = frozenset(shape.TABLE)
"""The ops that only move elements of their operands."""
