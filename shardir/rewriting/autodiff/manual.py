"""Gradients of manual computations: each is another one, the transposed body in the local view.

    %y = dist.manual @ring(%x)
 -> %y, %saved = dist.manual @ring.forward(%x)           the values that the backward part reads
    %d_x = dist.manual @ring.backward(%x, %saved, %d_y)

A saved value that varies over axes is split over them along dimension 0. Values that follow from
operands without computation, and from no operand, are made again.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from xdsl.dialects.builtin import ModuleOp, SymbolRefAttr, TensorType
from xdsl.dialects.func import FuncOp, ReturnOp
from xdsl.ir import Block, BlockArgument, Operation, Region, SSAValue

from shardir.algebra.layout import Layout
from shardir.algebra.mesh import Axes, Axis, Mesh, axes_text
from shardir.algebra.strategy import Strategy
from shardir.compat.xdsl import operands_of
from shardir.diagnostics import Failure
from shardir.dialects import dist
from shardir.dialects.blocks import of_kind, ops_of
from shardir.dialects.dist.manual import ManualOp
from shardir.dialects.nn import BroadcastOp, ConvertOp, ReshapeOp, TransposeOp
from shardir.dialects.nn.base import TensorOp
from shardir.dialects.nn.types import unsharded_type
from shardir.dialects.symbols import find_symbol
from shardir.rewriting.autodiff.activity import Activity
from shardir.rewriting.autodiff.cotangents import (
    Cotangents,
    cotangent_layout,
    cotangent_name,
)
from shardir.rewriting.autodiff.transposition import Transposition
from shardir.rewriting.composites import expand
from shardir.rewriting.copying import copied
from shardir.rewriting.functions import update_signature
from shardir.rewriting.lowering import free_dimensions, lift, lower
from shardir.rewriting.rewriter import Rewriter, erase
from shardir.rewriting.varying import reinterpret
from shardir.syntax.source import warn

FREE = (BroadcastOp, ConvertOp, ReshapeOp, TransposeOp, dist.ReinterpretOp)
"""Ops that the backward part repeats rather than read their results."""


@dataclass(frozen=True)
class ManualGradient:
    """The gradient of a function in the local view.

    Attributes:
        forward: the function with its saved values as further results.
        backward: from the operands `read`, the saved values, and the cotangents of the results
            `seeded`, to the cotangents of the operands `active`.
        saved: the global types of the saved values.
    """

    forward: FuncOp
    backward: FuncOp
    active: tuple[int, ...]
    seeded: tuple[int, ...]
    read: tuple[int, ...]
    saved: tuple[TensorType, ...]


class ManualGradients:
    """The gradients of the manual computations of a function that is differentiated."""

    def __init__(self, module: ModuleOp):
        self.module = module
        self.by_name: dict[str, ManualGradient] = {}
        self._of: dict[tuple[str, tuple[int, ...]], ManualGradient | Failure] = {}
        self._failures: dict[Operation, Failure] = {}

    def save(self, block: Block, activity: Activity) -> None:
        """Let the active manual computations of a forward part have the values as results that
        their gradients read. One without a gradient stays; `of_op` raises its errors."""
        rewriter = Rewriter()
        activity.mark(block.ops)
        for op in of_kind(ops_of(block), ManualOp):
            active = tuple(i for i, v in enumerate(op.operands) if v in activity.active)
            if not any(v in activity.active for v in op.results):
                continue
            gradient = self._gradient(op, active)
            if isinstance(gradient, Failure):
                self._failures[op] = gradient
                continue
            operands, _ = op.cuts
            op.properties["manual_axes"] = self._manual_axes(op, gradient.forward)
            cuts = self._cuts_over_free_axes(op, gradient.forward, operands)[1]
            props = {
                **op.properties, "callee": SymbolRefAttr(gradient.forward.sym_name.data),
                "strategy": dist.StrategyAttr(Strategy(None, tuple(operands), tuple(cuts))),
            }  # fmt: skip
            layout = dist.layout_of(op.results[0])
            types = [
                t if layout is None else dist.laid_out(
                    t.element_type, t.get_shape(), Layout(layout.mesh, axes)
                )
                for t, axes in zip(gradient.saved, cuts[len(op.results) :], strict=True)
            ]  # fmt: skip
            new = rewriter.before(op).copy(
                op, types=[*(v.type for v in op.results), *types], properties=props
            )
            results = new.results[: len(op.results)]
            for v in new.results[len(results) :]:
                v.name_hint = "saved"
            activity.active.update(v for v, old in zip(results, op.results, strict=True)
                                   if old in activity.active)  # fmt: skip
            rewriter.replace(op, results)

    def of_op(
        self, op: ManualOp, b: Rewriter, cotangents: Sequence[SSAValue | None]
    ) -> Sequence[SSAValue | None]:
        """Return the cotangents of the operands of a manual computation.

        Raises:
            Failure: the function has no gradient.
        """
        if op in self._failures:
            raise self._failures[op]
        gradient, (operands, results) = self.by_name[op.callee.string_value()], op.cuts
        n = len(cotangents) - len(gradient.saved)
        seeds = [
            b.zeros(unsharded_type(op.results[i])) if (d := cotangents[i]) is None else d
            for i in gradient.seeded
        ]
        values = [*(op.operands[i] for i in gradient.read), *op.results[n:], *seeds]
        wanted = [*(operands[i] for i in gradient.read), *results[n:],
                  *(results[i] for i in gradient.seeded)]  # fmt: skip
        cuts = self._cuts_over_free_axes(op, gradient.backward, wanted)
        d_operands = b.op(
            ManualOp, *values,
            props={
                "callee": SymbolRefAttr(gradient.backward.sym_name.data),
                "manual_axes": op.manual_axes,
                "strategy": dist.StrategyAttr(Strategy(None, tuple(cuts[0]), tuple(cuts[1]))),
            },
            result=[unsharded_type(op.operands[i]) for i in gradient.active],
        ).results  # fmt: skip
        found: list[SSAValue | None] = [None] * len(op.operands)
        for i, d in zip(gradient.active, d_operands, strict=True):
            d.name_hint = cotangent_name(op.operands[i])
            found[i] = d
        return found

    def _manual_axes(self, op: ManualOp, forward: FuncOp) -> dist.MeshAttr:
        """Return the axes of an op, and those along which its saved values differ: the axes of
        manual computations within its body."""
        used = {name for name, _ in op.manual_axes.data}
        for t in forward.function_type.outputs:
            layout = dist.type_layout(t)
            used.update(a.name for a in (layout.used if layout is not None else ()))
        mesh = _mesh_of(forward, self.module)
        return dist.MeshAttr(tuple((a, n) for a, n in mesh.axes if a in used))

    def _cuts_over_free_axes(
        self, op: ManualOp, f: FuncOp, wanted: Sequence[tuple[Axes, ...]]
    ) -> tuple[list[tuple[Axes, ...]], list[tuple[Axes, ...]]]:
        """Return the axes of the operands and the results of a function of the gradient of an op,
        split over free axes as far as its body allows.

        Args:
            wanted: the axes of the operands.
        """
        mesh, manual = _mesh_of(f, self.module), [name for name, _ in op.manual_axes.data]
        free = free_dimensions(f, mesh)
        for i, d in free.grant(free.borders[0], wanted, manual):
            axes = axes_text(wanted[i][d])
            warn(op, f"the backward part of {op.callee} gathers dimension {d} of its operand {i} "
                     f"over the free axes among {axes}: its body needs it whole")  # fmt: skip
        arguments, results = free.borders
        return [*map(free.cuts, arguments)], [*map(free.cuts, results)]

    def erase_replaced(self, block: Block) -> None:
        """Erase the private functions whose calls now save values. `block`: the body of the
        function, which is not in the module."""
        if not self._of:
            return
        ops = (*self.module.walk(), *block.ops)
        named = {a.string_value() for op in ops
                 for a in op.properties.values() if isinstance(a, SymbolRefAttr)}  # fmt: skip
        for name in dict.fromkeys(name for name, _ in self._of):
            f = find_symbol(self.module, FuncOp, name)
            if f is not None and f.sym_visibility is not None and name not in named:
                erase(f)

    def _gradient(self, op: ManualOp, active: tuple[int, ...]) -> ManualGradient | Failure:
        name = op.callee.string_value()
        if (name, active) not in self._of:
            f = find_symbol(self.module, FuncOp, name)
            assert f is not None
            names = [self._unused_name(f"{name}.{part}") for part in ("forward", "backward")]
            try:
                gradient = differentiate(f, _mesh_of(f, self.module), active, *names)
            except Failure as e:
                self._of[name, active] = e
            else:
                self._of[name, active] = self.by_name[names[0]] = gradient
                self.module.body.block.add_ops([gradient.forward, gradient.backward])
        return self._of[name, active]

    def _unused_name(self, name: str) -> str:
        unused, n = name, 1
        while find_symbol(self.module, FuncOp, unused) is not None:
            n += 1
            unused = f"{name}{n}"
        return unused


def differentiate(
    f: FuncOp, mesh: Mesh, active: tuple[int, ...], forward: str, backward: str
) -> ManualGradient:
    """Return the gradient of a function in the local view.

    Args:
        active: the indices of the arguments with respect to which it is differentiated.
        forward, backward: the names of its functions.

    Raises:
        Failure: an op of the body has no gradient.
    """
    copy = copied(f)
    body = copy.detach_region(copy.body)
    block = body.block
    body.detach_block(block)
    lift(block, mesh)
    expand(block, mesh)
    last = block.last_op
    assert isinstance(last, ReturnOp)
    returned = list(last.operands)
    erase(last)
    ops = ops_of(block)
    b = Rewriter(mesh, block)
    b.location = f.location
    activity, cotangents = Activity(block.args[i] for i in active), Cotangents(b)
    activity.match(ops)
    transposition = Transposition(block, b, activity, cotangents)
    transposition.mark(ops)
    count, seeded = len(block.args), list[int]()
    for i, v in enumerate(returned):
        if v in activity.active:
            layout = cotangent_layout(b.layout(v))
            seed = block.insert_arg(dist.with_layout(unsharded_type(v), layout), len(block.args))
            seed.name_hint = cotangent_name(v)
            cotangents.add(v, [seed])
            seeded.append(i)
    transposition.run(ops)
    b.location = f.location
    d_operands = []
    for i in active:
        arg = block.args[i]
        if (d := cotangents.sum(arg)) is None:
            zeros = b.zeros(unsharded_type(arg), like=arg)
            d = b.redistribute(zeros, cotangent_layout(b.layout(arg)))
        d_operands.append(d)
    parts = _ManualParts(block, mesh, ops, count)
    d_operands = parts.separate(d_operands)
    block.add_op(ReturnOp(*returned, *parts.results))
    parts.block.add_op(ReturnOp(*d_operands))
    return ManualGradient(
        _private(forward, block, f, mesh), _private(backward, parts.block, f, mesh),
        active, tuple(seeded), tuple(parts.read), tuple(parts.saved),
    )  # fmt: skip


def _private(name: str, block: Block, source: FuncOp, mesh: Mesh) -> FuncOp:
    """Return the function of a part of the gradient of `source`, in the local view."""
    lower(block, mesh)
    f = FuncOp(name, ((), ()), Region(block), "private")
    f.location = source.location
    update_signature(f)
    return f


class _ManualParts:
    """The forward and the backward part of a body, in blocks of their own.

    Attributes:
        block: the backward part. Its arguments are operands of the function, then saved values,
            then cotangents.
        read: the indices of these operands.
        results: the saved values in the forward part, as results of the function.
        saved: their global types.
    """

    def __init__(self, forward: Block, mesh: Mesh, ops: Sequence[Operation], count: int):
        """`ops`: of the forward part; `count`: the number of the function's arguments."""
        self.forward, self.mesh, self.ops, self.count = forward, mesh, set(ops), count
        self.block = Block()
        self.read: list[int] = []
        self.results: list[SSAValue] = []
        self.saved: list[TensorType] = []
        self._before, self._after = Rewriter(mesh, forward), Rewriter(mesh, self.block)
        self._values: dict[SSAValue, SSAValue] = {}
        self._repeated = set[SSAValue]()
        self._mark_repeated(ops)

    def separate(self, returned: Sequence[SSAValue]) -> list[SSAValue]:
        """Move the ops of the backward part to its block; return the values that it returns."""
        ops = [op for op in ops_of(self.forward) if op not in self.ops]
        used = {*returned}
        for op in reversed(ops):  # what nothing reads need not be saved for
            if used.isdisjoint(op.results):
                erase(op)
            else:
                used.update(op.operands)
        ops = [op for op in ops if op.parent is not None]
        for op in ops:
            op.detach()
        for arg in self.forward.args[self.count :]:
            self._values[arg] = self._argument(arg, len(self.block.args))
        own = {v for op in ops for v in op.results}
        for v in (*(v for op in ops for v in operands_of(op)), *returned):
            if v not in own:
                self._value(v)
        for op in ops:
            op.operands = [self._values.get(v, v) for v in op.operands]
            self.block.add_op(op)
        for arg in reversed(self.forward.args[self.count :]):
            self.forward.erase_arg(arg)
        return [self._values.get(v, v) for v in returned]

    def _value(self, v: SSAValue) -> SSAValue:
        """Return a value of the forward part in the backward part."""
        if v not in self._values:
            if isinstance(v, BlockArgument):
                self._values[v] = self._argument(v, len(self.read))
                self.read.append(v.index)
            elif v in self._repeated:
                assert isinstance(v.owner, Operation)
                operands = {x: self._value(x) for x in operands_of(v.owner)}
                new = v.owner.clone(dict(operands))
                new.location = v.owner.location
                self.block.add_op(new)
                self._values.update(zip(v.owner.results, new.results, strict=True))
            else:
                self._values[v] = self._save(v)
        return self._values[v]

    def _mark_repeated(self, ops: Sequence[Operation]) -> None:
        """Find the values that the backward part computes again: those that follow from operands by
        free ops, or from no operand without communication."""
        constants = set[SSAValue]()
        self._repeated.update(self.forward.args)
        for op in ops:
            if isinstance(op, (TensorOp, dist.ReinterpretOp)) and constants.issuperset(op.operands):
                constants.update(op.results)
                self._repeated.update(op.results)
            elif isinstance(op, FREE) and self._repeated.issuperset(op.operands):
                self._repeated.update(op.results)

    def _save(self, v: SSAValue) -> SSAValue:
        """Make a value a result of the forward part and an argument of the backward part."""
        layout, t = self._before.layout(v), unsharded_type(v)
        x, split = v, self._whole(layout.partial)
        if split and not layout.dims:
            x = self._before.reshape(v, (1,))
        back = self._before.layout(x)
        result = x
        if split:
            result = reinterpret(self._before, x, back.complete.with_dim(0, split + back.dims[0]))
        result_layout = self._before.layout(result)
        self.results.append(result)
        saved_type = unsharded_type(result)
        self.saved.append(saved_type)
        at = len(self.read) + len(self.results) - 1
        arg = self.block.insert_arg(dist.with_layout(saved_type, result_layout), at)
        arg.name_hint = v.name_hint
        if not split:
            return arg
        return self._after.reshape(reinterpret(self._after, arg, back), t.get_shape())

    def _whole(self, axes: Axes) -> Axes:
        """Return the axes of the mesh of which some axes are sub-axes."""
        return self.mesh.union(tuple(dict.fromkeys(Axis(a.name) for a in axes)), ())

    def _argument(self, v: SSAValue, at: int) -> SSAValue:
        arg = self.block.insert_arg(v.type, at)
        arg.name_hint = v.name_hint
        return arg


def _mesh_of(f: FuncOp, module: ModuleOp) -> Mesh:
    types = (*f.function_type.inputs, *f.function_type.outputs)
    name = next(l.mesh for t in types if (l := dist.type_layout(t)) is not None)
    return dist.meshes_of(module)[name]
