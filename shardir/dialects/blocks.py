"""The ops of a block, the hashes and the classes of ops and values: what a compilation asks for
most.

xDSL's list of a block's ops counts them first, by a second walk. Its ops and values hash and
compare by identity, in Python; as those of `object` do, in C. It returns fields by properties in
Python, asks for each index of a value what it is, and matches each name with two patterns. Of its
abstract classes others may be registered as subclasses, which none is: `OpClass` says what that
costs.
"""

from abc import ABCMeta
from collections.abc import Iterable, Iterator
from operator import attrgetter
from typing import Any, TypeVar

from xdsl.ir import Attribute, Block, BlockArgument, Operation, OpResult, SSAValue, SSAValues, Use
from xdsl.ir.core import IRWithName
from xdsl.irdl import IRDLOperation

from shardir.dialects.definition import OpClass

OpT = TypeVar("OpT", bound=Operation)

FIELDS = (
    (SSAValue, "type", "_type"),
    (OpResult, "owner", "op"),
    (BlockArgument, "owner", "block"),
    (Use, "operation", "_operation"),
    (Use, "index", "_index"),
    (Operation, "next_op", "_next_op"),
    (Operation, "prev_op", "_prev_op"),
)
"""Properties that are fields of other names."""


def hash_in_c() -> None:
    """Let ops and values hash and compare as `object` does, a tenth of the time of a compilation,
    return FIELDS in C, take most names as they are, and ask for their classes and those of
    attributes without a look at registered ones. For a process of ours, before it makes any:
    dictionaries with those from before lose them."""
    for kind, name, field in FIELDS:
        setattr(kind, name, property(attrgetter(field)))
    named = property(attrgetter("_name"), _set_name)
    for kind, name, member in (IRWithName, "name_hint", named), (SSAValues, "__getitem__", _at):
        setattr(kind, name, member)
    for kind in (SSAValue, Operation, IRDLOperation):
        for method in ("__hash__", "__eq__"):
            setattr(kind, method, getattr(object, method))
    todo: list[type] = [SSAValue, Operation, Attribute]
    for kind in todo:
        todo += type.__subclasses__(kind)
        if type(kind) is ABCMeta:
            kind.__class__ = OpClass


def _at(self: SSAValues, index: int | slice) -> SSAValue | SSAValues:
    """Return a value, or several."""
    found: Any = tuple.__getitem__(self, index)
    return found if isinstance(index, int) else SSAValues(found)


def _set_name(self: IRWithName, name: str | None) -> None:
    """Set the name of a value, without what xDSL does to those that end with a number, or that it
    may refuse."""
    if name is None or (name.isidentifier() and name.isascii() and not name[-1].isdigit()):
        self._name = name
    else:
        self._name = self.extract_valid_name(name)


def ops_of(block: Block) -> list[Operation]:
    """Return the ops of a block, in order; the block may change while the list is read."""
    return ops_from(block.first_op)


def ops_from(op: Operation | None) -> list[Operation]:
    """Return an op and those after it in its block, in order."""
    ops = list[Operation]()
    while op is not None:
        ops.append(op)
        op = op._next_op
    return ops


def of_kind(ops: Iterable[Operation], *kinds: type[OpT]) -> list[OpT]:
    """Return the ops of a kind, in order. Whether it is one is asked for each class among them: to
    ask for each op takes longer."""
    ops = list(ops)
    found = {cls for cls in {*map(type, ops)} if issubclass(cls, kinds)}
    same: list[Any] = [op for op in ops if type(op) in found] if found else []
    return same


def ops_in(op: Operation) -> Iterator[Operation]:
    """Yield an op and the ops in its regions, in order, as `walk` does in three times as long."""
    yield op
    for block in (block for region in op.regions for block in region.blocks):
        for inner in ops_of(block):
            if inner.regions:
                yield from ops_in(inner)
            else:
                yield inner
