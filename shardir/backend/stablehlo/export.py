"""A function of a module in either view as a module of StableHLO.

    func.func public @main(%x: tensor<8x4xf32> {sdy.sharding = #sdy.sharding<@m, [{"dp"}, {}]>},
                           %w: tensor<4x2xf32> {tf.aliasing_output = 1 : i32}) -> (...)

In the global view arguments and results have the layouts of their types, and each value with a
layout a constraint. In the local view types are those of shards, and collectives have groups of
partitions.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from xdsl.dialects.builtin import ModuleOp
from xdsl.dialects.func import CallOp, FuncOp, ReturnOp
from xdsl.ir import Attribute, Block, Operation, SSAValue

from shardir.algebra.layout import Layout
from shardir.algebra.mesh import Mesh
from shardir.algebra.sdy import mesh_to_sdy, to_sdy
from shardir.analysis.loops import execution_order
from shardir.backend.stablehlo.collectives import COLLECTIVES, receive, ring_product
from shardir.backend.stablehlo.functions import UFUNCS
from shardir.backend.stablehlo.literals import NARROW, element_of
from shardir.backend.stablehlo.ops import WRITERS
from shardir.backend.stablehlo.place import DevicePlace, PartitionPlace, UnknownPlace
from shardir.backend.stablehlo.traced import TracedArray, UnevenShards, Untraceable
from shardir.backend.stablehlo.uneven import masked_operands
from shardir.backend.stablehlo.writer import HloWriter, ValueNames, WrittenValue
from shardir.diagnostics import Failure, ShardirError
from shardir.dialects import dist, nn, train
from shardir.dialects.blocks import of_kind, ops_of
from shardir.dialects.dist.manual import ManualOp
from shardir.dialects.nn.base import Composite, TensorOp, decomposes
from shardir.dialects.nn.elementwise import Elementwise
from shardir.dialects.nn.types import unsharded_type
from shardir.interpret.evaluator import function as function_of
from shardir.interpret.evaluator import is_local_function
from shardir.rewriting.composites import adopt_unknown, decompose
from shardir.rewriting.copying import copied
from shardir.rewriting.functions import is_public
from shardir.rewriting.lowering import split_function
from shardir.rewriting.rewriter import Rewriter, erase

MANUAL = 'mhlo.sharding = "{manual}"'
"""The attribute of an argument or a result that is one partition's own."""


def to_stablehlo(module: ModuleOp, name: str | None = None) -> str:
    """Return the text of a function as a module of StableHLO.

    Args:
        name: of the function; by default the only step, else the only public or the only one.

    Raises:
        Failure: ops cannot be written; it has all of them, each with the reason.
        ShardirError: there is no such function, or there are several.
    """
    module = copied(module)
    f = _chosen(module, name)
    return FunctionExport(module, f).text()


def _chosen(module: ModuleOp, name: str | None) -> FuncOp:
    if name is not None:
        return function_of(module, name)
    functions = [
        f for f in module.body.ops
        if isinstance(f, FuncOp) and f.body.blocks and not train.is_rule(f)
    ]  # fmt: skip
    public = [f for f in functions if is_public(module, f.sym_name.data)] or functions
    public = [f for f in public if train.is_step(f)] or public
    if len(public) != 1:
        names = ", ".join(f"@{f.sym_name.data}" for f in public) or "none"
        raise ShardirError(
            f"expected one function, which becomes @main, got {names}; name one: "
            "stablehlo{function=NAME}"
        )
    return public[0]


