"""Means over tokens: denominators that depend on inputs, such as a number of labels that count.

    accumulate <mean>      mean of  sum(x_k) / n_k            a mean of means
    accumulate <tokens>    mean of  sum(x_k) / mean of all n  = sum of sum(x_k) / sum of n_k

The denominators of all microbatches are added up before the loop, from the inputs, which have
microbatches in dimension 0. So the loop, its gradients and its sums are the same as for a mean. A
microbatch without tokens adds 0.

    %counts = nn.compare <ne> %labels, %ignored     : tensor<4x8xi64>, before the loop
    %n = nn.reduce <sum> %counts dims <0, 1>
    %mean_n = nn.mul %n, %quarter
    train.microbatches 4
    %loss = nn.div %total, %mean_n

1. A denominator is a single element. Ops on single elements, such as `clamp(min=1)`, make it of
   sums or means over whole inputs; or it is a scalar input. If made of sums it divides a sum, if
   made of means a mean; or it divides many elements, such as weights that are normalised.
2. From the quotient to the loss, or to a metric, ops are linear. A quotient of many elements that
   passes through a nonlinear op is no mean, such as normalised data.
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
"""The reductions of which a denominator is made."""


@dataclass(frozen=True)
class TokenMean:
    """A division by a number of tokens.

    Attributes:
        op: the division.
        divisor: the index of the divisor's operand.
        number: the denominator, one element.
        path: the ops that repeat the number for the division, last op first.
        problem: the error that prevents using the denominators of all microbatches, if any.
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
            inputs: a microbatch's parts of the inputs.
            learned: parameters, and states that change between microbatches.
            targets: the loss, metrics, and gradients that the ops make. others: the remaining
            results.
        """
        self.every, self.inputs = ops, {*inputs}
        self.ops = [op for op in ops if op.results]
        self.targets, self.others = targets, others
        self.counted, self.learned = (
            _dependent_values(ops, inputs),
            _dependent_values([*shared, *ops], learned),
        )

    def find(self) -> Iterator[TokenMean]:
        """Yield the divisions by numbers of tokens."""
        for op in self.ops:
            divisor = 1 if isinstance(op, nn.DivOp) else 0
            if not isinstance(op, nn.DivOp | nn.ReciprocalOp):
                continue
            number, path = op.operands[divisor], list[Operation]()
            while _size(number) > 1:
                x = (
                    number.owner.x
                    if isinstance(number.owner, nn.BroadcastOp)
                    else _relocated_value(number)
                )
                if x is None or not isinstance(number.owner, Operation):
                    break
                path.append(number.owner)
                number = x
            if _size(number) == 1 and (parts := self.parts_of(number)):
                kinds = kinds_of(parts)
                if kinds or self._numerators(op) == {"sum"}:  # else a factor, such as a temperature
                    yield from self._mean(TokenMean(op, divisor, number, path), kinds)

    def _mean(self, division: TokenMean, kinds: set[str]) -> Iterator[TokenMean]:
        """Yield a division with its problem, if it may be meant as a mean over tokens."""
        linear_values, blocker = self._linear_values(division.op)
        is_mean = not linear_values.isdisjoint(self.targets)
        blocked = [] if blocker is None else [v for v in blocker.operands if v in linear_values]
        if not is_mean and not any(map(_is_scalar, blocked)):
            return
        problem, use = (
            self._problem(division, kinds),
            "write <mean>, for a mean of losses as they are",
        )
        is_mean &= problem is None
        if problem is None and blocker is not None:
            message = f"a loss and metrics that are linear in means over tokens, got {blocker.name}"
            problem, use = (blocker, message), "return the mean itself"
        elif problem is None and not linear_values.isdisjoint(self.others):
            name = named(division.op.results[0])
            message = f"no state or other result that depends on a mean over tokens, got {name}"
            problem, use = (division.op, message), "return it as a metric"
        error = problem and (problem[0], coded("G17", f"expected {problem[1]}", use))
        yield replace(division, problem=error, is_mean=is_mean)

    def _problem(self, division: TokenMean, kinds: set[str]) -> tuple[Operation, str] | None:
        """Return why a division is no mean over tokens of all microbatches, and the op to blame;
        `kinds`: the kinds of sums in the denominator."""
        if division.number in self.learned:
            name = named(division.number)
            return (
                division.op,
                f"a denominator of inputs alone, got {name}, which is learned or a state",
            )
        numerators = self._numerators(division.op)
        if len(kinds) > 1 or (kinds and numerators - kinds):
            names = [" and a ".join(sorted(k)) for k in (numerators, kinds)]
            return (
                division.op,
                f"the quotient of two sums, or of two means, got a {names[0]} by a {names[1]}",
            )
        for op in self._scalars(division.op):
            own = {v for v in op.operands if v in self.counted or v in self.learned}
            if own and kind_of_sum(op.results[0]) is None and not _is_linear(op, own):
                return op, f"a numerator that is linear in sums, got {op.name}"
        return None

    def weights(self, returned: Sequence[SSAValue]) -> dict[int, TokenMean | None]:
        """Return, by the index of each result that is a mean over tokens, a mean with its number of
        tokens; None for a result made of several such means."""
        means = [mean for mean in self.find() if mean.is_mean]
        linear_values, weights = [self.linear_values(mean.op) for mean in means], {}
        for i, v in enumerate(returned):
            own_means = [mean for mean, values in zip(means, linear_values, strict=True)
                  if v in self.targets and v in values]  # fmt: skip
            if own_means:
                alone = len({mean.number for mean in own_means}) == 1
                is_one = alone and v in self._multiples([mean.op for mean in own_means])
                weights[i] = own_means[0] if is_one else None
        return weights

    def _multiples(self, divisions: Sequence[Operation]) -> set[SSAValue]:
        """Return the values that are multiples of quotients: linear, with nothing added."""
        multiples: set[SSAValue] = {v for op in divisions for v in op.results}
        for op in self.ops:
            is_multiple = [v in multiples for v in op.operands]
            if any(is_multiple) and _is_linear(op, multiples):
                adds = isinstance(op, nn.AddOp | nn.SubOp | nn.SelectOp | nn.ConcatOp | nn.StackOp)
                if not adds or all(is_multiple[isinstance(op, nn.SelectOp) :]):
                    multiples.update(op.results)
        return multiples

    def parts_of(self, number: SSAValue) -> list[SSAValue]:
        """Return the values that make a number of one element, in order: sums, scalar inputs, and
        results of ops on them; empty if it depends on anything else."""
        visited: dict[SSAValue, None] = {}

        def visit(v: SSAValue) -> bool:
            if v not in self.counted or v in visited:
                return True
            if not self.is_sum(v) and not (
                isinstance(v.owner, Operation)
                and v not in self.inputs
                and all(_size(x) == 1 and visit(x) for x in v.owner.operands if x in self.counted)
            ):
                return False
            visited[v] = None
            return True

        return [*visited] if visit(number) else []

    def is_sum(self, v: SSAValue) -> bool:
        """Whether a value is a sum or a mean, or a scalar input."""
        return (v in self.inputs and _is_scalar(v)) or kind_of_sum(v) is not None

    def linear_values(self, division: Operation) -> set[SSAValue]:
        """Return the values that are linear in a quotient."""
        return self._linear_values(division)[0]

    def _linear_values(self, division: Operation) -> tuple[set[SSAValue], Operation | None]:
        """Return the values that are linear in a quotient, and the first op that is not linear in
        it."""
        linear: set[SSAValue] = {*division.results}
        blocker: Operation | None = None
        for op in self.ops[self.ops.index(division) + 1 :]:
            if linear.isdisjoint(op.operands):
                continue
            if _is_linear(op, linear):
                linear |= _dependent_values([op], [*linear.intersection(op.operands)])
            else:
                blocker = blocker or op
        return linear, blocker

    def _scalars(self, division: Operation) -> Iterator[Operation]:
        """Yield the ops that make a scalar numerator, down to its sums and including them."""
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
        """Return the kinds of the sums in a scalar numerator."""
        return kinds_of([op.results[0] for op in self._scalars(division)])


def kind_of_sum(v: SSAValue) -> str | None:
    """Return "sum" or "mean" if a value sums over all rows (dimension 0); None otherwise."""
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


def mark_weights(
    at: Operation, means: TokenMeans, returned: Sequence[SSAValue], in_stages: bool = False
) -> None:  # fmt: skip
    """Mark the numbers of tokens of the results of a function or request: the weights of results in
    means over several batches. Warn of a result without one: a result of several means, or in
    stages."""
    for i, mean in means.weights(returned).items():
        if mean is not None and not in_stages:
            mean.reader.attributes.update(weighing_attrs(i))
            continue
        name = named(returned[i])
        if in_stages:
            message = f"expected {name}, a mean over tokens, outside of stages, got it in stages"
            use = "evaluate it without stages"
        else:
            message = f"expected {name} to be one mean over tokens, got more than one"
            use = "return them apart"
        warn(at, f"{message}: over several batches it is a mean by their rows; {use}")


def means_of(f: FuncOp) -> TokenMeans:
    """Return the means over tokens of a function whose composites are decomposed."""
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


def _dependent_values(ops: Sequence[Operation], values: Sequence[SSAValue]) -> set[SSAValue]:
    """Return these values, and all values that depend on them."""
    dependent = {*values}
    for op in ops:
        if not dependent.isdisjoint(op.operands):
            dependent.update(
                v for v in op.results if (x := _relocated_value(v)) is None or x in dependent
            )
    return dependent


def _relocated_value(v: SSAValue) -> SSAValue | None:
    """Return the value that an op brings to a new layout; None if the value is made differently."""
    op = v.owner
    if not isinstance(op, Operation) or not relocates(op):
        return None
    pairs = Activity(()).communicated(op) or []
    return next(x for x, out in pairs if out is v)


def _is_linear(op: Operation, of: set[SSAValue]) -> bool:
    """Whether an op is linear in its operands that are in `of`, plus terms of the remaining
    operands."""
    if relocates(op):
        return True
    if not isinstance(op, TensorOp):
        return False
    is_in = [v in of for v in op.operands]
    if isinstance(op, nn.DivOp):
        return not is_in[1]
    if isinstance(op, nn.SelectOp):
        return not is_in[0]
    if isinstance(op, nn.ConvertOp):
        return isinstance(unsharded_type(op.out).element_type, AnyFloat)
    if op.MULTILINEAR:
        return sum(is_in) == 1
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
        """`b`: inserts before the loop; `stacked`: the input for each microbatch's part of it;
        `count`: the number of microbatches."""
        self.b, self.means, self.count = b, means, count
        self._stacked, self._totals = dict(stacked), dict[SSAValue, SSAValue]()

    def mean(self, token_mean: TokenMean) -> SSAValue:
        """Return the mean of a denominator over all microbatches."""
        number = token_mean.number
        parts = self.means.parts_of(number)
        kind = "mean" if "mean" in kinds_of(parts) else "sum"
        for v in parts:
            if v not in self._totals:
                total = self.total(v, kind) if self.means.is_sum(v) else self._combine_totals(v)
                self._totals[v] = self.b.reshape(total, unsharded_type(v).get_shape())
        total = self.b.complete(self._totals[number])
        if kind == "sum":
            total = self.b.scale(total, 1 / self.count)
        total = self.b.convert(total, unsharded_type(number).element_type)
        total.name_hint = number.name_hint or "tokens"
        return total

    def _combine_totals(self, v: SSAValue) -> SSAValue:
        """Return the result of an op on totals, in f32 instead of narrower types, which may not
        hold it."""
        op, b = v.owner, self.b
        if (x := _relocated_value(v)) is not None:
            return self._totals[x]
        assert isinstance(op, Operation)
        if not isinstance(op, TensorOp) or len(op.results) > 1 or op.regions:
            raise self._unsupported_op(op)
        b.location, t = op.location, unsharded_type(v)
        operands = [b.widen(self._totals.get(x, x)) for x in op.operands]
        result = tensor(_widen_type(t.element_type), t.get_shape())
        return b.op(type(op), *operands, props=_without_strategy(op), result=result).results[0]

    def total(self, v: SSAValue, kind: str) -> SSAValue:
        """Return the sum, or the mean, of a value over all microbatches, as a scalar."""
        op, b = v.owner, self.b
        if isinstance(op, nn.Contraction):
            b.location = op.location
            return self._total_product(op)
        if isinstance(op, nn.ReduceOp):
            b.location, v = op.location, op.x
        dims = range(1 + len(unsharded_type(v).get_shape()))
        return b.reduce(b.widen(self.stacked(v)), kind, dims)

    def _total_product(self, op: nn.Contraction) -> SSAValue:
        """Return the sum of a product over all microbatches."""
        b, counted = self.b, [v in self.means.counted for v in op.operands]
        x, y = (b.widen(self.stacked(v) if c else v)
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
            Failure: they depend on an op that cannot be computed for all microbatches at once.
        """
        if v not in self._stacked:
            if (x := _relocated_value(v)) is not None:
                return self.stacked(x)
            op = v.owner
            assert isinstance(op, Operation)
            self._stacked |= zip(op.results, self._stack_op(op), strict=True)
        return self._stacked[v]

    def _stack_op(self, op: Operation) -> Sequence[SSAValue]:
        """Return the results of an op for all microbatches."""
        if not isinstance(op, TensorOp) or "stream" in op.properties:
            raise self._unsupported_op(op)
        counted = [v in self.means.counted for v in op.operands]
        operands = [self.stacked(v) if c else v for v, c in zip(op.operands, counted, strict=True)]
        self.b.location = op.location
        rank = len(unsharded_type(op.results[0]).get_shape())
        if isinstance(op, Elementwise):
            operands = [v if _is_scalar(v) else self._align(v if c else self._repeat(v), rank)
                        for v, c in zip(operands, counted, strict=True)]  # fmt: skip
        elif isinstance(op, STACKABLE):
            operands = [v if c else self._repeat(v)
                        for v, c in zip(operands, counted, strict=True)]  # fmt: skip
        elif not _looks_up(op, counted):
            raise self._unsupported_op(op)
        types = [tensor(t.element_type, (self.count, *t.get_shape()))
                 for t in map(unsharded_type, op.results)]  # fmt: skip
        props = _without_strategy(op)
        if not isinstance(op, Elementwise | nn.GatherOp):
            props = {n: self._shift_property(op, n) for n in props}
        return self.b.op(type(op), *operands, props=props, result=types).results

    def _align(self, v: SSAValue, rank: int) -> SSAValue:
        """Return stacked values with the rank of the op's result."""
        count, *shape = unsharded_type(v).get_shape()
        return self.b.reshape(v, (count, *[1] * (rank - len(shape)), *shape))

    def _repeat(self, v: SSAValue) -> SSAValue:
        """Return a value that all microbatches share, stacked."""
        shape = unsharded_type(v).get_shape()
        return self.b.broadcast(v, range(1, 1 + len(shape)), (self.count, *shape))

    def _shift_property(self, op: TensorOp, name: str) -> Attribute:
        """Return a property of an op on values with one more leading dimension."""
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
    def _unsupported_op(op: Operation) -> Failure:
        message = (
            f"expected numbers of tokens by elementwise ops, movements and sums, got {op.name}"
        )
        use = "make the mask, or the weights, an input"
        return Failure([(op, coded("G17", message, use))])


