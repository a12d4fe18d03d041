"""Means over tokens: denominators that depend on inputs, such as a number of labels that count.

    accumulate <mean>      mean of  sum(x_k) / n_k            a mean of means
    accumulate <tokens>    mean of  sum(x_k) / mean of all n  = sum of sum(x_k) / sum of n_k

The denominators of all microbatches are added up before the loop, from the inputs, which have
microbatches in dimension 0. So the loop, its gradients and its sums are those of a mean. A
microbatch without tokens adds 0.

    %counts = nn.compare <ne> %labels, %ignored     : tensor<4x8xi64>, before the loop
    %n = nn.reduce <sum> %counts dims <0, 1>
    %mean_n = nn.mul %n, %quarter
    train.microbatches 4
    %loss = nn.div %total, %mean_n

1. A denominator is one element, made of sums or means over all that inputs have by ops on one
   element, such as `clamp(min=1)`; or a scalar that is an input. It divides a sum if it is made of
   sums, a mean if of means; or many elements, such as weights that are normalised.
2. From the quotient to the loss, or to a metric, ops are linear. A quotient of many elements that
   passes through any other op is no mean, such as data that is normalised.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from string import ascii_letters

from xdsl.dialects.builtin import (
    AnyFloat,
    BFloat16Type,
    Float16Type,
    IntegerAttr,
    TensorType,
    f32,
)
from xdsl.dialects.func import FuncOp, ReturnOp
from xdsl.ir import Attribute, Operation, SSAValue

from shardir.analysis.functions import named
from shardir.diagnostics import Failure, Located, coded
from shardir.dialects import nn
from shardir.dialects.blocks import ops_of
from shardir.dialects.dist import RedistributeOp, layout_of, tensor
from shardir.dialects.nn.base import Props, TensorOp
from shardir.dialects.nn.elementwise import Elementwise
from shardir.dialects.nn.properties import axis_of, dims_attr, dims_of, int_attr
from shardir.dialects.nn.types import unsharded_type
from shardir.dialects.train import (
    Role,
    arguments,
    gradient_arguments,
    updated_arguments,
    weighed_by,
    weighing_attrs,
)
from shardir.rewriting.autodiff.activity import Activity, relocates
from shardir.rewriting.rewriter import Rewriter
from shardir.syntax.source import warn

SUMS = ("sum", "mean")
"""The reductions that a denominator is made of."""


@dataclass(frozen=True)
class TokenMean:
    """A division by a number of tokens.

    Attributes:
        op: the division; `divisor`: the index of the operand.
        number: the denominator, one element, which `path` repeats for the division, last op first.
        problem: the error for which the denominators of all microbatches can't be used, if any.
        is_mean: whether the loss or a metric is linear in the quotient.
    """

    op: Operation
    divisor: int
    number: SSAValue
    path: Sequence[Operation]
    problem: Located | None = None
    is_mean: bool = False

    @property
    def reader(self) -> Operation:
        """The op that reads the denominator."""
        return self.path[-1] if self.path else self.op


class TokenMeans:
    """The means over tokens among the ops of a microbatch."""

    def __init__(
        self, shared: Sequence[Operation], ops: Sequence[Operation], inputs: Sequence[SSAValue],
        learned: Sequence[SSAValue], targets: Sequence[SSAValue], others: Sequence[SSAValue],
    ):  # fmt: skip
        """
        Args:
            shared: the ops before the loop.
            inputs: what a microbatch reads of the inputs.
            learned: parameters, and states that change between microbatches.
            targets: the loss, metrics, and gradients that the ops make; `others`: other results.
        """
        self.every, self.inputs = ops, {*inputs}
        self.ops = [op for op in ops if op.results]
        self.targets, self.others = targets, others
        self.counted, self.learned = _dependent(ops, inputs), _dependent([*shared, *ops], learned)

    def find(self) -> Iterator[TokenMean]:
        """Yield the divisions by numbers of tokens."""
        for op in self.ops:
            divisor = 1 if isinstance(op, nn.DivOp) else 0
            if not isinstance(op, nn.DivOp | nn.ReciprocalOp):
                continue
            number, path = op.operands[divisor], list[Operation]()
            while _size(number) > 1:
                x = number.owner.x if isinstance(number.owner, nn.BroadcastOp) else _moved(number)
                if x is None or not isinstance(number.owner, Operation):
                    break
                path.append(number.owner)
                number = x
            if _size(number) == 1 and (parts := self.parts_of(number)):
                kinds = kinds_of(parts)
                if kinds or self._numerators(op) == {"sum"}:  # else a factor, such as a temperature
                    yield from self._mean(TokenMean(op, divisor, number, path), kinds)

    def _mean(self, found: TokenMean, kinds: set[str]) -> Iterator[TokenMean]:
        """Yield a division with its problem, if a mean over tokens can be meant."""
        reached, blocker = self._reached(found.op)
        is_mean = not reached.isdisjoint(self.targets)
        blocked = [] if blocker is None else [v for v in blocker.operands if v in reached]
        if not is_mean and not any(map(_is_scalar, blocked)):
            return
        problem, use = self._problem(found, kinds), "write <mean>, for a mean of losses as they are"
        is_mean &= problem is None
        if problem is None and blocker is not None:
            message = f"a loss and metrics that are linear in means over tokens, got {blocker.name}"
            problem, use = (blocker, message), "return the mean itself"
        elif problem is None and not reached.isdisjoint(self.others):
            name = named(found.op.results[0])
            message = f"no state or other result that depends on a mean over tokens, got {name}"
            problem, use = (found.op, message), "return it as a metric"
        error = problem and (problem[0], coded("G17", f"expected {problem[1]}", use))
        yield replace(found, problem=error, is_mean=is_mean)

    def _problem(self, found: TokenMean, kinds: set[str]) -> tuple[Operation, str] | None:
        """Return the op for which a division is no mean over tokens of all microbatches, and why;
        `kinds`: those of the sums of the denominator."""
        if found.number in self.learned:
            name = named(found.number)
            return (
                found.op,
                f"a denominator of inputs alone, got {name}, which is learned or a state",
            )
        numerators = self._numerators(found.op)
        if len(kinds) > 1 or (kinds and numerators - kinds):
            of = [" and a ".join(sorted(k)) for k in (numerators, kinds)]
            return (
                found.op,
                f"the quotient of two sums, or of two means, got a {of[0]} by a {of[1]}",
            )
        for op in self._scalars(found.op):
            own = {v for v in op.operands if v in self.counted or v in self.learned}
            if own and kind_of_sum(op.results[0]) is None and not _is_linear(op, own):
                return op, f"a numerator that is linear in sums, got {op.name}"
        return None

    def weights(self, returned: Sequence[SSAValue]) -> dict[int, TokenMean | None]:
        """Return a mean with the number of tokens of each result that is one over tokens, by the
        index of the result; None where it is something else made of such means."""
        found = [mean for mean in self.find() if mean.is_mean]
        reached, weights = [self.reached(mean.op) for mean in found], {}
        for i, v in enumerate(returned):
            of = [mean for mean, values in zip(found, reached, strict=True)
                  if v in self.targets and v in values]  # fmt: skip
            if of:
                alone = len({mean.number for mean in of}) == 1
                is_one = alone and v in self._multiples([mean.op for mean in of])
                weights[i] = of[0] if is_one else None
        return weights

    def _multiples(self, divisions: Sequence[Operation]) -> set[SSAValue]:
        """Return the values that are linear in quotients, with nothing added to them."""
        found: set[SSAValue] = {v for op in divisions for v in op.results}
        for op in self.ops:
            inside = [v in found for v in op.operands]
            if any(inside) and _is_linear(op, found):
                adds = isinstance(op, nn.AddOp | nn.SubOp | nn.SelectOp | nn.ConcatOp | nn.StackOp)
                if not adds or all(inside[isinstance(op, nn.SelectOp) :]):
                    found.update(op.results)
        return found

    def parts_of(self, number: SSAValue) -> list[SSAValue]:
        """Return the values from which a number of one element is made, in order: sums, scalars
        that are inputs, and what ops make of these; nothing if it is made otherwise."""
        found: dict[SSAValue, None] = {}

        def visit(v: SSAValue) -> bool:
            if v not in self.counted or v in found:
                return True
            if not self.is_sum(v) and not (
                isinstance(v.owner, Operation)
                and v not in self.inputs
                and all(_size(x) == 1 and visit(x) for x in v.owner.operands if x in self.counted)
            ):
                return False
            found[v] = None
            return True

        return [*found] if visit(number) else []

    def is_sum(self, v: SSAValue) -> bool:
        """Whether a value is a sum or a mean, or a scalar that is an input."""
        return (v in self.inputs and _is_scalar(v)) or kind_of_sum(v) is not None

    def reached(self, division: Operation) -> set[SSAValue]:
        """Return the values that are linear in a quotient."""
        return self._reached(division)[0]

    def _reached(self, division: Operation) -> tuple[set[SSAValue], Operation | None]:
        """Return the values that are linear in a quotient, and the first op that is not."""
        reached: set[SSAValue] = {*division.results}
        blocker: Operation | None = None
        for op in self.ops[self.ops.index(division) + 1 :]:
            if reached.isdisjoint(op.operands):
                continue
            if _is_linear(op, reached):
                reached |= _dependent([op], [*reached.intersection(op.operands)])
            else:
                blocker = blocker or op
        return reached, blocker

    def _scalars(self, division: Operation) -> Iterator[Operation]:
        """Yield the ops that make a numerator that is a scalar: down to sums, with these."""
        ahead = [division.operands[0]] if isinstance(division, nn.DivOp) else []
        seen: set[SSAValue] = set()
        while ahead:
            v = ahead.pop()
            op = v.owner
            if v in seen or not _is_scalar(v) or not isinstance(op, Operation):
                continue
            seen.add(v)
            if v not in self.counted and v not in self.learned:
                continue
            yield op
            if kind_of_sum(v) is None:
                ahead += op.operands

    def _numerators(self, division: Operation) -> set[str]:
        """Return the kinds of the sums of a numerator that is a scalar."""
        return kinds_of([op.results[0] for op in self._scalars(division)])


def kind_of_sum(v: SSAValue) -> str | None:
    """Return "sum" or "mean" of a value that is that of all elements, those of a row among others:
    dimension 0 counts rows. None of any other."""
    op = v.owner
    if isinstance(op, nn.ReduceOp) and op.kind.data in SUMS and 0 in op.where()[0]:
        return op.kind.data
    if isinstance(op, nn.Contraction):
        x, y, z = op.letters
        return "sum" if {x[:1], y[:1]} - {"", *z} else None
    return None


def kinds_of(parts: Sequence[SSAValue]) -> set[str]:
    """Return the kinds of the sums and means among values."""
    return {kind for v in parts if (kind := kind_of_sum(v)) is not None}


def weigh(
    at: Operation, means: TokenMeans, returned: Sequence[SSAValue], in_stages: bool = False
) -> None:  # fmt: skip
    """Mark the numbers of tokens of the results of a function or request, for means of these over
    several batches. Warn of a result that has none: it is made of several means, or in stages."""
    for i, mean in means.weights(returned).items():
        if mean is not None and not in_stages:
            mean.reader.attributes.update(weighing_attrs(i))
            continue
        name = named(returned[i])
        if in_stages:
            found = f"expected {name}, a mean over tokens, outside of stages, got it in stages"
            use = "evaluate it without stages"
        else:
            found = f"expected {name} to be one mean over tokens, got more than one"
            use = "return them apart"
        warn(at, f"{found}: over several batches it is a mean by their rows; {use}")


def means_of(f: FuncOp) -> TokenMeans:
    """Return the means over tokens of a function, whose composites are decomposed."""
    block = f.body.block
    last, roles = block.last_op, arguments(f)
    assert isinstance(last, ReturnOp)
    pairs = list(zip(last.operands, updated_arguments(f), strict=True))
    changed = {i for _, i in pairs if i is not None}
    gradients = {v for v, i in zip(last.operands, gradient_arguments(f), strict=True)
                 if i is not None}  # fmt: skip
    args = list(zip(block.args, roles, strict=True))
    return TokenMeans(
        [], ops_of(block), [v for v, a in args if a.role is Role.INPUT],
        [v for i, (v, a) in enumerate(args) if a.role is Role.PARAMETER or i in changed],
        [v for v, i in pairs if v in gradients or (i is None and _is_scalar(v))],
        [v for v, i in pairs if i is not None],
    )  # fmt: skip


def _dependent(ops: Sequence[Operation], values: Sequence[SSAValue]) -> set[SSAValue]:
    """Return these values, and all that ops make of them."""
    found = {*values}
    for op in ops:
        if not found.isdisjoint(op.operands):
            found.update(v for v in op.results if (x := _moved(v)) is None or x in found)
    return found


def _moved(v: SSAValue) -> SSAValue | None:
    """Return the value that an op brings to another layout; None of a value that is made
    otherwise."""
    op = v.owner
    if not isinstance(op, Operation) or not relocates(op):
        return None
    pairs = Activity(()).communicated(op) or []
    return next(x for x, out in pairs if out is v)


def _is_linear(op: Operation, of: set[SSAValue]) -> bool:
    """Whether the results of an op are linear in those of its operands that are in a set, or the
    sum of that and others."""
    if relocates(op):
        return True
    if not isinstance(op, TensorOp):
        return False
    inside = [v in of for v in op.operands]
    if isinstance(op, nn.DivOp):
        return not inside[1]
    if isinstance(op, nn.SelectOp):
        return not inside[0]
    if isinstance(op, nn.ConvertOp):
        return isinstance(unsharded_type(op.out).element_type, AnyFloat)
    if op.MULTILINEAR:
        return sum(inside) == 1
    return bool(op.factors().linear)


def _is_scalar(v: SSAValue) -> bool:
    return isinstance(v.type, TensorType) and not unsharded_type(v).get_shape()


def _size(v: SSAValue) -> int:
    """The number of elements; 2 for a value that is no tensor."""
    return prod(unsharded_type(v).get_shape()) if isinstance(v.type, TensorType) else 2


class Denominators:
    """The denominators of all microbatches, made before their loop."""

    def __init__(
        self, b: Rewriter, means: TokenMeans, stacked: Mapping[SSAValue, SSAValue], count: int
    ):  # fmt: skip
        """`b`: inserts before the loop; `stacked`: for what a microbatch reads of an input the
        input; `count`: the number of microbatches."""
        self.b, self.means, self.count = b, means, count
        self._stacked, self._totals = dict(stacked), dict[SSAValue, SSAValue]()

    def mean(self, of: TokenMean) -> SSAValue:
        """Return the mean of a denominator over all microbatches."""
        number = of.number
        parts = self.means.parts_of(number)
        kind = "mean" if "mean" in kinds_of(parts) else "sum"
        for v in parts:
            if v not in self._totals:
                total = self.total(v, kind) if self.means.is_sum(v) else self._of_totals(v)
                self._totals[v] = self.b.reshape(total, unsharded_type(v).get_shape())
        found = self.b.complete(self._totals[number])
        if kind == "sum":
            found = self.b.scale(found, 1 / self.count)
        found = self.b.convert(found, unsharded_type(number).element_type)
        found.name_hint = number.name_hint or "tokens"
        return found

    def _of_totals(self, v: SSAValue) -> SSAValue:
        """Return what ops make of totals: in f32 where it is narrower, which may not hold them."""
        op, b = v.owner, self.b
        if (x := _moved(v)) is not None:
            return self._totals[x]
        assert isinstance(op, Operation)
        if not isinstance(op, TensorOp) or len(op.results) > 1:
            raise self._not_ahead(op)
        b.location, t = op.location, unsharded_type(v)
        operands = [b.widened(self._totals.get(x, x)) for x in op.operands]
        result = tensor(_wide(t.element_type), t.get_shape())
        return b.op(type(op), *operands, props=_without_strategy(op), result=result).results[0]

    def total(self, v: SSAValue, kind: str) -> SSAValue:
        """Return the sum of a value over all microbatches, or the mean, as a scalar."""
        op, b = v.owner, self.b
        if isinstance(op, nn.Contraction):
            b.location = op.location
            return self._contracted(op)
        if isinstance(op, nn.ReduceOp):
            b.location, v = op.location, op.x
        dims = range(1 + len(unsharded_type(v).get_shape()))
        return b.reduce(b.widened(self.stacked(v)), kind, dims)

    def _contracted(self, op: nn.Contraction) -> SSAValue:
        """Return the sum of the products of all microbatches."""
        b, counted = self.b, [v in self.means.counted for v in op.operands]
        x, y = (b.widened(self.stacked(v) if c else v)
                for v, c in zip(op.operands, counted, strict=True))  # fmt: skip
        lhs, rhs, out = op.letters
        if all(counted):
            letter = next(c for c in ascii_letters if c not in lhs + rhs)
            return b.einsum(f"{letter}{lhs},{letter}{rhs}->{out}", x, y)
        x, y = (b.reduce(v, "sum", [0]) if c else v for v, c in zip((x, y), counted, strict=True))
        return b.einsum(f"{lhs},{rhs}->{out}", x, y)

    def stacked(self, v: SSAValue) -> SSAValue:
        """Return the values of all microbatches, in a new dimension 0.

        Raises:
            Failure: an op makes it that is not computed for all microbatches at once.
        """
        if v not in self._stacked:
            if (x := _moved(v)) is not None:
                return self.stacked(x)
            op = v.owner
            assert isinstance(op, Operation)
            self._stacked |= zip(op.results, self._of_all(op), strict=True)
        return self._stacked[v]

    def _of_all(self, op: Operation) -> Sequence[SSAValue]:
        """Return the results of an op for all microbatches."""
        if not isinstance(op, TensorOp) or "stream" in op.properties:
            raise self._not_ahead(op)
        counted = [v in self.means.counted for v in op.operands]
        operands = [self.stacked(v) if c else v for v, c in zip(op.operands, counted, strict=True)]
        self.b.location = op.location
        rank = len(unsharded_type(op.results[0]).get_shape())
        if isinstance(op, Elementwise):
            operands = [v if _is_scalar(v) else self._aligned(v if c else self._repeated(v), rank)
                        for v, c in zip(operands, counted, strict=True)]  # fmt: skip
        elif isinstance(op, STACKABLE):
            operands = [v if c else self._repeated(v)
                        for v, c in zip(operands, counted, strict=True)]  # fmt: skip
        elif not _looks_up(op, counted):
            raise self._not_ahead(op)
        types = [tensor(t.element_type, (self.count, *t.get_shape()))
                 for t in map(unsharded_type, op.results)]  # fmt: skip
        props = _without_strategy(op)
        if not isinstance(op, Elementwise | nn.GatherOp):
            props = {n: self._shifted(op, n) for n in props}
        return self.b.op(type(op), *operands, props=props, result=types).results

    def _aligned(self, v: SSAValue, rank: int) -> SSAValue:
        """Return stacked values with as many dimensions as those of an op's result."""
        count, *shape = unsharded_type(v).get_shape()
        return self.b.reshape(v, (count, *[1] * (rank - len(shape)), *shape))

    def _repeated(self, v: SSAValue) -> SSAValue:
        """Return a value that all microbatches share, stacked."""
        shape = unsharded_type(v).get_shape()
        return self.b.broadcast(v, range(1, 1 + len(shape)), (self.count, *shape))

    def _shifted(self, op: TensorOp, name: str) -> Attribute:
        """Return a property of an op on values with one more dimension, before the others."""
        value = op.properties[name]
        of = op.results[0] if isinstance(op, nn.BroadcastOp | nn.StackOp) else op.operands[0]
        rank = len(unsharded_type(of).get_shape())
        if isinstance(value, nn.DimsAttr):
            dims = [d + 1 for d in dims_of(op.properties, name, rank)]
            keeps = isinstance(op, nn.TransposeOp | nn.BroadcastOp)
            return dims_attr(0, *dims) if keeps else dims_attr(*dims)
        if isinstance(value, nn.IntsPerDimAttr) and name != "sizes":
            first = {"limits": self.count, "strides": 1, "repeats": 1}.get(name, 0)
            return nn.IntsPerDimAttr((first, *value.data))
        if isinstance(value, IntegerAttr) and name in ("axis", "dim"):
            return int_attr(axis_of(op.properties, name, rank) + 1)
        return value

    @staticmethod
    def _not_ahead(op: Operation) -> Failure:
        found = f"expected numbers of tokens by elementwise ops, movements and sums, got {op.name}"
        use = "make the mask, or the weights, an input"
        return Failure([(op, coded("G17", found, use))])