class FunctionExport:
    """The export of a function."""

    def __init__(self, module: ModuleOp, f: FuncOp):
        self.module, self.f = module, f
        self.meshes = dist.meshes_of(module)
        self.is_local = is_local_function(f)
        self.mesh: Mesh | None = next(
            (self.meshes[l.mesh] for v in _values(f) if (l := dist.layout_of(v)) is not None), None
        )
        if self.mesh is None and (bodies := of_kind(ops_of(f.body.block), ManualOp)):
            self.mesh = bodies[0].mesh
        self.writer = HloWriter()
        self.place = (
            PartitionPlace(self.writer, self.meshes, self.mesh)
            if self.is_local and self.mesh is not None else DevicePlace(self.writer)
        )  # fmt: skip
        self.refusals: list[tuple[Operation, str]] = []
        self.manuals = 0
        """The number of manual computations so far."""
        self.regions = 0
        """The number of regions of loops so far."""

    # ---- the module ----

    def text(self) -> str:
        f, block = self.f, self.f.body.block
        arguments = [self._argument(v) for v in block.args]
        results = self.run(block, arguments)
        if self.refusals:
            raise Failure(self.refusals)
        values = [r.value for r in results]
        names = ValueNames()
        heads = [
            f"%{names.of(a.value)[1:]}: {a.value.type}{attributes}"
            for a, attributes in zip(arguments, self._attributes_of_arguments(), strict=True)
        ]
        types = [
            f"{v.type}{attributes}"
            for v, attributes in zip(values, self._attributes_of_results(), strict=True)
        ]
        lines = self.writer.lines(names, values)
        returned = ", ".join(names.of(v) for v in values)
        ends = f" {returned} : {', '.join(v.type for v in values)}" if values else ""
        outputs = f" -> ({', '.join(types)})" if types else ""
        partitions = 1 if self.mesh is None else self.mesh.size
        counts = f"mhlo.num_partitions = {partitions} : i32, mhlo.num_replicas = 1 : i32"
        mesh = [] if self.mesh is None or self.is_local else [f"  {mesh_to_sdy(self.mesh)}"]
        return "\n".join([
            f"module @{f.sym_name.data} attributes {{{counts}}} {{",
            *mesh,
            f"  func.func public @main({', '.join(heads)}){outputs} {{",
            *lines,
            f"    return{ends}",
            "  }",
            "}",
            "",
        ])  # fmt: skip

    def _argument(self, v: SSAValue) -> TracedArray:
        return TracedArray(
            self.writer, WrittenValue(self.place.shape(v), element_of(v.type), v.name_hint)
        )

    def _attributes_of_arguments(self) -> list[str]:
        updated = {a: i for i, a in enumerate(train.updated_arguments(self.f)) if a is not None}
        out = []
        for i, (v, role) in enumerate(
            zip(self.f.body.block.args, train.arguments(self.f), strict=True)
        ):
            parts = self._sharding(v.type)
            if i in updated:
                parts.append(f"tf.aliasing_output = {updated[i]} : i32")
            name = role.key or v.name_hint
            location = f' loc("{name}")' if name else ""
            out.append(f"{_braces(parts)}{location}")
        return out

    def _attributes_of_results(self) -> list[str]:
        keys = train.updated_keys(self.f)
        out = []
        for t, key in zip(self.f.function_type.outputs, keys, strict=True):
            parts = [f'jax.result_info = "{key}"'] if key else []
            out.append(_braces([*parts, *self._sharding(t)]))
        return out

    def _sharding(self, t: Attribute) -> list[str]:
        """The attribute with the layout of a type; in the local view, that XLA leaves the program
        of each partition as it is."""
        layout = dist.type_layout(t)
        if self.is_local:
            return [MANUAL]
        if layout is None or self.mesh is None:
            return []
        try:
            return [f"sdy.sharding = {to_sdy(layout, self.mesh)}"]
        except ShardirError as error:
            self._refuse(self.f, str(error))
            return []

    def _refuse(self, op: Operation, reason: str) -> None:
        if (op, reason) not in self.refusals:
            self.refusals.append((op, reason))

    # ---- ops ----

    def run(self, block: Block, arguments: Sequence[TracedArray]) -> list[TracedArray]:
        """Write the ops of a block; return its results. After an op that is refused, the others are
        only checked."""
        adopt_unknown(block)
        sends = dist.matching_sends(block.ops)
        env: dict[SSAValue, TracedArray | None] = dict(zip(block.args, arguments, strict=True))
        for op, self.place.run in execution_order(block.ops):
            operands = [env.get(v) for v in op.operands]
            if isinstance(op, ReturnOp | nn.YieldOp):
                return [v for v in operands if v is not None]
            if isinstance(op, train.Mark | dist.ShardingGroupOp | dist.SendOp):
                continue
            if isinstance(op, dist.RecvOp):
                operands = [env.get(sends[op].value)]
            results = self._results(op, operands, env)
            if isinstance(op, train.ItemsOp):
                env[op.outs[self.place.run]] = operands[0]
                continue
            for v, result in zip(op.results, results, strict=True):
                env[v] = self._finished(op, v, result)
            if isinstance(op, train.CarryOp):
                env[op.carried] = operands[0]
        return []

    def _finished(
        self, op: Operation, v: SSAValue, result: TracedArray | None
    ) -> TracedArray | None:
        """A result with its type, name and layout."""
        if result is None:
            return None
        element, shape = element_of(v.type), self.place.shape(v)
        result = result.to(element)
        if result.shape != shape:
            if isinstance(op, train.CollectOp):
                return result  # the parts of the microbatches so far
            raise AssertionError(f"{op.name}: expected {list(shape)}, got {list(result.shape)}")
        result = self._constrained(v, result)
        if result.value.hint is None and self.writer.ops and result.number is None:
            result.value.hint = v.name_hint
        return result

    def _constrained(self, v: SSAValue, x: TracedArray) -> TracedArray:
        layout = dist.layout_of(v)
        if layout is None or self.is_local or self.mesh is None:
            return x
        if layout.partial or not layout.dims or x.number is not None:
            return x  # XLA decides when it reduces
        try:
            text = to_sdy(layout, self.mesh).removeprefix("#sdy.sharding")
        except ShardirError as error:
            self._refuse(v.owner if isinstance(v.owner, Operation) else self.f, str(error))
            return x
        (value,) = self.writer.results(
            "sdy.sharding_constraint", [x.value], [(x.shape, x.element)], " ", f" {text}", True
        )
        return x.make(value)

    def _results(
        self, op: Operation, operands: Sequence[TracedArray | None], env: dict[SSAValue, Any]
    ) -> Sequence[TracedArray | None]:
        """The results of an op; None for each if it is refused, or reads such one."""
        known = [x for x in operands if x is not None]
        try:
            self._check(op)
            if len(known) == len(operands):
                return self._written(op, known, env)
        except UnevenShards as error:
            got = f"uneven ones of {_name(op)}: {error}"
            self._refuse(op, f"expected even shards for partitions, got {got}; use another layout")
        except Untraceable as error:
            self._refuse(op, f"expected an op that StableHLO has, got {_name(op)}: {error}")
        return [None for _ in op.results]

    def _check(self, op: Operation) -> None:
        """Raise Untraceable for ops that are refused whatever their operands are."""
        if isinstance(op, nn.CustomOp) and op.custom.evaluate is None:
            raise Untraceable("it has no evaluation in numpy; register_custom_op(evaluate=...)")
        if isinstance(op, ManualOp):
            return
        among = isinstance(self.place, PartitionPlace) and (
            isinstance(op, dist.RingProductOp | dist.RecvOp)
            or (isinstance(op, dist.CollectiveOp) and op.record.name in COLLECTIVES)
        )
        if not among and not isinstance(op, (TensorOp, CallOp, dist.WaitOp, *dist.SAME_VALUE)):
            raise Untraceable("it has no counterpart")

    def _written(
        self, op: Operation, operands: list[TracedArray], env: dict[SSAValue, Any]
    ) -> Sequence[TracedArray]:
        if isinstance(op, train.OfMicrobatches):
            return [_with_part(op, env.get(op.out) if self.place.run else None, operands[0],
                               self.place.run)]  # fmt: skip
        if isinstance(op, (dist.WaitOp, train.ItemsOp, *dist.SAME_VALUE)):
            return operands[: len(op.results)]
        if isinstance(op, CallOp):
            callee = function_of(self.module, op.callee.root_reference.data)
            run, results = self.place.run, self.run(callee.body.block, operands)
            self.place.run = run
            return results
        if isinstance(op, ManualOp):
            return self._manual(op, operands)
        if isinstance(self.place, PartitionPlace):
            if isinstance(op, dist.CollectiveOp):
                return self._collective(self.place, op, operands)
            if isinstance(op, dist.RecvOp):
                return [receive(self.place, op, *operands)]
            if isinstance(op, dist.RingProductOp):
                return ring_product(self.place, op, *operands)
        assert isinstance(op, TensorOp)
        if isinstance(self.place, PartitionPlace):
            operands = masked_operands(self.place, op, operands, type(op) in WRITERS)
        return self.tensor_op(op, operands)

    def _manual(self, op: ManualOp, operands: Sequence[TracedArray]) -> list[TracedArray]:
        """Write a manual computation over all axes of the mesh: its body among partitions."""
        mesh = self.mesh
        assert mesh is not None
        f = split_function(op, mesh)
        self.module.body.block.add_op(f)  # its ops find the mesh
        try:
            part = FunctionExport(self.module, f)
            assert isinstance(part.place, PartitionPlace)
            part.place.channels = self.place.channels
            arguments = [part._argument(v) for v in f.body.block.args]
            results = [x.value for x in part.run(f.body.block, arguments)]
            self.place.channels = part.place.channels
        finally:
            erase(f)
        self.refusals += part.refusals
        if part.refusals:
            raise Untraceable("its body has such ops")
        self.manuals += 1
        names = ValueNames(f"manual{self.manuals}_")
        heads = ", ".join(f"{names.of(a.value)}: {a.value.type}" for a in arguments)
        lines = part.writer.lines(names, results, "      ")
        returned = ", ".join(names.of(v) for v in results)
        inputs, outputs = (
            ", ".join(
                to_sdy(Layout(mesh.name, cuts), mesh).removeprefix("#sdy.sharding") for cuts in side
            )
            for side in op.cuts
        )
        axes = ", ".join(f'"{name}"' for name, _ in mesh.axes)
        body = "\n".join([
            f") in_shardings=[{inputs}] out_shardings=[{outputs}] manual_axes={{{axes}}} "
            f"({heads}) {{",
            *lines,
            f"      sdy.return {returned} : {', '.join(v.type for v in results)}",
            "    }",
        ])  # fmt: skip
        types = [(unsharded_type(v).get_shape(), element_of(v.type)) for v in op.results]
        values = self.writer.results(
            "sdy.manual_computation", [x.value for x in operands], types, "(", body
        )
        if not operands:
            self.writer.ops[-1].types = f"() -> {self.writer.ops[-1].types}"
        return [TracedArray(self.writer, v) for v in values]

    def _collective(
        self, place: PartitionPlace, op: dist.CollectiveOp, operands: Sequence[TracedArray]
    ) -> list[TracedArray]:
        write = COLLECTIVES[op.record.name]
        transfers = zip(operands, op.values, op.outs, strict=True)
        return [write(place, op, x, value, out) for x, value, out in transfers]

    # ---- ops on tensors: by an entry, by their definition in numpy, by other ops ----

    def tensor_op(self, op: TensorOp, operands: list[TracedArray]) -> Sequence[TracedArray]:
        if (write := WRITERS.get(type(op))) is not None:
            return _sequence(write(self.place, op, *operands))
        if isinstance(op, nn.CustomOp):
            return self._custom(op, operands)
        if isinstance(op, nn.WhileOp):
            return self._while(op, operands)
        if not isinstance(op, Composite):
            try:
                return self._traced(op, operands)
            except Exception as error:  # of a definition that may be of an extension
                if not decomposes(type(op)):
                    kind = "" if isinstance(error, Untraceable) else f"{type(error).__name__}: "
                    raise Untraceable(f"{kind}{error}") from None
        return self._decomposed(op, operands)

    def _traced(self, op: TensorOp, operands: list[TracedArray]) -> Sequence[TracedArray]:
        """What the op's definition in numpy writes. 16-bit floats are computed in f32, but for one
        function of numpy."""
        function: Any = getattr(type(op), "NUMPY", None)
        if isinstance(op, Elementwise) and function in UFUNCS:
            return [function(*operands)]
        if isinstance(op, train.Update):
            operands = [x.to(operands[0].element) if not x.shape else x for x in operands]
        wide = [x.to("f32") if x.element in NARROW else x for x in operands]
        evaluate: Any = op.evaluate
        with np.errstate(all="ignore"):
            return [wide[0].lift(x) if wide else self.place.constant(0, "f32").lift(x)
                    for x in _sequence(evaluate(self.place, *wide))]  # fmt: skip

    def _custom(self, op: nn.CustomOp, operands: list[TracedArray]) -> Sequence[TracedArray]:
        assert op.custom.evaluate is not None
        results = _sequence(op.custom.evaluate(*operands, **op.values))
        return [operands[0].lift(x) for x in results]

    def _while(self, op: nn.WhileOp, operands: Sequence[TracedArray]) -> Sequence[TracedArray]:
        """Write a loop, whose regions have values of one device."""
        types = [(unsharded_type(v).get_shape(), element_of(v.type)) for v in op.results]
        regions = []
        for region in op.regions:
            self.regions += 1
            part = FunctionPart(self, op, HloWriter())
            arguments = [
                TracedArray(part.writer, WrittenValue(shape, element, v.name_hint))
                for v, (shape, element) in zip(region.block.args, types, strict=True)
            ]
            results = [x.value for x in part.run(region.block, arguments)]
            names = ValueNames(f"region{self.regions}_")
            heads = ", ".join(f"{names.of(a.value)}: {a.value.type}" for a in arguments)
            lines = part.writer.lines(names, results, "      ")
            returned = ", ".join(names.of(v) for v in results)
            ends = ", ".join(v.type for v in results)
            self.regions = part.regions
            regions.append(
                "\n".join([f"{{\n    ^bb0({heads}):", *lines,
                           f"      stablehlo.return {returned} : {ends}\n    }}"])
            )  # fmt: skip
        values = self.writer.results(
            '"stablehlo.while"', [x.value for x in operands], types, "(",
            f") ({', '.join(regions)})",
        )  # fmt: skip
        return [TracedArray(self.writer, v) for v in values]

    def _decomposed(self, op: TensorOp, operands: list[TracedArray]) -> Sequence[TracedArray]:
        """Write the ops of the decomposition, on values without layouts."""
        types = [unsharded_type(v) for v in op.operands]
        block = Block(arg_types=types)
        new = type(op).create(
            operands=block.args, result_types=[unsharded_type(v) for v in op.results],
            properties={k: a for k, a in op.properties.items() if k != "strategy"},
        )  # fmt: skip
        block.add_op(new)
        block.add_op(ReturnOp(*new.results))
        decompose(new, Rewriter())
        return FunctionPart(self, op).run(block, operands)


