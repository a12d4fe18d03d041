"""Runs functions of a module in numpy: the global view, and the local view on all ranks at once.

    run(module, "loss", {"x": ..., ...})         one value per argument -> one per result
    run_local(module, "step", [...])              global values in, global values out;
                                                  in between, every rank of the mesh

Both views are told apart by the types: a function with a `#dist.local` type anywhere is local.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from xdsl.dialects.builtin import ModuleOp, TensorType
from xdsl.dialects.func import CallOp, FuncOp, ReturnOp
from xdsl.ir import Attribute, Operation, SSAValue

from shardir.algebra.layout import Layout, Shape, replicated
from shardir.algebra.mesh import Mesh
from shardir.diagnostics import ShardirError
from shardir.dialects import dist, train
from shardir.dialects.nn import StopGradientOp
from shardir.dialects.nn.base import TensorOp
from shardir.interpret.collectives import run_collective
from shardir.interpret.values import Array, assemble, held, rounded, split, tensor_type
from shardir.rewriting.composites import expanded


def function(module: ModuleOp, name: str) -> FuncOp:
    """The function `name`. Raises ShardirError when there is none with a body."""
    for op in module.body.ops:
        if isinstance(op, FuncOp) and op.sym_name.data == name and op.body.blocks:
            return op
    raise ShardirError(f"no function @{name} with a body")


def is_local_function(f: FuncOp) -> bool:
    """Whether the function is in the local view."""
    types = [*f.function_type.inputs, *f.function_type.outputs]
    types += [r.type for op in f.body.block.ops for r in op.results]
    return any(dist.is_local(t) for t in types)


def global_type(t: Attribute, meshes: dict[str, Mesh]) -> TensorType:
    """The type of the whole value, without its layout."""
    t = tensor_type(t)
    layout = dist.type_layout(t)
    mesh = meshes[layout.mesh] if layout is not None else None
    return dist.tensor(t.element_type, dist.global_shape(t, mesh))


class GlobalView:
    """The global view: one device that holds everything."""

    def start(self, value: SSAValue, dim: int) -> int:
        return 0

    def shape(self, value: SSAValue) -> Shape:
        return tensor_type(value.type).get_shape()

    global_shape = shape


class RankView:
    """One rank of the local view."""

    def __init__(self, meshes: dict[str, Mesh], rank: int):
        self.meshes, self.rank = meshes, rank

    def _slices(self, value: SSAValue) -> tuple[slice, ...]:
        layout = dist.layout_of(value)
        shape = self.global_shape(value)
        if layout is None:
            return tuple(slice(0, n) for n in shape)
        return layout.slices(self.meshes[layout.mesh], shape, self.rank)

    def start(self, value: SSAValue, dim: int) -> int:
        return self._slices(value)[dim].start

    def shape(self, value: SSAValue) -> Shape:
        return tuple(s.stop - s.start for s in self._slices(value))

    def global_shape(self, value: SSAValue) -> Shape:
        return global_type(value.type, self.meshes).get_shape()


def check_arguments(f: FuncOp, given: Sequence[Any], meshes: dict[str, Mesh]) -> list[Array]:
    """The arguments as arrays of the function's (global) types.

    Raises:
        ShardirError: their number or a shape is wrong.
    """
    inputs = f.function_type.inputs.data
    if len(given) != len(inputs):
        raise ShardirError(f"@{f.sym_name.data} takes {len(inputs)} arguments, not {len(given)}")
    out = []
    for i, (value, t) in enumerate(zip(given, inputs, strict=True)):
        want = global_type(t, meshes)
        array = rounded(value, want.element_type)
        if array.shape != want.get_shape():
            raise ShardirError(
                f"argument {i} of @{f.sym_name.data} has shape {list(array.shape)}, "
                f"its type has {list(want.get_shape())}"
            )
        out.append(array)
    return out


def run(module: ModuleOp, name: str, arguments: Sequence[Any]) -> list[Array]:
    """The results of a function, all values whole, whichever the view.

    Raises:
        ShardirError: the function, its arguments, or an op of it can't be evaluated.
    """
    module = expanded(module)
    f = function(module, name)
    meshes = dist.meshes_of(module)
    arrays = check_arguments(f, arguments, meshes)
    with np.errstate(all="ignore"):
        if is_local_function(f):
            return _AllRanks(module, meshes).call(f, arrays)
        return _Whole(module).call(f, arrays)


class _Whole:
    """The global view: one array per value."""

    def __init__(self, module: ModuleOp):
        self.module, self.device = module, GlobalView()
        self.stops = 0

    def call(self, f: FuncOp, arguments: list[Array]) -> list[Array]:
        env: dict[SSAValue, Array] = dict(zip(f.body.block.args, arguments, strict=True))
        for op in f.body.block.ops:
            if isinstance(op, ReturnOp):
                return [env[v] for v in op.operands]
            inputs = [env[v] for v in op.operands]
            if isinstance(op, TensorOp):
                out = op.evaluate(self.device, *inputs)
                first = held.get()
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
                raise ShardirError(f"the interpreter has no {op.name}")
            store(env, op, out if isinstance(out, tuple) else (out,))
        raise ShardirError(f"@{f.sym_name.data} does not return")


def store(env: dict[SSAValue, Array], op: Operation, results: tuple[Array, ...]) -> None:
    for v, array in zip(op.results, results, strict=True):
        env[v] = rounded(array, tensor_type(v.type).element_type)


class _AllRanks:
    """The local view: for each value, one array per rank."""

    def __init__(self, module: ModuleOp, meshes: dict[str, Mesh]):
        self.module, self.meshes = module, meshes

    def call(self, f: FuncOp, arguments: list[Array]) -> list[Array]:
        self.mesh = self._mesh(f)
        args = [
            split(a, self._layout(v.type), self.mesh)
            for a, v in zip(arguments, f.body.block.args, strict=True)
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
        raise ShardirError(f"@{f.sym_name.data} has no layout, so no mesh")

    def _layout(self, t: Attribute) -> Layout:
        rank = len(tensor_type(t).get_shape())
        return dist.type_layout(t) or replicated(self.mesh.name, rank)

    def call_parts(self, f: FuncOp, arguments: list[list[Array]]) -> list[list[Array]]:
        ranks = range(self.mesh.size)
        devices = [RankView(self.meshes, r) for r in ranks]
        env: dict[SSAValue, list[Array]] = dict(zip(f.body.block.args, arguments, strict=True))
        sends = dist.matching_sends(f.body.block.ops)
        for op in f.body.block.ops:
            inputs = [env[v] for v in op.operands]
            outs: list[list[Array]]
            if isinstance(op, ReturnOp):
                return inputs
            if isinstance(op, TensorOp):
                per_rank = [op.evaluate(devices[r], *(x[r] for x in inputs)) for r in ranks]
                per_rank = [o if isinstance(o, tuple) else (o,) for o in per_rank]
                outs = [[o[i] for o in per_rank] for i in range(len(op.results))]
            elif isinstance(op, dist.CollectiveOp):
                outs = run_collective(op, inputs, self.mesh)
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
                raise ShardirError(f"the interpreter of the local view has no {op.name}")
            for v, parts in zip(op.results, outs, strict=True):
                element = tensor_type(v.type).element_type
                env[v] = [rounded(p, element) for p in parts]
                for device, part in zip(devices, env[v], strict=True):
                    if part.shape != device.shape(v):
                        raise ShardirError(
                            f"{op.name}: rank {device.rank} has shape {list(part.shape)}, "
                            f"its type says {list(device.shape(v))}"
                        )
        raise ShardirError(f"@{f.sym_name.data} does not return")

    def _receive(self, op: dist.RecvOp, sent: list[Array], devices: list[RankView]) -> list[Array]:
        out = [np.zeros(p.shape(op.out), sent[0].dtype) for p in devices]
        for group in self.mesh.groups(op.axes.data):
            out[group[op.target.value.data]] = sent[group[op.source.value.data]]
        return out