STACKABLE = (
    nn.ReduceOp, nn.ReshapeOp, nn.BroadcastOp, nn.TransposeOp, nn.SliceOp, nn.PadOp, nn.FlipOp,
    nn.RollOp, nn.TileOp, nn.RepeatInterleaveOp, nn.ConcatOp, nn.StackOp, nn.SplitOp, nn.UnfoldOp,
    nn.OneHotOp, nn.PickOp, nn.TakeAlongAxisOp, nn.CumsumOp, nn.SortOp, nn.ArgsortOp, nn.TopkOp,
    nn.ArgmaxOp, nn.ArgminOp,
)  # fmt: skip
"""Ops, besides elementwise ones, that are the same with one more dimension before the others."""


def _looks_up(op: TensorOp, counted: Sequence[bool]) -> bool:
    """Whether an op gathers from a table that all microbatches share, along its first dimension."""
    if not isinstance(op, nn.GatherOp) or counted != [False, True] or op.field is not None:
        return False
    return axis_of(op.properties, "axis", len(unsharded_type(op.table).get_shape())) == 0


def _without_strategy(op: TensorOp) -> Props:
    return {n: a for n, a in op.properties.items() if n != "strategy"}


def _wide(element: Attribute) -> Attribute:
    return f32 if isinstance(element, BFloat16Type | Float16Type) else element


