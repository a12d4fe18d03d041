"""propagate-strategies: layouts on some values, strategies on some ops -> a layout on every value.

    %h = nn.matmul %x, %w : (tensor<8x4xf32, #dist.layout<@m, [{dp}, {}]>>,
                             tensor<4x6xf32, #dist.layout<@m, [{}, {tp}]>>) -> tensor<8x6xf32>
 -> %h = nn.matmul %x, %w : (...) -> tensor<8x6xf32, #dist.layout<@m, [{dp}, {tp}]>>

The engine is `shardir/algebra/propagation`, with `shardir/search/propagations/reopening.py`. This
pass makes a graph of each function, and writes the resulting layouts into the types.

1. An annotated layout is never changed. Open dimensions of a `#dist.sharding` are split further,
   but not over axes that stay replicated; dimensions take part by ascending priority. An op with a
   strategy determines the layouts of its results without annotation: as the op makes them, reduced,
   or, where that is cheaper, as one of their users needs them.
2. Axes propagate along factors, forward and backward, to a fixed point: first the axes of
   activations, then the axes of parameters and states too. Where a parameter's axis is refused,
   grants are reopened: each value takes its layout from this propagation or from one with
   parameters first, whichever is faster in total. This makes no lowered program slower, if the
   function has at most MAX_LOWERED_OPS ops.
3. Of conflicting proposals, at an op or for a value, the one with the least redistribution is
   granted; ties go to the proposal that splits more, then to the first dimension.
4. An axis is added to a value only if the value does not use it yet.
5. Inputs that no annotation and no strategy reaches are split along dimension 0 over the unused
   axes: data parallel.
6. Other values are replicated.
7. The result depends on the uses of values, not on the order of ops.
8. Values of a `dist.sharding_group` have one sharding: an annotation of one annotates all. So have
   the old and new values of parameters and states, and states and their parameter, unless
   annotations differ.
9. A function that trains a parameter decides on its layout in all functions.
10. Over a `dist.propagation_barrier` axes propagate in its direction only.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from xdsl.context import Context
from xdsl.dialects.builtin import ModuleOp, TensorType
from xdsl.dialects.func import CallOp, FuncOp
from xdsl.ir import Block, BlockArgument, Operation, SSAValue

from shardir.algebra.factors import FactorAxes
from shardir.algebra.layout import Layout
from shardir.algebra.mesh import Mesh
from shardir.algebra.propagation import PropagationState
from shardir.algebra.propagation.annotations import ContradictionError
from shardir.algebra.propagation.graph import GraphValue, Node, PropagationGraph, Tie
from shardir.analysis.functions import name_of, values
from shardir.analysis.groups import contradiction, sharding_groups
from shardir.analysis.roles import differentiated_arguments, retained_arguments, ties
from shardir.compat.xdsl import operands_of, set_type
from shardir.cost import op_seconds
from shardir.cost.report import cost_of_function
from shardir.diagnostics import Failure, Located, ShardirError, coded
from shardir.dialects.blocks import of_kind, ops_of
from shardir.dialects.dist import (
    PropagationBarrierOp,
    ShardingGroupOp,
    layout_of,
    sharding_of,
    with_layout,
)
from shardir.dialects.nn.base import TensorOp, decomposes, strategy_factors
from shardir.dialects.nn.types import itemsize, unsharded_type
from shardir.dialects.train import ForwardOp, Request, Update, arguments
from shardir.rewriting.autodiff.activity import Activity
from shardir.rewriting.bases import Function, GlobalPass, warn_without_mesh
from shardir.rewriting.functions import update_signature
from shardir.rewriting.placement import strategy_op_sharding
from shardir.rewriting.retained_layouts import decide_layouts
from shardir.search.measure.trial import lowered
from shardir.search.propagations.reopening import reopened


@dataclass(frozen=True)
class PropagateStrategies(GlobalPass):
    """Propagates layouts and strategies from annotated values and ops to all."""

    name = "propagate-strategies"

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        warn_without_mesh(op)
        super().apply(ctx, op)

    def rewrite_all(self, functions: Sequence[Function]) -> None:
        propagate_functions(functions)


MAX_LOWERED_OPS = 1000
"""Bounds the ops of a function that is lowered in two layouts, to compare their times: about a
second of work."""

LOWERING = "lower-layouts"
"""The pipeline that lowers a function in each layout."""


def propagate_functions(functions: Iterable[Function]) -> "list[FunctionPropagation]":
    """Set the layout of each value of the functions that have a mesh; return their propagations.

    Raises:
        Failure: the annotations or strategies of functions are not valid.
    """
    functions, propagations = list(functions), list[FunctionPropagation]()
    requests = _requests(functions[0].module) if functions else {}

    def propagate_function(f: Function) -> None:
        if f.mesh is not None:
            own_requests = requests.get(f.name, [])
            found = FunctionPropagation(f.op, f.block, f.mesh, f.module, own_requests)
            found.write(f.op, found.state)
            if f in functions:  # and not a copy, with which layouts are tried
                propagations.append(found)

    decide_layouts(functions, propagate_function)
    return sorted(propagations, key=lambda p: [f.op for f in functions].index(p.f))


class FunctionPropagation:
    """The propagation of a function. `values` and `ops` correspond to the values and nodes of
    `state`."""

    def __init__(
        self, f: FuncOp, block: Block, mesh: Mesh, module: ModuleOp, requests: Sequence[Request]
    ):
        self.f, self.block, self.mesh, self.module = f, block, mesh, module
        self.requests = requests
        """The requests to differentiate the function."""
        self.ops = ops_of(block)
        self.values = _tensors(block)
        self.value_index = {v: i for i, v in enumerate(self.values)}
        self.op_index = {op: i for i, op in enumerate(self.ops)}
        self.state = self.propagate()

    def propagate(self) -> PropagationState:
        errors: list[Located] = []
        nodes = [self.node(op, errors) for op in self.ops]
        try:
            groups = sharding_groups(self.block)
        except Failure as e:
            raise Failure([*errors, *e.errors]) from None
        graph = PropagationGraph(
            self.mesh,
            list(self.graph_values()),
            nodes,
            [
                {self.value_index[v]: self.op_index[op] for v, op in members.items()}
                for members in groups
            ],
            [Tie(self.value_index[v], self.value_index[w], self.op_index[op])
             for v, w, op in self.tied_values()],
        )  # fmt: skip
        try:
            state = reopened(graph, self.price)
        except ContradictionError as e:
            for c in e.contradictions:
                op = self.ops[c.node]
                assert isinstance(op, ShardingGroupOp)
                one = self.values[c.value], c.annotation
                other = self.values[c.other], c.other_annotation
                errors.append((op, contradiction(op, one, other)))
            raise Failure(errors) from None
        if errors:
            raise Failure(errors)
        return state

    def graph_values(self) -> Iterator[GraphValue]:
        """Yield the values of the graph, in the order of `values`."""
        retained = retained_arguments(self.f)
        activity = Activity(self.differentiated_arguments())
        activity.mark(self.ops)
        active = activity.active & _values_before_results(self.ops)
        bundled = {op.operands[1] for op in of_kind(self.ops, Update)}
        bundled.update(retained & active)
        for v in self.values:
            assert isinstance(v.type, TensorType)
            yield GraphValue(
                v.type.get_shape(),
                sharding_of(v),
                is_input=isinstance(v, BlockArgument),
                is_parameter=v in retained,
                itemsize=itemsize(unsharded_type(v)),
                is_active=v in active,
                is_bundled=v in bundled,
            )

    def differentiated_arguments(self) -> Iterator[SSAValue]:
        """Yield the arguments with respect to which requests differentiate the function."""
        for request in self.requests:
            indices = differentiated_arguments(request, arguments(self.f))
            yield from (self.block.args[i] for i in indices)

    def node(self, op: Operation, errors: list[Located]) -> Node:
        """Return the node of an op, and add its errors to `errors`."""
        operands, results = (
            tuple([i for v in side if (i := self.value_index.get(v)) is not None])
            for side in (operands_of(op), op.results)
        )
        match op:
            case PropagationBarrierOp():
                allowed = op.allowed.data
                is_forward, is_backward = (
                    allowed in (way, "both") for way in ("forward", "backward")
                )
                return Node(
                    operands, results, op.factors(), forward=is_forward, backward=is_backward,
                )  # fmt: skip
            case TensorOp() if op.strategy is None:
                return Node(
                    operands, results, strategy_factors(op), decomposes=decomposes(type(op)),
                    seconds=partial(_seconds, op, self.mesh),
                )  # fmt: skip
            case TensorOp():
                try:
                    return Node(operands, results, strategy=strategy_op_sharding(op, self.mesh))
                except ShardirError as e:
                    errors.append((op, f"{op.name} in @{name_of(self.f)}: {e}"))
            case CallOp():
                name = op.callee.string_value()
                errors.append((op, coded("F3", f"expected no calls, got one of @{name}")))
            case _:
                pass
        return Node(operands, results)

    def tied_values(self) -> Iterator[tuple[SSAValue, SSAValue, Operation]]:
        """Yield pairs of values with one layout, and the op that ties them: old and new values of
        parameters and states, and states and their parameter. Steps do not redistribute them."""
        for op in of_kind(self.ops, Update):
            for v in (*op.operands[2:], *op.results):
                yield op.operands[0], v, op
        for new, old in ties(self.f).items():
            yield old, new, self.ops[-1]

    def price(self, state: PropagationState) -> tuple[float, ...] | None:
        """Return the times of the lowered program, with overlap and without; None if it is too
        large, or cannot be lowered."""
        if len(self.ops) > MAX_LOWERED_OPS:
            return None
        try:
            programs = lowered(self.module, self.f, lambda f: self.write(f, state), LOWERING)
            costs = [cost_of_function(f, self.mesh) for f in programs]
        except ShardirError:  # an error of the program: its own lowering reports it
            return None
        return sum(c.seconds for c in costs), sum(op.seconds for c in costs for op in c.ops)

    def write(self, f: FuncOp, state: PropagationState) -> None:
        """Set the layouts of all values of the function, or of a copy of it."""
        for v, dims in zip(_tensors(f.body.block), state.dims, strict=True):
            assert isinstance(v.type, TensorType)
            annotated = layout_of(v)
            layout = annotated.simplified(self.mesh) if annotated else Layout(self.mesh.name, dims)
            set_type(v, with_layout(v.type, layout))
        update_signature(f)


def _seconds(op: TensorOp, mesh: Mesh, axes: FactorAxes) -> float:
    """Return the seconds of an op whose factors are split over these axes."""
    types = [unsharded_type(v) for v in (*op.operands, *op.results)]
    return op_seconds(type(op), strategy_factors(op), axes, types, mesh)


def _tensors(block: Block) -> list[SSAValue]:
    return [v for v in values(block) if isinstance(v.type, TensorType)]


def _values_before_results(ops: Sequence[Operation]) -> set[SSAValue]:
    """Return the values on which results of the function depend."""
    needed: set[SSAValue] = set(ops[-1].operands)
    for op in reversed(ops):
        if any(v in needed for v in op.results):
            needed.update(operands_of(op))
    return needed


def _requests(module: ModuleOp) -> dict[str, list[Request]]:
    """Return the requests to differentiate each function, by its name."""
    requests: dict[str, list[Request]] = {}
    for op in module.body.ops:
        if isinstance(op, Request) and not isinstance(op, ForwardOp):
            requests.setdefault(op.function.string_value(), []).append(op)
    return requests
