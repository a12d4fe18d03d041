"""Faster versions of the parts of xDSL that a compilation uses most: lists of a block's ops, and
hashes, fields and classes of ops and values.

xDSL walks over a block's ops twice to list them, and such a walk is slow in a large program, whose
ops are scattered in memory. Its ops and values hash and compare by identity, but in Python, where
`object` does so in C. It reads fields through Python properties, checks the type of each index of a
value, and matches each name with two patterns. Its abstract classes allow registered subclasses,
which nothing uses (see `OpClass`).
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
    """Patch xDSL's classes for speed; a tenth of the time of a compilation is hashing alone.

    Ops and values hash and compare as `object` does, return FIELDS in C and skip the patterns for
    most names. Checks of the classes of ops, values and attributes skip registered subclasses.
    Blocks keep the list of their ops until it changes. Call it in a process of ours before any op
    is made: dictionaries lose keys that were hashed before.
    """
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
"""xDSL's methods that change the list of a block's ops."""

LISTED = "shardir_ops"
"""The field of a block with the list of its ops; absent after a change."""


def _attach(self: Block, op: Operation) -> None:
    """Attach an op to a block. Only an op with regions is checked not to contain the block."""
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
    """Return the value at an index, or the values of a slice."""
    item: Any = tuple.__getitem__(self, index)
    return item if isinstance(index, int) else SSAValues(item)


def _set_name(self: IRWithName, name: str | None) -> None:
    """Set the name of a value; only a name that xDSL would change or refuse takes its slow path."""
    if name is None or (name.isidentifier() and name.isascii() and not name[-1].isdigit()):
        set_name(self, name)
    else:
        set_name(self, self.extract_valid_name(name))


class ListedOps(tuple[Operation, ...]):
    """A snapshot of a block's ops, in order; ops may move while it is iterated."""

    @cached_property
    def by_class(self) -> dict[type[Operation], list[int]]:
        """The indices of the ops of each class, in order."""
        indices: dict[type[Operation], list[int]] = {kind: [] for kind in {*map(type, self)}}
        for i, op in enumerate(self):
            indices[type(op)].append(i)
        return indices


def ops_of(block: Block) -> ListedOps:
    """Return the ops of a block, in order; in a process of ours the list is cached until it
    changes."""
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
    """Return the ops of given kinds, in order. Classes are tested once each, which is faster than
    once for each op."""
    selected: list[Any]
    if isinstance(ops, ListedOps):
        indices = [i for cls, i in ops.by_class.items() if issubclass(cls, kinds)]
        selected = [ops[i] for i in (indices[0] if len(indices) == 1 else sorted(chain(*indices)))]
    else:
        ops = list(ops)
        classes = {cls for cls in {*map(type, ops)} if issubclass(cls, kinds)}
        selected = [op for op in ops if type(op) in classes] if classes else []
    return selected


def ops_in(op: Operation) -> Iterator[Operation]:
    """Yield an op and the ops in its regions, in order: xDSL's `walk` in a third of its time."""
    yield op
    for block in (block for region in op.regions for block in region.blocks):
        for inner in ops_of(block):
            if inner.regions:
                yield from ops_in(inner)
            else:
                yield inner
