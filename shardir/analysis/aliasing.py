"""The results of an op that share the memory of an operand.

views(op)                 results that by the op's kind are their operand or a view of it; in fact
                          a copy where memory is not contiguous
views(op) - copies(op)    results that share memory: for the memory count
views(op) + custom ops    results that may share memory: for writes in place
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cache, lru_cache
from itertools import product
from math import prod
from typing import Any

from xdsl.dialects.builtin import TensorType
from xdsl.dialects.func import FuncOp, ReturnOp
from xdsl.ir import Operation, SSAValue

from shardir.algebra.collectives import COLLECTIVES
from shardir.algebra.factors import Factors
from shardir.algebra.layout import Shape
from shardir.algebra.mesh import Mesh
from shardir.compat.xdsl import operands_of, type_of
from shardir.dialects import dist, nn, train
from shardir.dialects.nn.base import TensorOp
from shardir.dialects.nn.movement import ints_of
from shardir.dialects.nn.properties import dims_of
from shardir.dialects.signatures import SignatureMemo

AliasPairs = Iterator[tuple[SSAValue, SSAValue]]
"""Results, each with an operand whose memory it shares."""

VIEWS: tuple[type[Operation], ...] = (
    nn.ReshapeOp,
    nn.TransposeOp,
    nn.BroadcastOp,
    nn.StopGradientOp,
    nn.StraightThroughOp,
    nn.SliceOp,
    nn.SplitOp,
    nn.UnfoldOp,
    nn.FoldOp,
    dist.WaitOp,
    train.MicrobatchOp,
    train.CarriedOp,
    train.CarryOp,
    train.ItemOp,
    train.ItemsOp,
    *(kind for name, kind in dist.OPS.items() if COLLECTIVES[name].result != "new"),
)
"""Ops whose result may be their operand, or a view of it."""

_OF_FIRST = (train.CarryOp, train.ItemOp, nn.StraightThroughOp)
"""Views of the first operand of several."""

COPIES = (
    nn.FoldOp,
    train.CarriedOp,
    train.ItemsOp,
    *(kind for name, kind in dist.OPS.items() if COLLECTIVES[name].result == "operand"),
)
"""Ops that return their operand or make a new storage, but never a view. A loop makes a storage for
a value that it carries, or makes in each run."""


@cache
def may_share(kind: type[Operation]) -> bool:
    """Whether a result of ops of a kind, except custom ops, may share the memory of an operand;
    cached by kind for speed."""
    by_types = (train.Update, dist.CollectiveOp, nn.ConvertOp, nn.ReduceOp, nn.IndexCopyOp)
    return issubclass(kind, (*VIEWS, *by_types))


@cache
def may_write(kind: type[Operation]) -> bool:
    """Whether ops of a kind may write a result in place (`in_place`); cached by kind for speed."""
    return issubclass(kind, (train.Update, nn.IndexCopyOp, dist.AllReduceOp, dist.CopyOp))


def views(op: Operation, mesh: Mesh | None) -> AliasPairs:
    """Yield the results that may be views, each with its operand."""
    if _is_view(type(op)) or moves_nothing(op, mesh):
        operands: Sequence[SSAValue] = operands_of(op)
        if len(operands) == 1 or isinstance(op, _OF_FIRST):
            operands = [operands[0]] * len(op.results)
        yield from zip(op.results, operands, strict=True)


def shared(op: Operation, mesh: Mesh | None) -> AliasPairs:
    """Yield the results that share the memory of an operand, each with the operand."""
    if not copies(op, mesh):
        yield from views(op, mesh)


def maybe_shared(op: Operation, mesh: Mesh | None) -> AliasPairs:
    """Yield the results that may share the memory of an operand, each with the operand. A custom op
    may return a view of any operand, and so may `nn.while`. The value that a loop carries becomes
    the variable in the next run. Items are left to `Storages`."""
    if not isinstance(op, train.ItemOp):
        yield from views(op, mesh)
    if isinstance(op, train.CarryOp):
        yield op.carried, op.x
    if isinstance(op, nn.CustomOp | nn.WhileOp):
        yield from product(op.results, op.operands)


def in_place(op: Operation) -> AliasPairs:
    """Yield the results that an op can write into the memory of a value, with the value, provided
    that nothing reads it later (`Storages.is_free`): an operand, or the parameter or state that a
    copy replaces."""
    if isinstance(op, train.Update):
        parameter, _, *states = operands_of(op)
        old = (parameter, *states[: len(states) - len(op.SCALARS)])
        yield from zip(op.results, old, strict=True)
    elif isinstance(op, nn.IndexCopyOp):
        yield op.out, op.x
    elif isinstance(op, dist.AllReduceOp) and len(op.values) == 1:
        yield op.outs[0], op.values[0]
    elif isinstance(op, dist.CopyOp) and (old := _replaced_argument(op)) is not None:
        yield op.outs[0], old


def _replaced_argument(op: dist.CopyOp | dist.WaitOp) -> SSAValue | None:
    """Return the argument that the only result of an op replaces, if the result has no further use
    and both have one type."""
    v, uses = op.outs[0], [use for out in op.outs for use in out.uses]
    if len(uses) != 1:
        return None
    user, index = uses[0].operation, uses[0].index
    if isinstance(user, dist.WaitOp):
        return _replaced_argument(user)
    f = user.parent_op()
    if not isinstance(user, ReturnOp) or not isinstance(f, FuncOp):
        return None
    index_of_argument = train.updated_arguments(f)[index]
    old = None if index_of_argument is None else f.body.block.args[index_of_argument]
    return old if old is not None and old.type == v.type else None


def copies(op: Operation, mesh: Mesh | None) -> bool:
    """Whether an op of VIEWS makes a new storage."""
    copies_operand = _copy_predicate(type(op))
    return copies_operand is not None and copies_operand(op, mesh)


@cache
def _copy_predicate(kind: type[Operation]) -> Callable[[Any, Mesh | None], bool] | None:
    """Return the predicate that decides, op by op, whether this class copies its operand; None if
    it never does."""
    if not _is_view(kind):
        return None
    if issubclass(kind, nn.ReshapeOp):
        return lambda op, mesh: _reshape_strides(op, mesh) is None
    if issubclass(kind, nn.BroadcastOp):
        return lambda op, _: isinstance(op.x.owner, nn.ConstantOp)
    if not issubclass(kind, COPIES):
        return None
    if issubclass(kind, dist.CollectiveOp):
        return lambda op, mesh: not moves_nothing(op, mesh)
    return lambda *_: True


@cache
def _is_view(kind: type[Operation]) -> bool:
    """Whether ops of a kind are in VIEWS; cached by kind for speed."""
    return issubclass(kind, VIEWS)


def strides(v: SSAValue, mesh: Mesh | None) -> Shape:
    """Return the distance in memory, in elements, between neighbours along each dimension of a
    value: torch's strides for views, row-major strides otherwise."""
    shape, op = _shape(v), v.owner
    if not isinstance(op, Operation) or not _is_view(type(op)):
        return row_major(shape)
    if isinstance(op, nn.ReshapeOp):
        return _reshape_strides(op, mesh) or row_major(shape)
    operand = dict(shared(op, mesh)).get(v)
    if operand is None:
        return row_major(shape)
    source_strides = strides(operand, mesh)
    match op:
        case nn.TransposeOp():
            return tuple(
                source_strides[d] for d in dims_of(op.properties, "perm", len(source_strides))
            )
        case nn.BroadcastOp():
            new_strides = [0] * len(shape)
            dims = dims_of(op.properties, "dims", len(shape))
            for d, n, step in zip(dims, _shape(operand), source_strides, strict=True):
                new_strides[d] = step if n == shape[d] else 0
            return tuple(new_strides)
        case nn.SliceOp():
            steps = ints_of(op.properties, "strides", len(source_strides))
            return tuple(n * step for n, step in zip(source_strides, steps, strict=True))
        case nn.UnfoldOp():
            return (
                *source_strides[: op.at],
                source_strides[op.at] * op.step.value.data,
                *source_strides[op.at :],
            )
        case _:
            return source_strides if len(source_strides) == len(shape) else row_major(shape)