def over_tokens(means: TokenMeans, denominators: Denominators) -> dict[SSAValue, SSAValue]:
    """Divide by the mean of each denominator over all microbatches. Return the quotients that other
    values replace, each with its own.

    Raises:
        Failure: a loss or metric is no quotient with such a denominator.
    """
    found = list(means.find())
    if problems := [mean.problem for mean in found if mean.problem is not None]:
        raise Failure(problems)
    replaced: dict[SSAValue, SSAValue] = {}
    for mean in found:
        old, new = mean.op.operands[mean.divisor], denominators.mean(mean)
        inside = Rewriter(denominators.b.mesh).before(mean.op)
        for op in reversed(mean.path):
            if isinstance(op, nn.BroadcastOp):
                result = unsharded_type(op.out)
                made = inside.op(nn.BroadcastOp, new, props=_without_strategy(op), result=result)
                made.attributes.update(op.attributes)
                new = made.results[0]
        if (layout := layout_of(old)) is not None:
            new = (inside if mean.path else denominators.b).redistribute(new, layout)
        mean.op.operands[mean.divisor] = new
        if (quotient := _of_partial(mean, denominators.b)) is not None:
            replaced[mean.op.results[0]] = quotient
            Rewriter.replace(mean.op, [quotient])
    return replaced


