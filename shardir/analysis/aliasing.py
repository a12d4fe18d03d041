"""The results of an op that share the memory of an operand.

views(op)                 results that are their operand or a view of it, by the kind of the op:
                          some make a copy where memory is not contiguous
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
"""Ops that return their operand or make a new storage, and never a view; a loop that carries a
value, or makes one in each run, makes storages for it."""


@cache
def may_share(kind: type[Operation]) -> bool:
    """Whether a result of ops of a kind may share the memory of an operand; asked once for each
    kind, since to ask for each op is slow. Custom ops aside."""
    by_types = (train.Update, dist.CollectiveOp, nn.ConvertOp, nn.ReduceOp, nn.IndexCopyOp)
    return issubclass(kind, (*VIEWS, *by_types))


@cache
def may_write(kind: type[Operation]) -> bool:
    """Whether ops of a kind may write a result in place (`in_place`); asked once for each kind."""
    return issubclass(kind, (train.Update, nn.IndexCopyOp, dist.AllReduceOp, dist.CopyOp))


def views(op: Operation, mesh: Mesh | None) -> AliasPairs:
    """Yield the results that may be views, each with its operand."""
    if _is_view(type(op)) or moves_nothing(op, mesh):
        operands: Sequence[SSAValue] = operands_of(op)
        if len(operands) == 1 or isinstance(op, _OF_FIRST):
            operands = [operands[0]] * len(op.results)
        yield from zip(op.results, operands, strict=True)


def shared(op: Operation, mesh: Mesh | None) -> AliasPairs:
    """Yield the results that share the memory of an operand, each with it."""
    if not copies(op, mesh):
        yield from views(op, mesh)


def maybe_shared(op: Operation, mesh: Mesh | None) -> AliasPairs:
    """Yield the results that may share the memory of an operand, each with it. A custom op may
    return a view of any operand; what a loop carries is in its next run the variable's value.
    Storages know of items by themselves."""
    if not isinstance(op, train.ItemOp):
        yield from views(op, mesh)
    if isinstance(op, train.CarryOp):
        yield op.carried, op.x
    if isinstance(op, nn.CustomOp):
        yield from product(op.results, op.operands)


def in_place(op: Operation) -> AliasPairs:
    """Yield the results that an op can write into the memory of a value, if nothing reads it later
    (`Storages.is_free`): an operand, or the parameter or state of which a copy is the new value."""
    if isinstance(op, train.Update):
        parameter, _, *states = operands_of(op)
        old = (parameter, *states[: len(states) - len(op.SCALARS)])
        yield from zip(op.results, old, strict=True)
    elif isinstance(op, nn.IndexCopyOp):
        yield op.out, op.x
    elif isinstance(op, dist.AllReduceOp) and len(op.values) == 1:
        yield op.outs[0], op.values[0]
    elif isinstance(op, dist.CopyOp) and (old := _replaced(op)) is not None:
        yield op.outs[0], old


def _replaced(op: dist.CopyOp | dist.WaitOp) -> SSAValue | None:
    """Return the argument of which the one result of an op is the new value and nothing else, if
    both are of one type."""
    v, uses = op.outs[0], [use for out in op.outs for use in out.uses]
    if len(uses) != 1:
        return None
    user, index = uses[0].operation, uses[0].index
    if isinstance(user, dist.WaitOp):
        return _replaced(user)
    f = user.parent_op()
    if not isinstance(user, ReturnOp) or not isinstance(f, FuncOp):
        return None
    at = train.updated_arguments(f)[index]
    old = None if at is None else f.body.block.args[at]
    return old if old is not None and old.type == v.type else None


def copies(op: Operation, mesh: Mesh | None) -> bool:
    """Whether an op of VIEWS makes a new storage."""
    copying = _copying(type(op))
    return copying is not None and copying(op, mesh)


@cache
def _copying(kind: type[Operation]) -> Callable[[Any, Mesh | None], bool] | None:
    """Return the function that tells it of ops of a kind; None if none of them does."""
    if not _is_view(kind):
        return None
    if issubclass(kind, nn.ReshapeOp):
        return lambda op, mesh: _reshaped(op, mesh) is None
    if issubclass(kind, nn.BroadcastOp):
        return lambda op, _: isinstance(op.x.owner, nn.ConstantOp)
    if not issubclass(kind, COPIES):
        return None
    if issubclass(kind, dist.CollectiveOp):
        return lambda op, mesh: not moves_nothing(op, mesh)
    return lambda *_: True


@cache
def _is_view(kind: type[Operation]) -> bool:
    """Whether ops of a kind are in VIEWS, asked once: to ask for each op is slow."""
    return issubclass(kind, VIEWS)


def strides(v: SSAValue, mesh: Mesh | None) -> Shape:
    """Return the distance in memory, in elements, from an element to the next one along each
    dimension of a value: of views those that torch has, of other values those in row-major
    order."""
    shape, op = _shape(v), v.owner
    if not isinstance(op, Operation) or not _is_view(type(op)):
        return row_major(shape)
    if isinstance(op, nn.ReshapeOp):
        return _reshaped(op, mesh) or row_major(shape)
    operand = dict(shared(op, mesh)).get(v)
    if operand is None:
        return row_major(shape)
    of = strides(operand, mesh)
    match op:
        case nn.TransposeOp():
            return tuple(of[d] for d in dims_of(op.properties, "perm", len(of)))
        case nn.BroadcastOp():
            repeated = [0] * len(shape)
            dims = dims_of(op.properties, "dims", len(shape))
            for d, n, step in zip(dims, _shape(operand), of, strict=True):
                repeated[d] = step if n == shape[d] else 0
            return tuple(repeated)
        case nn.SliceOp():
            steps = ints_of(op.properties, "strides", len(of))
            return tuple(n * step for n, step in zip(of, steps, strict=True))
        case nn.UnfoldOp():
            return (*of[: op.at], of[op.at] * op.step.value.data, *of[op.at :])
        case _:
            return of if len(of) == len(shape) else row_major(shape)


def _reshaped(op: nn.ReshapeOp, mesh: Mesh | None) -> Shape | None:
    """Return the strides of a reshape that is a view; None if it is a copy.

    Dimensions that follow each other in memory are one run of elements: it is a view if each
    dimension of the result is within one run, as torch decides it.
    """
    return _view_strides(_shape(op.out), _shape(op.x), strides(op.x, mesh))


@lru_cache
def _view_strides(shape: Shape, old: Shape, of: Shape) -> Shape | None:
    """Return the strides of a view of a shape of a value with a shape and strides; None if there is
    none."""
    found = list[int]()
    new, size, rest = list(shape), 1, 1
    if 0 in new:
        return row_major(shape)
    dims = [(n, step) for n, step in zip(old, of, strict=True) if n != 1]
    step = 1
    for i, (n, along) in reversed(list(enumerate(dims))):
        step = along if size == 1 else step
        size *= n
        if i and dims[i - 1][1] == size * step:
            continue
        while new and (rest < size or new[-1] == 1):
            found.append(rest * step)
            rest *= new.pop()
        if rest != size:
            return None
        size = rest = 1
    return (*(1 for _ in new), *reversed(found))


@lru_cache
def row_major(shape: Shape) -> Shape:
    """Return the strides of a value in row-major order."""
    return tuple(prod(shape[d + 1 :]) for d in range(len(shape)))


_shapes = SignatureMemo()


def _shape(v: SSAValue) -> Shape:
    return _shapes.of(type_of(v), TensorType.get_shape)


def moves_nothing(op: Operation, mesh: Mesh | None) -> bool:
    """Whether an op returns its operands as they are, because of its types or its properties."""
    match op:
        case dist.CollectiveOp():
            return mesh is None or not op.moves(mesh)
        case nn.ConvertOp() | nn.ReduceOp():
            types = [v.type for v in (*op.operands, *op.results) if isinstance(v.type, TensorType)]
            return is_identity(type(op), op.factors(mesh), types)
        case _:
            return False


def is_identity(kind: type[TensorOp], factors: Factors, types: Sequence[TensorType]) -> bool:
    """Whether an op returns its operand as it is: a cast to the same element type, or a reduction
    over no dimensions."""
    if issubclass(kind, nn.ReduceOp):
        return not factors.reduced
    return issubclass(kind, nn.ConvertOp) and types[0].element_type == types[-1].element_type
