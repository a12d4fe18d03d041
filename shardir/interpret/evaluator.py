"""The evaluation of a module's functions in numpy, in either view.

    run(module, "loss", [x, w])       global arguments -> global results

A function with a `#dist.local` type is in the local view. It runs on all ranks of its mesh in one
process: its arguments are split, its results assembled.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from xdsl.dialects.builtin import ModuleOp, TensorType
from xdsl.dialects.func import CallOp, FuncOp, ReturnOp
from xdsl.ir import Attribute, Operation, SSAValue

from shardir.algebra.layout import Layout, Shape, replicated
from shardir.algebra.mesh import Mesh
from shardir.analysis.loops import execution_order
from shardir.diagnostics import ShardirError
from shardir.dialects import dist, train
from shardir.dialects.dist.manual import ManualOp
from shardir.dialects.nn import StopGradientOp
from shardir.dialects.nn.base import Array, TensorOp
from shardir.interpret.collectives import run_collective, run_ring_product
from shardir.interpret.loops import evaluate
from shardir.interpret.values import (
    assemble,
    first_values,
    round_to_element,
    split,
    tensor_type,
)
from shardir.rewriting.composites import expand_module

OnValue = Callable[[SSAValue, Array], object]


def function(module: ModuleOp, name: str) -> FuncOp:
    """Return the function `name`. Raises ShardirError if it does not exist or has no body."""
    for op in module.body.ops:
        if isinstance(op, FuncOp) and op.sym_name.data == name and op.body.blocks:
            return op
    raise ShardirError(f"expected a function @{name} with a body, got none; write it")


def is_local_function(f: FuncOp) -> bool:
    """Whether the function is in the local view."""
    types = [*f.function_type.inputs, *f.function_type.outputs]
    types += [r.type for op in f.body.block.ops for r in op.results]
    return any(dist.is_local(t) for t in types)


def global_type(t: Attribute, meshes: dict[str, Mesh]) -> TensorType:
    """Return the type of a global value, without its layout."""
    layout = dist.type_layout(t)
    return dist.global_type(t, meshes[layout.mesh] if layout is not None else None)


class GlobalView:
    """The only device of the global view, which holds all values."""

    run = 0

    def start(self, value: SSAValue, dim: int) -> int:
        return 0

    def shape(self, value: SSAValue) -> Shape:
        return tensor_type(value.type).get_shape()

    global_shape = shape


class RankView:
    """One rank of the local view. The ranks of an evaluation share `placed`, a cache of the layouts
    and global shapes of values."""

    def __init__(
        self,
        meshes: dict[str, Mesh],
        rank: int,
        placed: dict[SSAValue, tuple[Layout | None, Shape]],
    ):
        self.meshes, self.rank, self.placed = meshes, rank, placed
        self.run = 0

    def _placed(self, value: SSAValue) -> tuple[Layout | None, Shape]:
        if (placed := self.placed.get(value)) is None:
            layout = dist.layout_of(value)
            mesh = None if layout is None else self.meshes[layout.mesh]
            shape = dist.global_shape(value.type, mesh)
            placed = self.placed[value] = layout, shape
        return placed

    def _slices(self, value: SSAValue) -> tuple[slice, ...]:
        layout, shape = self._placed(value)
        if layout is None:
            return tuple(slice(0, n) for n in shape)
        return layout.slices(self.meshes[layout.mesh], shape, self.rank)

    def start(self, value: SSAValue, dim: int) -> int:
        return self._slices(value)[dim].start

    def shape(self, value: SSAValue) -> Shape:
        return tuple(s.stop - s.start for s in self._slices(value))

    def global_shape(self, value: SSAValue) -> Shape:
        return self._placed(value)[1]


def check_arguments(f: FuncOp, arguments: Sequence[Any], meshes: dict[str, Mesh]) -> list[Array]:
    """Return the arguments as arrays of the function's global types.

    Raises:
        ShardirError: their number or a shape is wrong.
    """
    name, inputs = f.sym_name.data, f.function_type.inputs.data
    if len(arguments) != len(inputs):
        raise ShardirError(f"expected {len(inputs)} arguments of @{name}, got {len(arguments)}")
    out = []
    for i, (value, t) in enumerate(zip(arguments, inputs, strict=True)):
        want = global_type(t, meshes)
        array = round_to_element(value, want.element_type)
        if array.shape != want.get_shape():
            raise ShardirError(
                f"expected argument {i} of @{name} of shape {list(want.get_shape())}, as its type "
                f"has, got {list(array.shape)}"
            )
        out.append(array)
    return out


def run(
    module: ModuleOp, name: str, arguments: Sequence[Any], on_value: OnValue | None = None
) -> list[Array]:
    """Run a function of either view on global values; return its global results.

    Args:
        on_value: called with each result of each op of the global view.

    Raises:
        ShardirError: the function, its arguments or one of its ops cannot be evaluated.
    """
    module = expand_module(module)
    f = function(module, name)
    meshes = dist.meshes_of(module)
    arrays = check_arguments(f, arguments, meshes)
    with np.errstate(all="ignore"):
        if is_local_function(f):
            return _LocalEvaluator(module, meshes).call(f, arrays)
        return _GlobalEvaluator(module, meshes, on_value).call(f, arrays)


class _GlobalEvaluator:
    """Evaluates the global view: one array for each value."""

    def __init__(
        self, module: ModuleOp, meshes: dict[str, Mesh], on_value: OnValue | None = None
    ):  # fmt: skip
        self.module, self.meshes, self.on_value = module, meshes, on_value
        self.device = GlobalView()
        self.stops = 0

    def call(self, f: FuncOp, arguments: list[Array]) -> list[Array]:
        env: dict[SSAValue, Array] = dict(zip(f.body.block.args, arguments, strict=True))
        for op, self.device.run in execution_order(f.body.block.ops):
            if isinstance(op, ReturnOp):
                return [env[v] for v in op.operands]
            inputs = [env[v] for v in op.operands]
            if isinstance(op, ManualOp):
                out = tuple(_LocalEvaluator(self.module, self.meshes).call(op.function, inputs))
            elif isinstance(op, TensorOp):
                out = evaluate(op, self.device, *inputs)
                first = first_values.get()
                if isinstance(op, StopGradientOp) and first is not None:
                    out = first.setdefault((f.sym_name.data, self.stops), np.asarray(out))
                    self.stops += 1
            elif isinstance(op, dist.SAME_VALUE):
                out = inputs[0]
            elif isinstance(op, CallOp):
                callee = function(self.module, op.callee.root_reference.data)
                out = tuple(self.call(callee, inputs))
            elif isinstance(op, train.Mark | dist.ShardingGroupOp):
                continue
            else:
                raise ShardirError(f"expected an op of the global view, got {op.name}")
            if isinstance(op, train.OfMicrobatches) and self.device.run:
                out = op.with_part(env[op.out], inputs[0], self.device.run)
            if isinstance(op, train.ItemsOp):
                env[op.outs[self.device.run]] = inputs[0]
                continue
            store(env, op, out if isinstance(out, tuple) else (out,))
            if self.on_value is not None:
                for result in op.results:
                    self.on_value(result, env[result])
            if isinstance(op, train.CarryOp):
                env[op.carried] = inputs[0]
        raise ShardirError(f"expected a func.return in @{f.sym_name.data}, got none")


def store(env: dict[SSAValue, Array], op: Operation, results: tuple[Array, ...]) -> None:
    for v, array in zip(op.results, results, strict=True):
        env[v] = round_to_element(array, tensor_type(v.type).element_type)


class _LocalEvaluator:
    """Evaluates the local view: for each value one array per rank."""

    def __init__(self, module: ModuleOp, meshes: dict[str, Mesh]):
        self.module, self.meshes = module, meshes

    def call(self, f: FuncOp, arguments: list[Array]) -> list[Array]:
        self.mesh = self._mesh(f)
        args = [
            split(a, self._layout(v.type), self.mesh, holder=i)
            for i, (a, v) in enumerate(zip(arguments, f.body.block.args, strict=True))
        ]
        results = self.call_parts(f, args)
        return [
            assemble(parts, self._layout(t), self.mesh, global_type(t, self.meshes).get_shape())
            for parts, t in zip(results, f.function_type.outputs, strict=True)
        ]

    def _mesh(self, f: FuncOp) -> Mesh:
        for op in f.walk():
            for v in (*op.results, *(a for r in op.regions for b in r.blocks for a in b.args)):
                if (layout := dist.layout_of(v)) is not None:
                    return self.meshes[layout.mesh]
        raise ShardirError(f"expected a layout in @{f.sym_name.data}, got none")

    def _layout(self, t: Attribute) -> Layout:
        rank = len(tensor_type(t).get_shape())
        return dist.type_layout(t) or replicated(self.mesh.name, rank)

    def call_parts(self, f: FuncOp, arguments: list[list[Array]]) -> list[list[Array]]:
        ranks = range(self.mesh.size)
        placed: dict[SSAValue, tuple[Layout | None, Shape]] = {}
        devices = [RankView(self.meshes, r, placed) for r in ranks]
        env: dict[SSAValue, list[Array]] = dict(zip(f.body.block.args, arguments, strict=True))
        sends = dist.matching_sends(f.body.block.ops)
        for op, run in execution_order(f.body.block.ops):
            for device in devices:
                device.run = run
            inputs = [env[v] for v in op.operands]
            outs: list[list[Array]]
            if isinstance(op, ReturnOp):
                return inputs
            if isinstance(op, train.ItemsOp):
                env[op.outs[run]] = inputs[0]
                continue
            if isinstance(op, train.OfMicrobatches) and run:
                parts = zip(env[op.out], inputs[0], strict=True)
                outs = [[op.with_part(before, x, run) for before, x in parts]]
            elif isinstance(op, TensorOp):
                per_rank = [evaluate(op, devices[r], *(x[r] for x in inputs)) for r in ranks]
                per_rank = [o if isinstance(o, tuple) else (o,) for o in per_rank]
                outs = [[o[i] for o in per_rank] for i in range(len(op.results))]
            elif isinstance(op, dist.CollectiveOp):
                outs = run_collective(op, inputs, self.mesh)
            elif isinstance(op, dist.RingProductOp):
                outs = run_ring_product(op, inputs, self.mesh)
            elif isinstance(op, dist.WaitOp):
                outs = inputs
            elif isinstance(op, dist.RecvOp):
                outs = [self._receive(op, env[sends[op].value], devices)]
            elif isinstance(op, CallOp):
                callee = function(self.module, op.callee.root_reference.data)
                outs = self.call_parts(callee, inputs)
            elif isinstance(op, train.Mark | dist.SendOp):
                continue
            else:
                raise ShardirError(f"expected an op of the local view, got {op.name}")
            for v, parts in zip(op.results, outs, strict=True):
                element = tensor_type(v.type).element_type
                env[v] = [round_to_element(p, element) for p in parts]
                for device, part in zip(devices, env[v], strict=True):
                    if part.shape != device.shape(v):
                        raise ShardirError(
                            f"{op.name}: expected shape {list(device.shape(v))} on rank "
                            f"{device.rank}, as its type has, got {list(part.shape)}"
                        )
            if isinstance(op, train.CarryOp):
                env[op.carried] = inputs[0]
        raise ShardirError(f"expected a func.return in @{f.sym_name.data}, got none")

    def _receive(self, op: dist.RecvOp, sent: list[Array], devices: list[RankView]) -> list[Array]:
        out = [np.zeros(p.shape(op.out), sent[0].dtype) for p in devices]
        for group in self.mesh.groups(op.axes.data):
            out[group[op.target.value.data]] = sent[group[op.source.value.data]]
        return out