class FunctionPart(FunctionExport):
    """A block without layouts within a function: the decomposition of an op, or a region of an op,
    whose ops have a writer of their own."""

    def __init__(self, outer: FunctionExport, op: TensorOp, writer: HloWriter | None = None):
        self.module, self.f, self.writer = outer.module, outer.f, writer or outer.writer
        self.regions = outer.regions
        self.mesh, self.is_local, self.refusals = None, False, outer.refusals
        is_split = isinstance(outer.place, PartitionPlace) and outer.place.splits_any(op)
        self.place = UnknownPlace(self.writer) if is_split else DevicePlace(self.writer)
        self.place.run = outer.place.run

    def _refuse(self, op: Operation, reason: str) -> None:
        raise Untraceable(reason)


def _with_part(
    op: train.OfMicrobatches, before: TracedArray | None, x: TracedArray, run: int
) -> TracedArray:  # fmt: skip
    """The value after a microbatch."""
    if isinstance(op, train.AccumulateOp):
        return x if before is None else before + x
    row = x.reshape((1, *x.shape))
    return row if before is None else before.concatenated([row], 0)


def _name(op: Operation) -> str:
    return f"{op.name} {op.callee.data}" if isinstance(op, nn.CustomOp) else op.name


def _sequence(x: Any) -> Sequence[Any]:
    return x if isinstance(x, tuple | list) else [x]


def _braces(parts: Sequence[str]) -> str:
    return f" {{{', '.join(parts)}}}" if parts else ""


def _values(f: FuncOp) -> list[SSAValue]:
    return [*f.body.block.args, *(r for op in f.body.block.ops for r in op.results)]
