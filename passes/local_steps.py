"""local-steps: a step with periodic synchronisation -> a step of each replica, and a function that
synchronises the replicas.

    func.func @step(%w {train.parameter = "w"}) attributes {train.sync = <sgd, replicas = 4, ...>}
 -> func.func @step(%w {train.state = "w.replica"}) attributes {train.replicas = 4}
    func.func @step_sync(%w {train.parameter = "w"}, %w_replica) attributes {train.every = 8} {
      %change = the mean of %w - %w_replica[k] over the replicas k
      %w_1 = the outer optimizer's step from %w, with %change as the gradient
      %w_replica_1 = %w_1 for each replica
    }

1. The mesh gets `replica` as its outermost axis. The cluster gets a level for it, with links like
   the outermost links of a replica. The step is not changed: none of its groups contains the axis.
2. Each replica has its own copy of all values that the step retains, with keys that end in
   `.replica`. In the plan of a program, and in the function that synchronises, dimension 0 has the
   replicas.
3. A parameter is the value of the last synchronisation; other functions use it. So is a state of
   the program, such as running statistics: the mean over the replicas, or the maximum of integers.
   States of the optimizer are not synchronised, nor are states that start from random numbers, such
   as the key of dropout, unless another function uses them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from xdsl.context import Context
from xdsl.dialects.builtin import (
    FunctionType,
    IntegerType,
    ModuleOp,
    StringAttr,
    SymbolRefAttr,
    TensorType,
)
from xdsl.dialects.func import FuncOp, ReturnOp
from xdsl.ir import Attribute, Block, BlockArgument, Region, SSAValue

from shardir.algebra.layout import Layout, Shape, replicated
from shardir.algebra.mesh import Axis, Mesh
from shardir.analysis.functions import is_local_body, mesh_of, name_of, values
from shardir.diagnostics import Failure, Located
from shardir.dialects import train
from shardir.dialects.dist import (
    ClusterOp,
    MeshOp,
    global_shape,
    laid_out,
    layout_of,
    tensor,
)
from shardir.dialects.nn.types import unsharded_type
from shardir.dialects.random import DRAWN
from shardir.dialects.symbols import find_symbol
from shardir.rewriting.autodiff.arguments import Arguments
from shardir.rewriting.autodiff.step import TrainStep
from shardir.rewriting.copying import copied
from shardir.rewriting.meshes import with_outermost_axis
from shardir.rewriting.options import PassOptions
from shardir.rewriting.registry import run_pipeline
from shardir.rewriting.rewriter import Rewriter

_LOWERING = "lower-to-spmd,simplify-communication,fuse-communication"


@dataclass(frozen=True)
class LocalSteps(PassOptions):
    """Lets replicas train on their own, and adds the function that synchronises them."""

    name = "local-steps"

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        steps = {f: s for f in _functions(op) if (s := train.sync_of(f)) is not None}
        _check(op, steps)
        for f, sync in steps.items():
            has_mesh = any(layout_of(v) is not None for v in values(f.body.block))
            mesh = mesh_of(f, op) if has_mesh else None
            if mesh is not None:
                mesh = with_outermost_axis(op, mesh, train.REPLICA, sync.values["replicas"])
            synchronized = _synchronized_arguments(op, f)
            synchronization = _Synchronization(f, sync, mesh).function(synchronized)
            if is_local_body(f.body.block):
                _lower_function(ctx, op, synchronization)
            op.body.block.insert_op_after(synchronization, f)
            _mark_replicated(f, sync, synchronized)


def _functions(module: ModuleOp) -> Iterator[FuncOp]:
    yield from (f for f in module.body.ops if isinstance(f, FuncOp) and f.body.blocks)


def _check(module: ModuleOp, steps: dict[FuncOp, train.SyncAttr]) -> None:
    """Raise Failure for steps that cannot be synchronised."""
    errors: list[Located] = []
    for f, sync in steps.items():
        first = next(iter(steps.values())).values["replicas"]
        if sync.values["replicas"] != first:
            message = f"expected {first} replicas, as in the step before, got"
            errors.append((f, f"{message} {sync.values['replicas']}"))
        if find_symbol(module, FuncOp, _synchronization_name(f)) is not None:
            name = _synchronization_name(f)
            errors.append((f, f"expected no function @{name}, which this pass makes, got one"))
        mesh = mesh_of(f, module)
        if mesh is not None and any(n == train.REPLICA for n, _ in mesh.axes):
            message = f"expected a mesh of one replica, without the axis {train.REPLICA}, got"
            errors.append((f, f"{message} {mesh}; `sync` adds it"))
    if errors:
        raise Failure(errors)


def _synchronization_name(f: FuncOp) -> str:
    return f"{name_of(f)}_sync"


def _lower_function(ctx: Context, module: ModuleOp, f: FuncOp) -> None:
    """Lower a function to the local view of a module, in place."""
    declared = [copied(o) for o in module.body.ops if isinstance(o, MeshOp | ClusterOp)]
    run_pipeline(_LOWERING, ctx, ModuleOp([*declared, f]))
    f.detach()


def _mark_replicated(f: FuncOp, sync: train.SyncAttr, synchronized: Sequence[int]) -> None:
    """Let a step run on each replica's own copies of the values that it updates."""
    del f.attributes[train.SYNC]
    train.set_count(f, train.REPLICAS, sync.values["replicas"])
    updated = {key for key in train.updated_keys(f) if key is not None}
    arguments, results = train.arg_attrs(f), train.result_attrs(f)
    for i, argument in enumerate(train.arguments(f)):
        if argument.key in updated:
            initial: dict[str, Attribute] = {}
            if i not in synchronized and argument.init is not None:
                initial["train.init"] = argument.init
            key = StringAttr(train.key_of_replica(argument.key))
            arguments[i] = {train.Role.STATE.attribute: key, **initial}
    for attributes, key in zip(results, train.updated_keys(f), strict=True):
        if key is not None:
            attributes |= train.updates_attrs(train.key_of_replica(key))
    train.set_arg_attrs(f, arguments)
    train.set_result_attrs(f, results)


