"""The ops of a block, the hashes and the classes of ops and values: what a compilation asks for
most.

xDSL's list of a block's ops counts them first, by a second walk, and a walk over those of a large
program is slow, since each is elsewhere in memory. Its ops and values hash and
compare by identity, in Python; as those of `object` do, in C. It returns fields by properties in
Python, asks for each index of a value what it is, and matches each name with two patterns. Of its
abstract classes others may be registered as subclasses, which none is: `OpClass` says what that
costs.
"""

from abc import ABCMeta
from collections.abc import Iterable, Iterator
from functools import cached_property
from itertools import chain
from operator import attrgetter
from typing import Any, TypeVar

from xdsl.ir import Attribute, Block, Operation, SSAValue, SSAValues
from xdsl.ir.core import IRWithName
from xdsl.irdl import IRDLOperation

from shardir.compat.xdsl import ATTACH, FIELDS, name_of, next_of, set_name
from shardir.dialects.definition import OpClass

OpT = TypeVar("OpT", bound=Operation)


def hash_in_c() -> None:
    """Let ops and values hash and compare as `object` does, a tenth of the time of a compilation,
    return FIELDS in C, take most names as they are, and ask for their classes and those of
    attributes without a look at registered ones; and let blocks retain the list of their ops until
    it changes. For a process of ours, before it makes any: dictionaries with those from before lose
    them."""
    for kind, name, field in FIELDS:
        setattr(kind, name, property(attrgetter(field)))
    named = property(name_of, _set_name)
    for kind, name, member in (IRWithName, "name_hint", named), (SSAValues, "__getitem__", _at):
        setattr(kind, name, member)
    for name, method in (ATTACH, _attach), ("detach_op", _detach), ("split_before", _split):
        setattr(Block, name, method)
    for kind in (SSAValue, Operation, IRDLOperation):
        for method in ("__hash__", "__eq__"):
            setattr(kind, method, getattr(object, method))
    todo: list[type] = [SSAValue, Operation, Attribute]
    for kind in todo:
        todo += type.__subclasses__(kind)
        if type(kind) is ABCMeta:
            kind.__class__ = OpClass


ATTACHED, DETACH, SPLIT = getattr(Block, ATTACH), Block.detach_op, Block.split_before
"""What changes the list of a block's ops, by xDSL."""

LISTED = "shardir_ops"
"""The field of a block with its ops, if they have been listed since they changed."""


def _attach(self: Block, op: Operation) -> None:
    """Attach an op to a block; whether it contains that is asked of one with regions."""
    self.__dict__.pop(LISTED, None)
    if op.parent is None and not op.regions:
        op.parent = self
    else:
        ATTACHED(self, op)


def _detach(self: Block, op: Operation) -> Operation:
    """Detach an op from a block."""
    self.__dict__.pop(LISTED, None)
    return DETACH(self, op)


def _split(self: Block, *args: Any, **kwargs: Any) -> Block:
    """Split a block."""
    self.__dict__.pop(LISTED, None)
    return SPLIT(self, *args, **kwargs)


def _at(self: SSAValues, index: int | slice) -> SSAValue | SSAValues:
    """Return a value, or several."""
    found: Any = tuple.__getitem__(self, index)
    return found if isinstance(index, int) else SSAValues(found)


def _set_name(self: IRWithName, name: str | None) -> None:
    """Set the name of a value, without what xDSL does to those that end with a number, or that it
    may refuse."""
    if name is None or (name.isidentifier() and name.isascii() and not name[-1].isdigit()):
        set_name(self, name)
    else:
        set_name(self, self.extract_valid_name(name))


class ListedOps(tuple[Operation, ...]):
    """Ops in order, which may change their places while these are read."""

    @cached_property
    def by_class(self) -> dict[type[Operation], list[int]]:
        """The indices of the ops of each class, in order."""
        found: dict[type[Operation], list[int]] = {kind: [] for kind in {*map(type, self)}}
        for i, op in enumerate(self):
            found[type(op)].append(i)
        return found


def ops_of(block: Block) -> ListedOps:
    """Return the ops of a block, in order; listed once as long as it has the same, in a process of
    ours."""
    listed = block.__dict__.get(LISTED)
    if listed is None:
        listed = ListedOps(ops_from(block.first_op))
        if Block.detach_op is _detach:
            block.__dict__[LISTED] = listed
    return listed


def ops_from(op: Operation | None) -> list[Operation]:
    """Return an op and those after it in its block, in order."""
    ops = list[Operation]()
    while op is not None:
        ops.append(op)
        op = next_of(op)
    return ops


def of_kind(ops: Iterable[Operation], *kinds: type[OpT]) -> list[OpT]:
    """Return the ops of a kind, in order. Whether it is one is asked for each class among them: to
    ask for each op takes longer."""
    same: list[Any]
    if isinstance(ops, ListedOps):
        each = [at for cls, at in ops.by_class.items() if issubclass(cls, kinds)]
        same = [ops[i] for i in (each[0] if len(each) == 1 else sorted(chain(*each)))]
    else:
        ops = list(ops)
        found = {cls for cls in {*map(type, ops)} if issubclass(cls, kinds)}
        same = [op for op in ops if type(op) in found] if found else []
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