def _of_partial(mean: TokenMean, before: Rewriter) -> SSAValue | None:
    """%y = dist.redistribute %x; %q = nn.div %y, %n    ->    %p = nn.mul %x, 1 / %n;
    %q = dist.redistribute %p

    Where %x is partial, and nothing else uses %y: the partial values of all microbatches are added
    up, and reduced after the loop. Not of narrow types, whose reciprocals may underflow.
    """
    division = mean.op
    if not isinstance(division, nn.DivOp) or mean.path:
        return None
    moved = division.lhs.owner
    if not isinstance(moved, RedistributeOp):
        return None
    partial, complete = layout_of(moved.value), layout_of(moved.out)
    element = unsharded_type(division.out).element_type
    if (
        partial is None or complete is None or not partial.partial
        or partial.complete != complete or complete != layout_of(division.out)
        or moved.out.get_user_of_unique_use() is not division or _wide(element) != element
    ):  # fmt: skip
        return None
    inverse = before.op(nn.ReciprocalOp, division.rhs)
    if (weighed := weighed_by(division)) is not None:
        inverse.attributes.update(weighing_attrs(weighed))
    inside = Rewriter(before.mesh).before(division)
    product = inside.create(nn.MulOp, [moved.value, inverse.results[0]], [moved.value.type])
    return inside.redistribute(product.out, complete)


def check_means(means: TokenMeans, microbatches: int) -> None:
    """Check that no mean over microbatches is one of means over different numbers of tokens.

    Raises:
        Failure: some are.
    """
    found = list[Located]()
    for op in (mean.op for mean in means.find() if mean.is_mean):
        message = (
            f"expected accumulate <tokens>, got <mean>: {named(op.results[0])} is a mean over "
        )
        message += "tokens, whose number differs between microbatches"
        use = f"write accumulate <tokens, microbatches = {microbatches}>"
        found.append((op, coded("G17", message, use)))
    if found:
        raise Failure(found)


def warn_of_means(means: TokenMeans, metrics: Mapping[SSAValue, str]) -> None:
    """Warn of metrics, by their names, that are means over microbatches of means over different
    numbers of tokens, where losses are added up."""
    found = [mean for mean in means.find() if mean.is_mean]
    for v, name in metrics.items():
        if (mean := next((m for m in found if v in means.reached(m.op)), None)) is not None:
            message = f"expected accumulate <tokens> for the metric {name!r}, got <sum>: it is the "
            message += "mean over microbatches of means over tokens, whose number differs"
            warn(mean.op, f"{message}; return its numerator and denominator")