def _reshape_strides(op: nn.ReshapeOp, mesh: Mesh | None) -> Shape | None:
    """Return the strides of a reshape that is a view; None if it is a copy.

    Dimensions that are adjacent in memory form one run of elements. As in torch, a reshape is a
    view if each dimension of the result lies within one run.
    """
    return _view_strides(_shape(op.out), _shape(op.x), strides(op.x, mesh))


@lru_cache
def _view_strides(shape: Shape, old: Shape, of: Shape) -> Shape | None:
    """Return the strides of a view with `shape` of a value with shape `old` and strides `of`; None
    if there is no such view."""
    strides_reversed = list[int]()
    remaining, size, covered = list(shape), 1, 1
    if 0 in remaining:
        return row_major(shape)
    dims = [(n, step) for n, step in zip(old, of, strict=True) if n != 1]
    step = 1
    for i, (n, stride) in reversed(list(enumerate(dims))):
        step = stride if size == 1 else step
        size *= n
        if i and dims[i - 1][1] == size * step:
            continue
        while remaining and (covered < size or remaining[-1] == 1):
            strides_reversed.append(covered * step)
            covered *= remaining.pop()
        if covered != size:
            return None
        size = covered = 1
    return (*(1 for _ in remaining), *reversed(strides_reversed))


@lru_cache
def row_major(shape: Shape) -> Shape:
    """Return the strides of a value in row-major order."""
    return tuple(prod(shape[d + 1 :]) for d in range(len(shape)))


_shapes = SignatureMemo()


def _shape(v: SSAValue) -> Shape:
    return _shapes.of(type_of(v), TensorType.get_shape)


def moves_nothing(op: Operation, mesh: Mesh | None) -> bool:
    """Whether an op returns its operands unchanged, by its types or properties."""
    match op:
        case dist.CollectiveOp():
            return mesh is None or not op.moves(mesh)
        case nn.ConvertOp() | nn.ReduceOp():
            types = [v.type for v in (*op.operands, *op.results) if isinstance(v.type, TensorType)]
            return is_identity(type(op), op.factors(mesh), types)
        case _:
            return False


def is_identity(kind: type[TensorOp], factors: Factors, types: Sequence[TensorType]) -> bool:
    """Whether an op returns its operand unchanged: a cast to its own element type, or a reduction
    over no dimensions."""
    if issubclass(kind, nn.ReduceOp):
        return not factors.reduced
    return issubclass(kind, nn.ConvertOp) and types[0].element_type == types[-1].element_type