STACKABLE = (
    nn.ReduceOp, nn.ReshapeOp, nn.BroadcastOp, nn.TransposeOp, nn.SliceOp, nn.PadOp, nn.FlipOp,
    nn.RollOp, nn.TileOp, nn.RepeatInterleaveOp, nn.ConcatOp, nn.StackOp, nn.SplitOp, nn.UnfoldOp,
    nn.OneHotOp, nn.PickOp, nn.TakeAlongAxisOp, nn.CumsumOp, nn.SortOp, nn.ArgsortOp, nn.TopkOp,
    nn.ArgmaxOp, nn.ArgminOp,
)  # fmt: skip
"""Ops, besides elementwise ones, that accept a further leading dimension."""


def _looks_up(op: TensorOp, counted: Sequence[bool]) -> bool:
    """Whether an op gathers from a table that all microbatches share, along its first dimension."""
    if not isinstance(op, nn.GatherOp) or counted != [False, True] or op.field is not None:
        return False
    return axis_of(op.properties, "axis", len(unsharded_type(op.table).get_shape())) == 0


def _without_strategy(op: TensorOp) -> Props:
    return {n: a for n, a in op.properties.items() if n != "strategy"}


def _widen_type(element: Attribute) -> Attribute:
    return f32 if isinstance(element, BFloat16Type | Float16Type) else element


