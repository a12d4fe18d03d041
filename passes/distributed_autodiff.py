"""distributed-autodiff: what `train.step` and `train.gradient` name -> a function with its backward
part.

    train.step @step of @loss <sgd, lr = 0.1>
 -> func.func @step(%x, %w) -> (loss, new %w) {
      forward part of @loss
      train.backward
      %d_w = ...                    cotangents, laid out
      %w_1 = train.sgd %w, %d_w
    }

It works on the plain program, on the laid-out one, before or after insert-redistributions, and on
one of the local view, whose collectives stay as they are. Where some values have layouts and some
have none, these stay what they are, pins for search-strategies, and the rest is plain.

1. A cotangent's layout is not chosen: it follows from the factors of the op that makes it, partial
   over each axis that splits a factor which the operand does not have.
2. Contributions to one cotangent are added while partial, and reduced once, where an op uses them,
   to the layout of the primal value. Through an op that passes partial sums on (a transpose, a
   cast that says so) they go as they are, if that makes them no larger.
3. A redistribution hands the cotangent of its result on as that of its operand, in whatever layout
   it is: an all-gather pairs with a reduce-scatter or a slice, an all-to-all with its reverse, the
   sum that ends a partial value with nothing.
   A barrier does so where layouts are decided; before, the cotangent has one the other way round.
4. The redistribution of a parameter's gradient has the parameter's `train.fusion` index.
5. Of a composite its parts are differentiated.
6. With `accumulate` the function stands once for each microbatch, forward and backward; what no
   input decides is calculated once. Contributions of all microbatches to one gradient are added
   before they are reduced.
7. A private function that is differentiated is consumed; a public one stays.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from xdsl.context import Context
from xdsl.dialects.builtin import (
    AnyFloat,
    ArrayAttr,
    DictionaryAttr,
    FunctionType,
    ModuleOp,
    TensorType,
)
from xdsl.dialects.func import CallOp, FuncOp, ReturnOp
from xdsl.ir import Attribute, Block, Operation, Region, SSAValue
from xdsl.passes import ModulePass

from shardir.algebra.errors import ShardirError
from shardir.algebra.layout import Layout
from shardir.algebra.redistribution import seconds
from shardir.analysis.functions import is_laid_out, is_local_body, mesh_of, name_of
from shardir.dialects.dist import (
    SAME_VALUE,
    AllGatherOp,
    AllReduceOp,
    AllSliceOp,
    AllToAllOp,
    Collective,
    ExchangeOp,
    HaloUnfoldOp,
    PermuteOp,
    PropagationBarrierOp,
    RecvOp,
    RedistributeOp,
    ReduceScatterOp,
    WaitOp,
    WindowsOp,
    layout_of,
    mail,
    with_layout,
)
from shardir.dialects.nn import StopGradientOp
from shardir.dialects.nn.base import Composite, TensorOp, plain
from shardir.dialects.train import (
    Argument,
    BackwardOp,
    GradientOp,
    MicrobatchOp,
    Role,
    StepOp,
    UpdateOp,
    arg_attrs,
    in_microbatch,
    mark_step,
    result_attrs,
    set_arg_attrs,
    updated_arguments,
    updates_attrs,
)
from shardir.passes.train_step import TrainStep
from shardir.rewriting.composites import expand
from shardir.rewriting.lowering import lift, lower
from shardir.rewriting.rewriter import Rewriter, erase, set_type
from shardir.syntax.diagnostics import Failure, warn


@dataclass(frozen=True)
class DistributedAutodiff(ModulePass):
    """Differentiates functions, laid out or not, and adds the optimizer's updates."""

    name = "distributed-autodiff"

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        faults: list[tuple[Operation | None, str]] = []
        wanted = in_order([o for o in op.body.ops if isinstance(o, StepOp | GradientOp)])
        uses = [o.function.root_reference.data for o in wanted]
        for request in wanted:
            uses.remove(request.function.root_reference.data)
            if isinstance(request, GradientOp) and request.maker() is not None:
                continue  # what it is to be made of could not be made
            source = request.find()
            private = source.sym_visibility is not None and source.sym_visibility.data == "private"
            consumed = private and name_of(source) not in uses and not _called(op, source)
            try:
                made = _Differentiation(request, source, op, consumed).run()
            except Failure as e:
                faults += e.faults
                continue
            op.body.block.insert_op_before(made, request)
            erase(request)
            if consumed:
                erase(source)
        if faults:
            raise Failure(faults)


