"""The table of compositions: terms, and the op that computes each.

Gradients have the forms that JAX's differentiation gives them. They read the op of the forward
part, which is raised when its inner values have no other readers.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from math import inf, pi

from xdsl.dialects.builtin import AnyFloat, UnitAttr, bf16, f16, f32, f64, i1, i32, i64
from xdsl.dialects.func import FuncOp, ReturnOp
from xdsl.ir import Attribute, Block, BlockArgument, Operation, SSAValue

from shardir.dialects import nn, train
from shardir.dialects.nn.activation import GELU_CUBIC, SQRT_2_OVER_PI
from shardir.dialects.nn.base import TensorOp
from shardir.dialects.nn.movement import ints_of
from shardir.dialects.nn.properties import (
    axis_of,
    dims_attr,
    dims_of,
    float_attr,
    int_attr,
    string_attr,
)
from shardir.dialects.nn.types import statistic_of, unsharded_type
from shardir.dialects.text import word
from shardir.dialects.train.roles import UPDATES
from shardir.rewriting.compositions.attending import (
    arranged,
    attention,
    attention_with_gradient,
)
from shardir.rewriting.compositions.attention import (
    attention_form,
    attention_gradient,
    product_over_sum,
    sums_products,
)
from shardir.rewriting.compositions.matching import Match, decimal, matches
from shardir.rewriting.compositions.named import NamedValue, letters_of
from shardir.rewriting.compositions.raising import Builder, CompositionRule, Replacements, TermPlace
from shardir.rewriting.compositions.terms import (
    LEAD,
    PER_ROW,
    NumberTerm,
    OpTerm,
    ProductTerm,
    Term,
    anything,
    either,
    erf,
    erfc,
    exp,
    factor,
    log,
    maximum,
    mean,
    number,
    power,
    sigmoid,
    sqrt,
    square,
    summed,
    tanh,
    top,
    total,
)

RULES: list[CompositionRule] = []

PRODUCTS = (nn.MulOp, nn.DivOp, nn.NegOp)
SUMS = (nn.AddOp, nn.SubOp)
ARITHMETIC = (*PRODUCTS, *SUMS)


def raises(
    root: Term, kinds: Sequence[type[Operation]], also: Sequence[TermPlace] = (),
    perhaps: Sequence[TermPlace] = (), of_floats: bool = True,
) -> Callable[[Callable[[Builder, Match], Replacements | None]], None]:  # fmt: skip
    """Add the rule of a term to the table. The function that follows makes its ops.

    Args:
        kinds: the ops whose results may be the term's value.
        also: terms that the program must have too, each with a term or name from which its value
            is computed.
        perhaps: terms that it may have.
        of_floats: whether the term's value is of floats.
    """

    def add(make: Callable[[Builder, Match], Replacements | None]) -> None:
        RULES.append(
            CompositionRule(root, tuple(kinds), make, tuple(also), tuple(perhaps), of_floats)
        )

    return add


def _type(v: SSAValue) -> object:
    return unsharded_type(v)


def _element(v: SSAValue) -> Attribute:
    return unsharded_type(v).element_type


def _shape(v: SSAValue) -> tuple[int, ...]:
    return unsharded_type(v).get_shape()


x, y, dy, rest = map(anything, ("x", "y", "dy", "rest"))
eps = number("eps")

# ---- values that are nothing new ----


def same(term: Term, kinds: Sequence[type[Operation]], name: str, *elements: object) -> None:
    """A term whose value is that of `name`, in these element types."""

    @raises(term, kinds, of_floats=False)
    def _(b: Builder, m: Match) -> Replacements | None:
        v = m[name]
        is_same = _type(v) == _type(m.parts[term]) and unsharded_type(v).element_type in elements
        return {term: v} if is_same else None


condition = anything("condition")

same(maximum(x, -inf), [nn.MaxOp], "x", bf16, f16, f32, f64)
same(OpTerm(nn.SubOp, (x, NumberTerm(0.0))), [nn.SubOp], "x", f32, f64)
same(
    OpTerm(nn.SelectOp, (condition, NumberTerm(1.0), NumberTerm(0.0))),
    [nn.SelectOp],
    "condition",
    i1,
)
for _zero in ((x, NumberTerm(0.0)), (NumberTerm(0.0), x)):
    same(OpTerm(nn.AddOp, _zero), [nn.AddOp], "x", i32, i64)


def widens(op: nn.ConvertOp) -> bool:
    """Whether an op converts floats of 16 bits to f32: no bit is lost."""
    return _element(op.x) in (bf16, f16) and _element(op.out) == f32


def in_f32(x: Term) -> OpTerm:
    return OpTerm(nn.ConvertOp, (x,), widens)


same(OpTerm(nn.ConvertOp, (in_f32(x),)), [nn.ConvertOp], "x", bf16, f16)

# ---- activations ----


def unary(term: Term, kind: type[TensorOp], **props: Attribute) -> None:
    """`kind` of x; a gradient also of dy."""
    names = ("x", "dy") if kind.name.endswith("_grad") else ("x",)

    @raises(term, (*ARITHMETIC, nn.MaxOp, nn.ReciprocalOp))
    def _(b: Builder, m: Match) -> Replacements | None:
        operands = [m[n] for n in names]
        if any(_type(v) != _type(m.parts[term]) for v in operands):
            return None
        return {term: b.value(kind, *operands, **props)}


EXACT = {"exact": UnitAttr()}
logistic = either(sigmoid(x), 1.0 / (1.0 + exp(-x)))
bent = tanh(SQRT_2_OVER_PI * (x + GELU_CUBIC * x * x * x))
half = 0.5 * x * dy * (1.0 - bent)
through_bent = SQRT_2_OVER_PI * (half + half * bent)
tail = either(erfc(-(x * 0.5**0.5)), 1.0 - erf(-(x * 0.5**0.5)), 1.0 + erf(x * 0.5**0.5))
bell = (0.5 / pi) ** 0.5 * exp(-0.5 * square(x))

unary(x * logistic, nn.SiluOp)
unary(0.5 * x * (1.0 + bent), nn.GeluOp)
unary(0.5 * x * tail, nn.GeluOp, **EXACT)
unary(1.0 / (1.0 + exp(-x)), nn.SigmoidOp)
unary(dy * logistic + x * dy * logistic * (1.0 - logistic), nn.SiluGradOp)
unary(0.5 * dy * (1.0 + bent) + through_bent + 3.0 * GELU_CUBIC * square(x) * through_bent,
      nn.GeluGradOp)  # fmt: skip
unary(0.5 * dy * tail + x * dy * bell, nn.GeluGradOp, **EXACT)

# ---- softmax ----

shifted = x - top(x)
exps = exp(shifted)
total_exps = either(total(exps), OpTerm(nn.ConvertOp, (total(in_f32(exps)),)))
"""Also the sum of 16-bit exponentials that is computed in f32, as in JAX."""
softmax = exps / total_exps
log_softmax = shifted - log(total(exps))

finite_top = OpTerm(nn.SelectOp, (OpTerm(nn.IsfiniteOp, (top(x),)), top(x), NumberTerm(0.0)))
finite_total = OpTerm(nn.AbsOp, (total(exp(x - finite_top)),))
log_sum_exps = (top(x), log(total_exps)), (finite_top, log(finite_total))  # by hand, jax.nn
recomputed = exp(either(*(x - shift - rest for shift, rest in log_sum_exps)))
"""Weights from a log-sum-exp that is saved."""


def along_row(
    term: Term, kind: type[TensorOp], kinds: Sequence[type[Operation]] = ARITHMETIC
) -> None:
    """`kind` of x, along the one dimension of the rows."""

    @raises(term, kinds)
    def _(b: Builder, m: Match) -> Replacements | None:
        if len(m.dims) != 1 or _type(m["x"]) != _type(m.parts[term]):
            return None
        return {term: b.value(kind, m["x"], axis=int_attr(m.dims[0]))}


def along_row_grad(
    term: Term, kind: type[TensorOp], forward: Term, near: Term, forward_kind: type[TensorOp]
) -> None:
    """`kind` of the result of the forward part and of dy. The forward part is made where the
    program has only parts of it."""

    @raises(term, ARITHMETIC, perhaps=[(forward, near)])
    def _(b: Builder, m: Match) -> Replacements | None:
        if len(m.dims) != 1 or any(_type(m[n]) != _type(m.parts[term]) for n in ("x", "dy")):
            return None
        axis = int_attr(m.dims[0])
        y = m.parts.get(forward) or b.value(forward_kind, m["x"], axis=axis)
        return {term: b.value(kind, y, m["dy"], axis=axis)}


along_row(softmax, nn.SoftmaxOp)
along_row(recomputed, nn.SoftmaxOp, [nn.ExpOp])
along_row(log_softmax, nn.LogSoftmaxOp)
along_row_grad(exps * (dy / total_exps - total(dy * exps / square(total_exps))),
               nn.SoftmaxGradOp, softmax, exps, nn.SoftmaxOp)  # fmt: skip
along_row_grad(dy - exps * total(dy) / total(exps),
               nn.LogSoftmaxGradOp, log_softmax, shifted, nn.LogSoftmaxOp)  # fmt: skip

weights = OpTerm(nn.SoftmaxOp, (x,))


@raises(weights, [nn.SoftmaxOp])
def _(b: Builder, m: Match) -> Replacements | None:
    """Weights that are computed twice."""
    op = m.parts[weights].owner
    for other in (use.operation for use in m["x"].uses):
        if isinstance(other, nn.SoftmaxOp) and other is not op and other.parent is op.parent:
            assert isinstance(op, nn.SoftmaxOp)
            if other.properties == op.properties:
                first, second = sorted((op, other), key=b.order.__getitem__)
                return {second.out: first.out}
    return None


quotient = OpTerm(nn.DivOp, (x, y))


@raises(quotient, [nn.DivOp])
def _(b: Builder, m: Match) -> Replacements | None:
    """A product of exponentials over their sum, as FlashAttention has it: one of weights."""
    form = product_over_sum(m.parts[quotient])
    found = next(matches(exps, form.summed.value, b.order.known), None) if form else None
    if form is None or found is None or found.dims != (form.summed.names.index("column"),):
        return None
    p, op = b.value(nn.SoftmaxOp, found["x"], axis=int_attr(*found.dims)), form.product.value.owner
    assert isinstance(op, nn.EinsumOp)
    operands = (p if i == form.side else v for i, v in enumerate(op.operands))
    product = NamedValue(b.value(nn.EinsumOp, *operands, equation=op.equation), form.product.names)
    return {quotient: arranged(b, product, form.quotient.names)}


def weights_grad(term: Term, fits: Callable[[Match, int], bool]) -> None:
    """The gradient of a softmax as programs write it that have one of their own. `fits` says
    whether the sums of a match are those along an axis."""

    @raises(term, [nn.MulOp])
    def _(b: Builder, m: Match) -> Replacements | None:
        op = m.parts[weights].owner
        assert isinstance(op, nn.SoftmaxOp)
        if any(_type(v) != _type(op.out) for v in (m["dy"], m.parts[term])):
            return None
        if not fits(m, axis_of(op.properties, "axis", len(_shape(op.out)))):
            return None
        return {term: b.value(nn.SoftmaxGradOp, op.out, m["dy"], axis=op.axis)}


weights_grad(weights * (dy - total(weights * dy)), lambda m, axis: m.dims == (axis,))
weights_grad(
    weights * (dy - rest), lambda m, _: sums_products(m.parts[weights], m["dy"], m["rest"])
)

# ---- cross entropy ----

labels = anything("labels")


def _is_last(op: nn.TakeAlongAxisOp | nn.ScatterAddOp) -> bool:
    """Whether an op has one index for each row, the last dimension of its result or operand."""
    wide = op.out if isinstance(op, nn.ScatterAddOp) else op.x
    rank = len(_shape(wide))
    return axis_of(op.properties, "axis", rank) == rank - 1 and _shape(op.ids) == (
        *_shape(wide)[:-1], 1
    )  # fmt: skip


def _is_over_last(op: nn.LogSoftmaxOp | nn.LogSoftmaxGradOp) -> bool:
    rank = len(_shape(op.out))
    return axis_of(op.properties, "axis", rank) == rank - 1


log_p = OpTerm(nn.LogSoftmaxOp, (x,), _is_over_last)
taken = OpTerm(nn.TakeAlongAxisOp, (log_p, labels), _is_last)
placed = OpTerm(nn.ScatterAddOp, (labels, dy), _is_last)
log_p_grad = OpTerm(nn.LogSoftmaxGradOp, (anything("log_p"), placed), _is_over_last)


@raises(taken, [nn.TakeAlongAxisOp])
def _(b: Builder, m: Match) -> Replacements | None:
    """The losses, and the logarithms where others read them."""
    rows = _shape(m["labels"])[:-1]
    is_read = len([*m.parts[log_p].uses]) > 1
    flat = b.reshape(m["labels"], rows)
    results = b.results(
        nn.CrossEntropyOp, m["x"], flat, **({"log_softmax": UnitAttr()} if is_read else {})
    )
    losses = b.reshape(b.value(nn.NegOp, results[0]), (*rows, 1))
    return {taken: losses, **({log_p: results[1]} if is_read else {})}


@raises(log_p_grad, [nn.LogSoftmaxGradOp])
def _(b: Builder, m: Match) -> Replacements | None:
    rows = _shape(m["labels"])[:-1]
    flat, cotangent = (b.reshape(m[n], rows) for n in ("labels", "dy"))
    cotangent = b.value(nn.NegOp, cotangent)
    return {log_p_grad: b.value(nn.CrossEntropyGradOp, m["log_p"], flat, cotangent)}


def _equal(op: nn.CompareOp) -> bool:
    return op.how.data == "eq"


def _counts_classes(op: nn.IotaOp) -> bool:
    rank = len(_shape(op.out))
    return axis_of(op.properties, "dim", rank) == rank - 1


classes = OpTerm(nn.IotaOp, (), _counts_classes)
one_hot = OpTerm(
    nn.ConvertOp,
    (
        either(*(OpTerm(nn.CompareOp, both, _equal) for both in
                 ((labels, classes), (classes, labels)))),
    ),
)  # fmt: skip


def _sums_classes(op: nn.ReduceOp) -> bool:
    rank = len(_shape(op.x))
    return op.kind.data == "sum" and rank - 1 in dims_of(op.properties, "dims", rank)


def by_one_hot(sign: float) -> None:
    """The sum over classes of one-hot labels and logarithms. A label that is no class selects
    nothing: its loss is 0."""
    term = OpTerm(nn.ReduceOp, (sign * one_hot * log_p,), _sums_classes)

    @raises(term, [nn.ReduceOp])
    def _(b: Builder, m: Match) -> Replacements | None:
        op, shape, ids = m.parts[term].owner, _shape(m["x"]), m["labels"]
        assert isinstance(op, nn.ReduceOp)
        element = unsharded_type(ids).element_type
        if _shape(ids) != (*shape[:-1], 1) or element not in (i32, i64):
            return None
        if _shape(m.parts[one_hot]) != shape:
            return None
        no_class, end = (b.number(n, element) for n in (-1, shape[-1]))
        flat = b.reshape(ids, shape[:-1])
        is_below = b.value(nn.CompareOp, flat, end, how=word(nn.ComparisonAttr, "lt"))
        known = b.value(nn.MaxOp, b.value(nn.SelectOp, is_below, flat, no_class), no_class)
        losses = b.value(nn.CrossEntropyOp, m["x"], known, ignore=int_attr(-1))
        if sign > 0:
            losses = b.value(nn.NegOp, losses)
        dims = [d for d in dims_of(op.properties, "dims", len(shape)) if d != len(shape) - 1]
        if dims:
            losses = b.reduced(losses, "sum", dims, op.keep is not None)
        return {term: b.reshape(losses, _shape(m.parts[term]))}


by_one_hot(1.0)
by_one_hot(-1.0)

# ---- norms ----

weight, bias = map(anything, ("weight", "bias"))
u = dy * weight


def of_power(x: Term, power: Term) -> ProductTerm:
    """The cotangent of the mean of the squares of x, whose root x is divided by."""
    slope = either(total(x * u) / (sqrt(power) * power),
                   total(x * u / (sqrt(power) * sqrt(power))) / sqrt(power))  # fmt: skip
    return -0.5 * slope


def _norm_props(m: Match, *parameters: str) -> dict[str, Attribute] | None:
    """The properties of a norm; None unless its parameters have the shape of the rows, which are
    the trailing dimensions."""
    shape = _shape(m["x"])
    n = len(m.dims)
    if m.dims != tuple(range(len(shape) - n, len(shape))):
        return None
    if any(_shape(m[p]) != shape[-n:] for p in parameters):
        return None
    return {"eps": float_attr(decimal(m.numbers["eps"], _element(m["x"])))}


def _with_rest(b: Builder, m: Match, dx: SSAValue) -> SSAValue:
    """Return a cotangent, with that of other uses if there are any."""
    return b.value(nn.AddOp, m["rest"], dx) if "rest" in m.values else dx


def row_norm(
    norm: Term, near: Term, kind: type[nn.RowNorm], parameters: Sequence[str],
    sums: Sequence[Term], dxs: Iterable[Term],
) -> None:  # fmt: skip
    """`kind` of x and its parameters, a term of which is `near`. Cotangents: of the
    parameters `sums`, of x one of `dxs`, alone or added to the cotangent `rest` of another use."""

    @raises(norm, ARITHMETIC)
    def _(b: Builder, m: Match) -> Replacements | None:
        props = _norm_props(m, *parameters)
        if props is None or _type(m["x"]) != _type(m.parts[norm]):
            return None
        return {norm: b.value(kind, m["x"], *(m[p] for p in parameters), **props)}

    for root in (root for dx in dxs for root in (dx, rest + dx)):

        @raises(root, SUMS, [(norm, near)], [(s, dy) for s in sums])
        def _(b: Builder, m: Match, root: Term = root) -> Replacements | None:
            props, x = _norm_props(m, *parameters), m["x"]
            lead = tuple(range(len(_shape(x)) - len(m.dims)))
            if props is None or (LEAD in m.rows and m.rows[LEAD].dims != lead):
                return None
            if any(_type(m[n]) != _type(m.parts[root]) for n in ("x", "dy")):
                return None
            if statistic_of(x, len(m.dims)).element_type != unsharded_type(x).element_type:
                return None
            b.before(norm)
            operands = x, *(m[p] for p in parameters)
            y, *statistics = b.results(kind, *operands, statistics=UnitAttr(), **props)
            b.before(root, *sums)
            dx, *others = b.results(kind.GRADIENT, x, m["weight"], m["dy"], *statistics)
            return {root: _with_rest(b, m, dx), norm: y, **dict(zip(sums, others, strict=True))}


centred = x - mean(x)
variance = mean(square(centred)) + eps


def _layer_norm_dxs() -> Iterator[Term]:
    through_mean = u / sqrt(variance)
    through_variance = centred * of_power(centred, variance) * PER_ROW
    for through in ((through_mean, through_variance, through_variance),
                    (through_mean, 2.0 * through_variance)):  # fmt: skip
        cotangent = sum(through[1:], start=through[0])
        yield cotangent - mean(cotangent)
    once = through_mean + 2.0 * through_variance  # the variance has a mean of its own
    yield once - mean(through_mean) - mean(2.0 * through_variance)


row_norm(centred * weight / sqrt(variance) + bias, variance, nn.LayerNormOp, ("weight", "bias"),
         (summed(dy * centred / sqrt(variance)), summed(dy)), _layer_norm_dxs())  # fmt: skip

power_of_x = mean(square(x)) + eps
through_power = x * of_power(x, power_of_x) * PER_ROW
row_norm(x * weight / sqrt(power_of_x), power_of_x, nn.RmsNormOp, ("weight",),
         (summed(dy * x / sqrt(power_of_x)),),
         (u / sqrt(power_of_x) + through_power + through_power,
          u / sqrt(power_of_x) + 2.0 * through_power))  # fmt: skip

# ---- layer norms by E[x^2] - E[x]^2 ----

difference = mean(square(x)) - square(mean(x))
clipped = maximum(difference, 0.0)
fast_variance = either(clipped, difference) + eps


def _equals_clipped(x: Term, yes: float, no: float) -> OpTerm:
    compared = OpTerm(nn.CompareOp, (x, clipped), _equal)
    return OpTerm(nn.SelectOp, (compared, NumberTerm(yes), NumberTerm(no)))


def _fast_dxs() -> Iterator[Term]:
    """The cotangent of a maximum goes to the greater operand, and half to each of equal ones."""
    share = _equals_clipped(difference, 1.0, 0.0) / _equals_clipped(NumberTerm(0.0), 2.0, 1.0)
    of_variance = of_power(centred, fast_variance)
    of_difference = either(of_variance * share, of_variance)
    through_mean = u / sqrt(fast_variance)
    of_mean = of_difference * mean(x)
    all_of_mean = either(
        -total(through_mean) - 2.0 * of_mean, -total(through_mean) - of_mean - of_mean
    )
    through_square = x * of_difference * PER_ROW
    for through in ((through_square, through_square), (2.0 * through_square,)):
        yield sum(through, start=through_mean + all_of_mean * PER_ROW)


row_norm(centred * weight / sqrt(fast_variance) + bias, fast_variance, nn.LayerNormOp,
         ("weight", "bias"), (summed(dy * centred / sqrt(fast_variance)), summed(dy)),
         _fast_dxs())  # fmt: skip

# ---- means ----


mean_of_row = mean(x)


@raises(mean_of_row, PRODUCTS)
def _(b: Builder, m: Match) -> Replacements | None:
    shape = _shape(m.parts[mean_of_row])
    new = b.reduced(m["x"], "mean", m.dims, len(shape) == len(_shape(m["x"])))
    return {mean_of_row: b.reshape(new, shape)}


reduction = OpTerm(nn.ReduceOp, (x,))
kept = OpTerm(nn.ReshapeOp, (reduction,))


@raises(kept, [nn.ReshapeOp], of_floats=False)
def _(b: Builder, m: Match) -> Replacements | None:
    """A reduction whose dimensions are put back with size 1."""
    op, shape = m.parts[reduction].owner, _shape(m["x"])
    assert isinstance(op, nn.ReduceOp)
    dims = dims_of(op.properties, "dims", len(shape))
    if _shape(m.parts[kept]) != tuple(1 if d in dims else n for d, n in enumerate(shape)):
        return None
    return {kept: b.reduced(m["x"], op.kind.data, dims)}


# ---- products of transposed values ----

y = anything("y")
permuted = OpTerm(nn.TransposeOp, (x,))
product = OpTerm(nn.EinsumOp, (x, y))
transposed_product = OpTerm(nn.TransposeOp, (product,))
twice = OpTerm(nn.TransposeOp, (permuted,))


def _perm(v: SSAValue) -> Sequence[int]:
    op = v.owner
    assert isinstance(op, nn.TransposeOp)
    return dims_of(op.properties, "perm", len(_shape(v)))


def _einsum(b: Builder, x: SSAValue, y: SSAValue, left: str, right: str, out: str) -> SSAValue:
    return b.value(nn.EinsumOp, x, y, equation=string_attr(f"{left},{right}->{out}"))


@raises(transposed_product, [nn.TransposeOp], of_floats=False)
def _(b: Builder, m: Match) -> Replacements | None:
    left, right, out = letters_of(m.parts[product])
    permuted_out = "".join(out[d] for d in _perm(m.parts[transposed_product]))
    return {transposed_product: _einsum(b, m["x"], m["y"], left, right, permuted_out)}


def _of_transposed(side: int) -> None:
    operands = (permuted, y) if side == 0 else (y, permuted)
    term = OpTerm(nn.EinsumOp, operands)

    @raises(term, [nn.EinsumOp], of_floats=False)
    def _(b: Builder, m: Match) -> Replacements | None:
        left, right, out = letters_of(m.parts[term])
        perm = _perm(m.parts[permuted])
        letters = (left, right)[side]
        before = "".join(letters[perm.index(d)] for d in range(len(perm)))
        if side == 0:
            return {term: _einsum(b, m["x"], m["y"], before, right, out)}
        return {term: _einsum(b, m["y"], m["x"], left, before, out)}


_of_transposed(0)
_of_transposed(1)


@raises(twice, [nn.TransposeOp], of_floats=False)
def _(b: Builder, m: Match) -> Replacements | None:
    outer, inner = (_perm(m.parts[t]) for t in (twice, permuted))
    perm = [inner[d] for d in outer]
    if perm == [*range(len(perm))]:
        return {twice: m["x"]}
    return {twice: b.value(nn.TransposeOp, m["x"], perm=dims_attr(*perm))}


reshaped = OpTerm(nn.ReshapeOp, (x,))
reshaped_twice = OpTerm(nn.ReshapeOp, (reshaped,))


@raises(reshaped_twice, [nn.ReshapeOp], of_floats=False)
def _(b: Builder, m: Match) -> Replacements | None:
    return {reshaped_twice: b.reshape(m["x"], _shape(m.parts[reshaped_twice]))}


transposed_reduction = OpTerm(nn.TransposeOp, (reduction,))


@raises(transposed_reduction, [nn.TransposeOp], [(permuted, x)])
def _(b: Builder, m: Match) -> Replacements | None:
    """A reduction of a value that the program also has transposed."""
    op, perm = m.parts[reduction].owner, _perm(m.parts[permuted])
    assert isinstance(op, nn.ReduceOp)
    dims = dims_of(op.properties, "dims", len(perm))
    left = [d for d in range(len(perm)) if d not in dims]
    of_result = [left[d] for d in _perm(m.parts[transposed_reduction])] if op.keep is None else None
    if of_result != [d for d in perm if d not in dims]:
        return None
    b.before(transposed_reduction, permuted)
    moved = b.value(nn.TransposeOp, m["x"], perm=dims_attr(*perm))
    reduced = b.reduced(moved, op.kind.data, [perm.index(d) for d in dims], False)
    return {transposed_reduction: reduced, permuted: moved}


# ---- attention ----


weighted = OpTerm(nn.EinsumOp, (x, y))
score_cotangent = OpTerm(nn.SoftmaxGradOp, (x, dy))


@raises(weighted, [nn.EinsumOp])
def _(b: Builder, m: Match) -> Replacements | None:
    form = attention_form(m.parts[weighted])
    if form is None:
        return None
    return {weighted: attention(b, form, m.parts[weighted])}


@raises(score_cotangent, [nn.SoftmaxGradOp])
def _(b: Builder, m: Match) -> Replacements | None:
    """An attention that JAX has differentiated. The cotangent itself dies."""
    form = attention_gradient(m.parts[score_cotangent])
    return None if form is None else attention_with_gradient(b, form)


# ---- parts, one beside the other ----

widened = OpTerm(nn.PadOp, (y,))
side_by_side = OpTerm(nn.AddOp, (x, widened))


@raises(side_by_side, [nn.AddOp], of_floats=False)
def _(b: Builder, m: Match) -> Replacements | None:
    """A sum of padded values that do not overlap and fill the sum: a concatenation."""
    pads = [*_pads(m.parts[side_by_side])]
    shape = _shape(m.parts[side_by_side])
    low, high = ([ints_of(p.properties, end, len(shape)) for p in pads] for end in ("low", "high"))
    axes = {d for ends in (*low, *high) for d, n in enumerate(ends) if n}
    if len(pads) < 2 or len(axes) != 1 or any(nn.PadOp.filling(p.properties) for p in pads):
        return None
    (axis,) = axes
    pads.sort(key=lambda p: ints_of(p.properties, "low", len(shape))[axis])
    end = 0
    for p in pads:
        if ints_of(p.properties, "low", len(shape))[axis] != end:
            return None
        end += _shape(p.x)[axis]
    if end != shape[axis]:
        return None
    return {side_by_side: b.value(nn.ConcatOp, *(p.x for p in pads), axis=int_attr(axis))}


def _pads(v: SSAValue) -> Iterator[nn.PadOp]:
    """Yield the padded values of a sum; nothing for a sum of others."""
    op = v.owner
    if isinstance(op, nn.PadOp):
        yield op
    elif isinstance(op, nn.AddOp):
        parts = [[*_pads(side)] for side in op.operands]
        if all(parts):
            yield from (p for part in parts for p in part)


# ---- optimizers ----


def is_state(v: SSAValue) -> bool:
    return isinstance(v, BlockArgument)


def _donated_as(old: SSAValue, new: SSAValue) -> train.Role | None:
    """The role of an argument that is donated and has a value after the step; None for others."""
    block = old.owner
    assert isinstance(block, Block) and isinstance(old, BlockArgument)
    f = block.parent_op()
    if not isinstance(f, FuncOp) or f.arg_attrs is None or f.res_attrs is None:
        return None
    argument = train.Argument.of(f.arg_attrs.data[old.index].data)
    results = [u.index for u in new.uses if isinstance(u.operation, ReturnOp)]
    updated = {train.text_attr(f.res_attrs.data[i].data, UPDATES) for i in results}
    return argument.role if argument.key in updated - {None} else None


def is_scalar(v: SSAValue) -> bool:
    return not _shape(v)


w, g, m1, m2 = (
    anything("w", is_state),
    anything("g"),
    anything("m", is_state),
    anything("v", is_state),
)
rate, count = anything("rate", is_scalar), anything("count", is_scalar)
new_m = factor("beta1") * m1 + factor("rest1") * g
new_v = factor("beta2") * m2 + factor("rest2") * square(g)
unbiased_m = new_m / (1.0 - power(number("base1"), count))
unbiased_v = new_v / (1.0 - power(number("base2"), count))
direction = unbiased_m / (sqrt(unbiased_v) + eps)


def _are_weights(m: Match, n: dict[str, float]) -> bool:
    """Whether the weights of both means add up to 1, and are those of the corrections."""
    return all(
        n[f"base{i}"] == n[f"beta{i}"] and m.is_close(1 - n[f"beta{i}"], n[f"rest{i}"])
        for i in (1, 2)
    )


def adam(kind: type[TensorOp], step: Term) -> None:
    """w, m and v after a step in a direction, whose learning rate is a number or a scalar."""
    for new_w in (w - factor("lr") * step, w - rate * step):

        @raises(new_w, SUMS)
        def _(b: Builder, m: Match, new_w: Term = new_w) -> Replacements | None:
            n = {name: decimal(number, _element(m["w"])) for name, number in m.numbers.items()}
            if not _are_weights(m, n) or any(_type(m[name]) != _type(m["w"]) for name in "gmv"):
                return None
            hyper = {
                "beta1": n["beta1"], "beta2": n["beta2"], "eps": n["eps"],
                "weight_decay": n.get("decay", 0.0),
            }  # fmt: skip
            props = {k: float_attr(x) for k, x in hyper.items()}
            steps = m["count"]
            if not isinstance(unsharded_type(steps).element_type, AnyFloat):
                steps = b.scalar(steps, i64)
            corrections = [
                b.of_scalar(train.BiasCorrectionOp, steps, beta=props[f"beta{i}"]) for i in (1, 2)
            ]
            lr = b.number(n["lr"]) if "lr" in n else b.scalar(m["rate"], f64)
            names = [m[name] for name in "wgmv"]
            new = b.results(kind, *names, *corrections, lr, **props)
            return {new_w: new[0], new_m: new[1], new_v: new[2]}


adam(train.AdamOp, direction)
adam(train.AdamWOp, direction + factor("decay") * w)


def descent(kind: type[train.Update], step: Term, new_m: Term | None = None) -> None:
    """w, and m if there is one, after a step in a direction. A sum of an argument and a multiple of
    another value is a step only if the argument is donated, and the sum is its new value."""
    states = "m" if new_m else ""
    for new_w in (w - factor("lr") * step, w - rate * step):

        @raises(new_w, SUMS)
        def _(b: Builder, m: Match, new_w: Term = new_w) -> Replacements | None:
            n = {name: decimal(number, _element(m["w"])) for name, number in m.numbers.items()}
            if (
                any(_type(m[name]) != _type(m["w"]) for name in f"g{states}")
                or any(number <= 0.0 for number in n.values())
                or _donated_as(m["w"], m.parts[new_w]) is not train.Role.PARAMETER
                or (new_m and _donated_as(m["m"], m.parts[new_m]) is None)
            ):
                return None
            hyper = {"weight_decay": n.get("decay", 0.0), "momentum": n.get("momentum")}
            props = {k: float_attr(x) for k, x in hyper.items() if x is not None}
            lr = b.number(n["lr"]) if "lr" in n else b.scalar(m["rate"], f64)
            results = b.results(kind, *(m[name] for name in f"wg{states}"), lr, **props)
            return dict(zip((new_w, *([new_m] if new_m else ())), results, strict=True))


for gradient in (g + factor("decay") * w, g):
    velocity = factor("momentum") * m1 + gradient
    descent(train.NesterovOp, gradient + factor("momentum") * velocity, velocity)
    descent(train.MomentumOp, velocity, velocity)
for gradient in (g + factor("decay") * w, g):
    descent(train.SgdOp, gradient)