def divide_by_tokens(means: TokenMeans, denominators: Denominators) -> dict[SSAValue, SSAValue]:
    """Divide by the mean of each denominator over all microbatches. Return the replaced quotients,
    each with its replacement.

    Raises:
        Failure: a loss or metric is no quotient with such a denominator.
    """
    means_found = list(means.find())
    if problems := [mean.problem for mean in means_found if mean.problem is not None]:
        raise Failure(problems)
    replaced: dict[SSAValue, SSAValue] = {}
    for mean in means_found:
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
        if (quotient := _divide_partial(mean, denominators.b)) is not None:
            replaced[mean.op.results[0]] = quotient
            Rewriter.replace(mean.op, [quotient])
    return replaced


def _divide_partial(mean: TokenMean, before: Rewriter) -> SSAValue | None:
    """%y = dist.redistribute %x; %q = nn.div %y, %n    ->    %p = nn.mul %x, 1 / %n;
    %q = dist.redistribute %p

    If %x is partial, and %y has no other use: the partial values of all microbatches are added, and
    reduced after the loop. Not for narrow types, whose reciprocals may underflow.
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
        or moved.out.get_user_of_unique_use() is not division or _widen_type(element) != element
    ):  # fmt: skip
        return None
    inverse = before.op(nn.ReciprocalOp, division.rhs)
    if (weighed := weighed_by(division)) is not None:
        inverse.attributes.update(weighing_attrs(weighed))
    inside = Rewriter(before.mesh).before(division)
    product = inside.create(nn.MulOp, [moved.value, inverse.results[0]], [moved.value.type])
    return inside.redistribute(product.out, complete)


def check_means(means: TokenMeans, microbatches: int) -> None:
    """Check that no mean over microbatches averages means over different numbers of tokens.

    Raises:
        Failure: a mean does.
    """
    errors = list[Located]()
    for op in (mean.op for mean in means.find() if mean.is_mean):
        message = (
            f"expected accumulate <tokens>, got <mean>: {named(op.results[0])} is a mean over "
        )
        message += "tokens, whose number differs between microbatches"
        use = f"write accumulate <tokens, microbatches = {microbatches}>"
        errors.append((op, coded("G17", message, use)))
    if errors:
        raise Failure(errors)


def warn_of_means(means: TokenMeans, metrics: Mapping[SSAValue, str]) -> None:
    """Warn of metrics, by name, that are means over microbatches of means over different numbers of
    tokens, while losses are added up."""
    means_found = [mean for mean in means.find() if mean.is_mean]
    for v, name in metrics.items():
        if (
            mean := next((m for m in means_found if v in means.linear_values(m.op)), None)
        ) is not None:
            message = f"expected accumulate <tokens> for the metric {name!r}, got <sum>: it is the "
            message += "mean over microbatches of means over tokens, whose number differs"
            warn(mean.op, f"{message}; return its numerator and denominator")