def in_order(requests: Sequence[StepOp | GradientOp]) -> list[StepOp | GradientOp]:
    """The requests, each behind the one that makes the function it is of."""
    found: dict[StepOp | GradientOp, None] = {}
    for request in requests:
        chain = [request]
        while isinstance(last := chain[-1], GradientOp) and (maker := last.maker()) is not None:
            if maker in chain:
                raise Failure([(request, f"[G1] @{request.sym_name.data} is to be made of itself")])
            chain.append(maker)
        found.update(dict.fromkeys(reversed(chain)))
    return list(found)


def _called(module: ModuleOp, f: FuncOp) -> bool:
    return any(
        isinstance(op, CallOp) and op.callee.root_reference.data == name_of(f)
        for g in module.body.ops
        if isinstance(g, FuncOp)
        for op in g.walk()
    )


class _Differentiation:
    """One function and its gradient, in one new function."""

    def __init__(
        self, request: StepOp | GradientOp, source: FuncOp, module: ModuleOp, consumed: bool
    ):
        self.request, self.source = request, source
        mesh = mesh_of(source, module)
        self.attrs = arg_attrs(source)
        self.marks = result_attrs(source)
        is_step = isinstance(request, StepOp)
        self.updated = updated_arguments(source) if is_step else [None] * len(self.marks)
        """Per result, the state that it is the new value of: no part of a step's loss."""
        region = source.body.clone() if not consumed else source.detach_region(source.body)
        if consumed:
            source.add_region(Region(Block(arg_types=source.function_type.inputs)))
        self.block = region.block
        self.region = region
        for op in list(self.block.ops):
            if isinstance(op, BackwardOp):
                erase(op)  # of a gradient: all of it is forward part now
        self.local: dict[SSAValue, Attribute] = {}
        """The types of the values of a function in the local view."""
        if mesh is not None and is_local_body(self.block):
            self.local = lift(self.block, mesh)
        laid = mesh if mesh is not None and is_laid_out(self.block) else None
        for op in self.block.ops:
            if laid is None and isinstance(op, Composite) and op.strategy is not None:
                warn(op, f"the strategy of {op.name} is lost: its parts are differentiated before "
                     "propagate-strategies could read it")  # fmt: skip
        expand(self.block, laid)
        self.builder = Rewriter(laid, self.block)
        self.contributions: dict[SSAValue, list[SSAValue]] = {}
        self.varying: set[SSAValue] = set()
        self.step: TrainStep | None = None
        self.losses: list[SSAValue] = []  # of several microbatches

    def run(self) -> FuncOp:
        last = self.block.last_op
        assert isinstance(last, ReturnOp)
        self.returned = list(last.operands)
        erase(last)
        forward = list(self.block.ops)
        self.sent = mail(forward)
        self.builder.location = self.request.location
        n = len(self.block.args)
        if isinstance(self.request, StepOp):
            wrt = [i for i, a in enumerate(self.attrs) if Argument.of(a).role is Role.PARAMETER]
        else:
            wrt = list(self.request.wrt.data)
        self._check(wrt)
        self.varying.update(self.block.args[i] for i in wrt)
        if isinstance(self.request, StepOp):
            self.step = TrainStep(self.request, self.builder, self.block, self.attrs)
        if self.step is not None and self.step.count > 1:
            self.microbatches(forward, self.step)
        else:
            self.differentiate(forward)
        gradients = {i: self.gradient_of(i) for i in wrt if i < n}
        self.builder.location = self.request.location
        if self.step is not None:
            results, marks = self.update(self.step, gradients)
        else:
            results = [*self.returned, *(self.or_zero(i, g) for i, g in gradients.items())]
            marks = [{} for _ in results]
        self.block.add_op(ReturnOp(*results))
        self.sweep()
        if self.local:
            assert self.builder.mesh is not None
            lower(self.block, self.builder.mesh)
            for v, t in self.local.items():
                set_type(v, t)
        return self.function(marks)

    def differentiate(self, forward: Sequence[Operation]) -> None:
        """The backward part of a forward part that stands at the block's end."""
        self.block.add_op(BackwardOp.create(location=self.request.location))
        self.mark(forward)
        self.seed()
        self.backward(forward)

    # ---- several microbatches ----

    def microbatches(self, forward: Sequence[Operation], step: TrainStep) -> None:
        """The function several times, each on inputs of its own; a state that it updates goes from
        one to the next."""
        args = self.block.args
        inputs = [i for i, a in enumerate(self.attrs) if not Argument.of(a).is_retained]
        updated = [i for i in self.updated if i is not None]
        own = self.dependent(forward, [args[i] for i in (*inputs, *updated)])
        mine = set(own)
        shared = [op for op in forward if op not in mine]
        self.mark(shared)
        kept = {*args, *(v for op in shared for v in op.results)}
        for i in inputs:
            self.attrs[i] = in_microbatch(self.attrs[i], 0)
        first, loss = self.returned, self.updated.index(None)
        losses = [first[loss]]
        self.differentiate(own)
        for k in range(1, step.count):
            self.fold(kept)
            self.block.add_op(MicrobatchOp.create(location=self.request.location))
            values: dict[SSAValue, SSAValue] = {args[i]: self.input(i, k) for i in inputs}
            for i, v in zip(self.updated, self.returned, strict=True):
                if i is not None:
                    values[args[i]] = step.becomes(args[i], v)
            ops = [op.clone(values) for op in own]
            self.sent |= mail(ops)
            for old, op in zip(own, ops, strict=True):
                op.location = old.location
                self.block.add_op(op)
            self.returned = [values.get(v, v) for v in first]
            losses.append(self.returned[loss])
            self.differentiate(ops)
        self.fold(kept)
        self.backward(shared)
        self.losses = losses

    def dependent(self, ops: Sequence[Operation], inputs: Sequence[SSAValue]) -> list[Operation]:
        """The ops that calculate with any of these values."""
        reached, found = set(inputs), []
        for op in ops:
            if any(v in reached for v in self.taken(op)):
                reached.update(op.results)
                found.append(op)
        return found

    def input(self, i: int, k: int) -> SSAValue:
        """Input i of microbatch k."""
        first = self.block.args[i]
        arg = self.block.insert_arg(first.type, len(self.block.args))
        arg.name_hint = f"{first.name_hint or 'input'}_batch{k}"  # xDSL drops a mere _1
        self.attrs.append(in_microbatch(self.attrs[i], k))
        return arg

    def fold(self, values: set[SSAValue]) -> None:
        """Add up the contributions to these values, so that no more than one of a layout lives."""
        for v in [v for v in self.contributions if v in values]:
            self.contributions[v] = self.by_layout(v)

    def _check(self, wrt: Sequence[int]) -> None:
        for i in wrt:
            t = self.block.args[i].type
            if not (isinstance(t, TensorType) and isinstance(t.element_type, AnyFloat)):
                raise Failure(
                    [(self.request, f"argument {i} of @{name_of(self.source)} is {t}: "
                      "only float tensors have a gradient")]
                )  # fmt: skip

    # ---- which values depend on what is differentiated ----

    def mark(self, forward: Sequence[Operation]) -> None:
        for op in forward:
            through = not isinstance(op, StopGradientOp)
            if through and any(v in self.varying for v in self.taken(op)):
                self.varying.update(v for v in op.results if is_float(v))
            if self.builder.mesh is not None and isinstance(op, RELOCATIONS):
                for v, out in self.moved(op) or ():
                    self.builder.known(v, out)

    def taken(self, op: Operation) -> Sequence[SSAValue]:
        """What an op calculates with; of a recv, what was sent."""
        return [self.sent[op].value] if isinstance(op, RecvOp) and op in self.sent else op.operands

    def moved(self, op: Operation) -> list[tuple[SSAValue, SSAValue]] | None:
        """What communication takes and gives, value by value; None of any other op."""
        if isinstance(op, SAME_VALUE):
            return [(op.value, op.out)]
        if isinstance(op, Collective | WaitOp):
            return list(zip(op.values, op.outs, strict=True))
        if isinstance(op, RecvOp) and op in self.sent:
            return [(self.sent[op].value, op.out)]
        return None

    def seed(self) -> None:
        """The cotangents of what is returned: 1 for a scalar, an argument for anything else."""
        for v, state in zip(list(self.returned), self.updated, strict=True):
            if not is_float(v) or state is not None:
                continue
            if plain(v).get_shape() == ():
                if v in self.varying:
                    element = plain(v).element_type
                    step = self.step
                    one = step.seed(element) if step else self.builder.constant(1.0, element)
                    self.contributions.setdefault(v, []).append(one)
                if isinstance(self.request, StepOp):
                    continue
            else:
                layout = layout_of(v)
                complete = with_layout(plain(v), layout.complete if layout is not None else None)
                arg = self.block.insert_arg(complete, len(self.block.args))
                arg.name_hint = f"d_{v.name_hint or 'result'}"
                self.attrs.append({})
                self.contributions.setdefault(v, []).append(arg)

    # ---- backward ----

    def backward(self, forward: Sequence[Operation]) -> None:
        faults: list[tuple[Operation | None, str]] = []
        for op in reversed(forward):
            if not any(v in self.varying and v in self.contributions for v in op.results):
                continue
            self.builder.location = op.location
            try:
                if (moved := self.moved(op)) is not None:
                    for v, out in moved:
                        if v in self.varying and out in self.contributions:
                            self.contributions.setdefault(v, []).extend(self.back(op, v, out))
                    continue
                if not isinstance(op, TensorOp):
                    raise ShardirError(f"[G8] {op.name} can't be differentiated")
                late = self.reduces_late(op)
                cotangents = [self.cotangent(v, late) for v in op.results]
                found = op.gradient(self.builder, *cotangents)
            except ShardirError as e:
                faults.append((op, str(e)))
                continue
            for v, d in zip(op.operands, found, strict=True):
                if d is not None and v in self.varying:
                    if d.name_hint is None and v.name_hint is not None:
                        d.name_hint = f"d_{v.name_hint}"
                    self.contributions.setdefault(v, []).append(d)
        if faults:
            raise Failure(faults)

    def back(self, op: Operation, v: SSAValue, out: SSAValue) -> list[SSAValue]:
        """The contributions to the cotangent of what `op` moved, from those of what came out.

        Raises:
            ShardirError: no layout says what it is.
        """
        mesh = self.builder.mesh
        if mesh is None:  # layouts are still to be decided
            if isinstance(op, PropagationBarrierOp):
                return self.reversed(op, v, out)
        elif isinstance(op, RecvOp):
            op.check_keeps(v, mesh)
        elif isinstance(op, PermuteOp) and not op.keeps(v, mesh):
            return self.reversed(op, v, out)
        elif isinstance(op, WindowsOp):
            cotangent, b = self.cotangent(out), self.builder
            assert cotangent is not None
            back = b.fold if isinstance(op, HaloUnfoldOp) else b.unfold
            return [back(cotangent, op.dim.value.data, op.windows(v, out, mesh))]
        elif isinstance(op, Collective):
            op.keeps(v, mesh)
        return self.contributions.pop(out)

    def reversed(
        self, op: PermuteOp | PropagationBarrierOp, v: SSAValue, out: SSAValue
    ) -> list[SSAValue]:
        """What comes back to `v` through an op that has a reverse."""
        cotangent = self.cotangent(out)
        assert cotangent is not None
        new = op.reversed(cotangent)
        new.results[0].name_hint = f"d_{v.name_hint}" if v.name_hint else None
        self.block.add_op(new)
        return list(new.results)

    def reduces_late(self, op: TensorOp) -> bool:
        """Whether an op takes the cotangent of its result while partial: it is linear, nothing
        else uses the cotangent, and what it makes of it is no larger. So what comes back through
        several reshapes of one value is added before it is reduced."""
        varying = [v for v in op.operands if v in self.varying]
        return (
            len(varying) == 1
            and bool(op.factors().linear)
            and prod(plain(varying[0]).get_shape()) <= prod(plain(op.results[0]).get_shape())
        )

    def cotangent(self, v: SSAValue, late: bool = False) -> SSAValue | None:
        """The sum of the contributions, in the primal's layout; `late`: perhaps partial."""
        if v not in self.contributions:
            return None
        total = self.total(v)
        layout = layout_of(v)
        if self.builder.mesh is None or layout is None:
            return total
        if late and self.builder.layout(total).complete == layout.complete:
            return total
        return self.builder.redistribute(total, layout.complete)

    def total(self, v: SSAValue) -> SSAValue:
        """The sum of the contributions; those of one layout first, still partial."""
        totals = self.by_layout(v)
        if len(totals) > 1:
            layout = self.meeting(v, totals)
            totals = [self.builder.redistribute(t, layout) for t in totals]
        total = totals[0]
        for t in totals[1:]:
            total = self.builder.add(total, t)
        if total.name_hint is None and v.name_hint is not None:
            total.name_hint = f"d_{v.name_hint}"
        return total

    def meeting(self, v: SSAValue, totals: Sequence[SSAValue]) -> Layout:
        """The layout in which contributions of several layouts are added: that of the primal or of
        one of them, whichever moves least until the sum is where the primal is."""
        b, end, shape = self.builder, self.builder.layout(v).complete, plain(v).get_shape()
        assert b.mesh is not None
        mesh = b.mesh

        def cost(layout: Layout) -> tuple[float, float]:
            moves = [*(b.seconds(t, layout) for t in totals), seconds(shape, mesh, layout, end)]
            return sum(n for n, _ in moves), sum(n for _, n in moves)

        return min((end, *map(b.layout, totals)), key=cost)

    def by_layout(self, v: SSAValue) -> list[SSAValue]:
        """The contributions to v, those of one layout added up."""
        found: dict[object, SSAValue] = {}
        for d in self.contributions.pop(v):
            key = layout_of(d)
            if key in found:
                found[key] = self.builder.add(found[key], d)
                found[key].name_hint = f"d_{v.name_hint}" if v.name_hint else None
            else:
                found[key] = d
        return list(found.values())

    def gradient_of(self, i: int) -> SSAValue | None:
        """The gradient of argument i, to be communicated with those of its `train.fusion`."""
        gradient = self.cotangent(self.block.args[i])
        moved = gradient.owner if gradient is not None else None
        index = Argument.of(self.attrs[i]).fusion
        if isinstance(moved, RedistributeOp) and index is not None:
            moved.properties["fusion"] = index
        return gradient

    def or_zero(self, i: int, gradient: SSAValue | None) -> SSAValue:
        """The gradient of argument i; zeros where nothing depends on it."""
        if gradient is not None:
            return gradient
        arg = self.block.args[i]
        t = plain(arg)
        zeros = self.builder.zeros(t, like=arg)
        layout = layout_of(arg)
        return zeros if layout is None else self.builder.redistribute(zeros, layout)

    def update(
        self, step: TrainStep, gradients: dict[int, SSAValue | None]
    ) -> tuple[list[SSAValue], list[dict[str, Attribute]]]:
        """What a step returns, and the marks of it."""
        if self.losses:
            self.returned[self.updated.index(None)] = step.loss(self.losses)
        self.block.add_op(UpdateOp.create(location=self.request.location))
        updates = step.update(gradients)
        results = [
            v if state is None else step.becomes(self.block.args[state], v)
            for v, state in zip(self.returned, self.updated, strict=True)
        ]
        marks = [*self.marks, *(updates_attrs(key) for _, key in updates)]
        return [*results, *(v for v, _ in updates)], marks

    # ---- the function ----

    def sweep(self) -> None:
        """Remove backward ops whose results nobody uses, such as the cotangents of inputs."""
        op = self.block.last_op
        first = next(op for op in self.block.ops if isinstance(op, BackwardOp))
        while op is not None and op is not first:
            before = op.prev_op
            if op.results and all(v.first_use is None for v in op.results):
                erase(op)
            op = before

    def function(self, marks: list[dict[str, Attribute]]) -> FuncOp:
        end = self.block.last_op
        assert isinstance(end, ReturnOp)
        self.region.detach_block(self.block) if self.region.parent is None else None
        region = Region(self.block)
        f = FuncOp(
            self.request.sym_name.data,
            FunctionType.from_lists(
                [a.type for a in self.block.args], [v.type for v in end.operands]
            ),
            region,
        )
        f.location = self.request.location
        if any(self.attrs):
            set_arg_attrs(f, self.attrs)
        if any(marks):
            f.properties["res_attrs"] = ArrayAttr(DictionaryAttr(m) for m in marks)
        if isinstance(self.request, StepOp):
            mark_step(f)
        return f


RELOCATIONS = (
    *SAME_VALUE, WaitOp, AllReduceOp, ReduceScatterOp, AllGatherOp, AllSliceOp, AllToAllOp,
    ExchangeOp,
)  # fmt: skip
"""What gives the same whole value in another layout, whatever single devices hold."""


def is_float(v: SSAValue) -> bool:
    """Whether cotangents go through the value."""
    return isinstance(v.type, TensorType) and isinstance(v.type.element_type, AnyFloat)