def _synchronized_arguments(module: ModuleOp, step: FuncOp) -> list[int]:
    """Return the indices of the arguments of a step that are synchronised: updated parameters and
    states, except states of its optimizer and states that start from random numbers, if no other
    function uses them."""
    updated = {i for i in train.updated_arguments(step) if i is not None}
    used_elsewhere = {
        a.key for f in _functions(module) if f is not step for a in train.arguments(f)
    }
    roles = train.arguments(step)
    of_optimizer = (name_of(step), *(a.key for a in roles if a.role is train.Role.PARAMETER))

    def is_own(a: train.Argument) -> bool:
        drawn = isinstance(a.init, train.InitAttr) and a.init.kind in DRAWN
        return drawn or any((a.key or "").startswith(f"{name}.") for name in of_optimizer)

    return [
        i for i, a in enumerate(roles)
        if i in updated
        and (a.role is train.Role.PARAMETER or a.key in used_elsewhere or not is_own(a))
    ]  # fmt: skip


class _Synchronization:
    """The function that synchronises the replicas of a step. `mesh` has the axis of the replicas;
    it is None for a step without layouts."""

    def __init__(self, step: FuncOp, sync: train.SyncAttr, mesh: Mesh | None):
        self.step, self.sync, self.mesh = step, sync, mesh
        self.count: int = sync.values["replicas"]
        self.arguments = Arguments(Block(), [])
        self.b = Rewriter(mesh, self.arguments.block)
        self.b.location = step.location

    def function(self, synchronized: Sequence[int]) -> FuncOp:
        """Return the function; `synchronized`: the arguments of the step."""
        roles = train.arguments(self.step)
        shared = {i: self._add_shared(i, roles[i]) for i in synchronized}
        replicas = {i: self._add_replicas(i, roles[i]) for i in synchronized}
        means = {i: self._mean_of(replicas[i], shared[i]) for i in synchronized}
        parameters = [i for i in synchronized if roles[i].role is train.Role.PARAMETER]
        changes: dict[int, SSAValue | None] = {
            shared[i].index: self._change_of(shared[i], means[i]) for i in parameters
        }
        new_values = {roles[i].key: means[i] for i in synchronized}
        for v, key in TrainStep(self._request(), self.b, self.arguments).update(changes, {}):
            new_values[key] = v
        updates = list(new_values.items())
        updates += [
            (train.key_of_replica(key), self._broadcast_to_replicas(new_values[key], replicas[i]))
            for i in synchronized if (key := roles[i].key)
        ]  # fmt: skip
        return self._build(updates)

    def _add_shared(self, i: int, argument: train.Argument) -> BlockArgument:
        """Add the value that all replicas share, for an argument of the step."""
        old = self.step.body.block.args[i]
        assert argument.key is not None
        attributes: dict[str, Attribute] = {argument.role.attribute: StringAttr(argument.key)}
        if argument.init is not None:
            attributes["train.init"] = argument.init
        return self._add_argument(old, old.name_hint or "w", attributes, ())

    def _add_replicas(self, i: int, argument: train.Argument) -> BlockArgument:
        """Add the values of the replicas, stacked in dimension 0, for an argument of the step."""
        old = self.step.body.block.args[i]
        assert argument.key is not None
        init = train.InitAttr(("copy", (("of", argument.key),)))
        attributes = train.state_attrs(train.key_of_replica(argument.key), init)
        return self._add_argument(
            old, f"{old.name_hint or 'w'}_{train.REPLICA}", attributes, (self.count,)
        )

    def _add_argument(
        self, old: SSAValue, name: str, attributes: dict[str, Attribute], replicas: Shape
    ) -> BlockArgument:
        assert isinstance(old.type, TensorType)
        element, shape = old.type.element_type, (*replicas, *self._shape_of(old))
        type = tensor(element, shape)
        if self.mesh is not None:
            layout = layout_of(old) or replicated(self.mesh.name, len(shape) - len(replicas))
            type = laid_out(element, shape, self._stack_layout(layout) if replicas else layout)
        added = self.arguments.add(type, name, attributes)
        assert isinstance(added, BlockArgument)
        return added

    def _shape_of(self, v: SSAValue) -> Shape:
        return global_shape(v.type, self.mesh)

    @staticmethod
    def _stack_layout(layout: Layout) -> Layout:
        return replace(layout, dims=((Axis(train.REPLICA),), *layout.dims))

    def _mean_of(self, own: SSAValue, shared: SSAValue) -> SSAValue:
        """Return the mean over the replicas; for integers, which are equal in all replicas, the
        maximum."""
        counts = isinstance(unsharded_type(own).element_type, IntegerType)
        return self._lay_out_like(self.b.reduce(own, "max" if counts else "mean", [0]), shared)

    def _lay_out_like(self, v: SSAValue, like: SSAValue) -> SSAValue:
        layout = layout_of(like)
        v.name_hint = like.name_hint
        return v if layout is None else self.b.redistribute(v, layout)

    def _change_of(self, shared: SSAValue, mean: SSAValue) -> SSAValue:
        change = self.b.sub(shared, mean)
        change.name_hint = f"d_{shared.name_hint}"
        return change

    def _request(self) -> train.StepOp:
        """Return the request of the outer optimizer's step."""
        properties: dict[str, Attribute] = {
            "sym_name": StringAttr(_synchronization_name(self.step)),
            "optimizer": self.sync.optimizer,
            "function": SymbolRefAttr(name_of(self.step)),
        }  # fmt: skip
        return train.StepOp.create(properties=properties, location=self.step.location)

    def _broadcast_to_replicas(self, v: SSAValue, like: SSAValue) -> SSAValue:
        """Return the value repeated for each replica, in dimension 0."""
        shape = unsharded_type(like).get_shape()
        return self._lay_out_like(self.b.broadcast(v, range(1, len(shape)), shape, like), like)

    def _build(self, updates: Sequence[tuple[str | None, SSAValue]]) -> FuncOp:
        block = self.arguments.block
        block.add_op(ReturnOp(*[v for _, v in updates]))
        types = [a.type for a in block.args], [v.type for _, v in updates]
        f = FuncOp(_synchronization_name(self.step), FunctionType.from_lists(*types), Region(block))
        f.location = self.step.location
        train.set_arg_attrs(f, self.arguments.attributes)
        train.set_result_attrs(f, [train.updates_attrs(key) for key, _ in updates if key])
        train.set_count(f, train.EVERY, self.sync.values["every"])
        return f
