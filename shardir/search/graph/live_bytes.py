"""The live ranges of values, as the search counts memory.

It counts the shards of values from the op that makes them to the last that uses them or a view of
them: arguments throughout, an updated value in the storage of the old one; and for one op the
redistributed copies of its operands and of its result; and for each redistribution its buffers and
the layouts on the way (transients.py). It does not count what decomposed ops, and collectives of
several values, need while they run: the memory of a plan is that of its lowered program.
"""

from collections.abc import Mapping
from math import prod

from xdsl.dialects.builtin import TensorType
from xdsl.ir import Block, SSAValue

from shardir.algebra.layout import Layout
from shardir.algebra.mesh import Mesh
from shardir.analysis.aliasing import views
from shardir.analysis.storages import Storages
from shardir.dialects.blocks import ops_of
from shardir.dialects.nn.types import itemsize
from shardir.dialects.train import Update

LONG_LIVED_OPS = 20
"""The number of ops above which a live range is long: then the value may have a layout of its own,
or be computed again."""


def storages_of(block: Block, ties: Mapping[SSAValue, SSAValue]) -> Storages:
    """Return the storages of a block in the global view. Views are in the storage of their operand,
    and the new value of an update in that of the old one."""
    ops = ops_of(block)
    storages = Storages(block.args, ops)
    for op in ops:
        for v, operand in views(op, None):
            storages.join(v, operand)
        if isinstance(op, Update):
            for v in op.results:
                if v in ties:
                    storages.join(v, ties[v])
    return storages


def shard_bytes(t: TensorType, layout: Layout, mesh: Mesh) -> int:
    """Return the bytes of a value on a device."""
    return prod(layout.local_shape(mesh, t.get_shape())) * itemsize(t)
