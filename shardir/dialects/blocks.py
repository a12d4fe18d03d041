"""The ops of a block, the hashes and the classes of ops and values: what a compilation asks for
most.

xDSL's list of a block's ops counts them first, by a second walk. Its ops and values hash and
compare by identity, in Python; as those of `object` do, in C. Of its abstract classes others may be
registered as subclasses, which none is: `OpClass` says what that costs.
"""

from abc import ABCMeta

from xdsl.ir import Attribute, Block, Operation, SSAValue
from xdsl.irdl import IRDLOperation

from shardir.dialects.definition import OpClass


def hash_in_c() -> None:
    """Let ops and values hash and compare as `object` does, a tenth of the time of a compilation,
    and ask for their classes and those of attributes without a look at registered ones. For a
    process of ours, before it makes any: dictionaries with those from before lose them."""
    for kind in (SSAValue, Operation, IRDLOperation):
        for method in ("__hash__", "__eq__"):
            setattr(kind, method, getattr(object, method))
    todo: list[type] = [SSAValue, Operation, Attribute]
    for kind in todo:
        todo += type.__subclasses__(kind)
        if type(kind) is ABCMeta:
            kind.__class__ = OpClass


def ops_of(block: Block) -> list[Operation]:
    """Return the ops of a block, in order; the block may change while the list is read."""
    ops, op = list[Operation](), block.first_op
    while op is not None:
        ops.append(op)
        op = op._next_op
    return ops
