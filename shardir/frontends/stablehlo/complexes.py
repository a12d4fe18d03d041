"""Complex numbers as pairs of real ones: a program -> one without complex values.

A complex value becomes two values, its real and its imaginary part. An argument or a result of the
program becomes one value with a further dimension of size 2 (as torch.view_as_real has it).

    "multiply": (a + bi)(c + di) = (ac - bd) + (ad + bc)i
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from xdsl.dialects.builtin import LocationAttr

from shardir.diagnostics import ShardirError
from shardir.frontends.stablehlo.form import (
    HloBlock,
    HloFunction,
    HloOp,
    HloProgram,
    HloType,
    HloValue,
)

ComplexParts = tuple[HloValue, HloValue]
COMPLEX: Mapping[str, str] = {"complex<f32>": "f32", "complex<f64>": "f64"}
"""The element type of the parts of each complex one."""

SHARDING = "sdy.sharding"

PARTWISE = frozenset(
    f"stablehlo.{name}"
    for name in (
        "add", "subtract", "negate", "select", "reshape", "transpose", "broadcast_in_dim", "slice",
        "concatenate", "reverse", "pad", "dynamic_slice", "dynamic_update_slice", "gather",
        "scatter", "return", "all_reduce", "reduce_scatter", "all_gather", "all_to_all",
        "collective_permute", "collective_broadcast",
    )
) | {
    f"sdy.{name}"
    for name in (
        "sharding_constraint", "data_flow_edge", "propagation_barrier", "reshard", "all_gather",
        "all_slice", "all_to_all", "collective_permute", "all_reduce", "reduce_scatter",
    )
}  # fmt: skip
"""Ops that do the same to the real and to the imaginary parts."""

BY_BOTH = frozenset((
    "stablehlo.while", "stablehlo.case", "stablehlo.if", "stablehlo.composite", "func.call",
    "stablehlo.optimization_barrier", "stablehlo.reduce", "stablehlo.reduce_window",
    "stablehlo.sort", "func.return", "sdy.manual_computation", "sdy.return",
))  # fmt: skip
"""Ops of any number of values, among which both parts are."""


def is_complex(value: HloValue) -> bool:
    return value.type.element in COMPLEX


def is_lowered(name: str) -> bool:
    """Whether an op of complex numbers becomes one of real ones here."""
    return name in PARTWISE or name in BY_BOTH or name in FORMULAS


def without_complex(program: HloProgram) -> HloProgram:
    """Return a program without complex values. Both parts of a value have its sharding."""
    functions = {}
    for name, f in program.functions.items():
        lowering = _Lowering()
        if not _has_complex(f.block):
            functions[name] = f
        elif name == "main":
            functions[name] = lowering.main(f)
        else:
            sides = (f.block.arguments, f.arguments), (f.block.results, f.results)
            arguments, results = (
                [a for v, a in zip(*side, strict=True) for _ in range(1 + is_complex(v))]
                for side in sides
            )
            functions[name] = HloFunction(f.name, lowering.block(f.block), arguments, results)
    return replace(program, functions=functions)


def _has_complex(block: HloBlock) -> bool:
    return any(map(is_complex, block.arguments)) or any(
        any(map(is_complex, (*op.operands, *op.results))) or any(map(_has_complex, op.regions))
        for op in block.ops
    )


def real_type(t: HloType) -> HloType:
    return HloType(t.shape, COMPLEX.get(t.element, t.element), t.problem)


class _Lowering:
    def __init__(self) -> None:
        self.parts: dict[HloValue, ComplexParts] = {}
        self.ops: list[HloOp] = []
        self.location: LocationAttr | None = None

    # ---- blocks ----

    def main(self, f: HloFunction) -> HloFunction:
        """Lower the function that is imported: complex arguments and results are one value."""
        arguments: list[HloValue] = []
        for a in f.block.arguments:
            if is_complex(a):
                both = HloValue(_stacked(a.type), a.name)
                arguments.append(both)
                self.parts[a] = self._split(both)
            else:
                arguments.append(a)
        for op in f.block.ops[:-1]:
            self.op(op)
        results: list[HloValue] = []
        for r in f.block.results:
            if is_complex(r):
                shape = (*r.type.shape, 1)
                columns = [self.emit("reshape", p, shape=shape) for p in self.parts[r]]
                t = _stacked(r.type)
                results.append(
                    self.emit("concatenate", *columns, shape=t.shape, dimension=len(shape) - 1)
                )
            else:
                results.append(r)
        end = HloOp("func.return", results, (), {}, (), None)
        sides = (f.block.arguments, f.arguments), (f.block.results, f.results)
        attributes = (
            [_of_pairs(a) if is_complex(v) else a for v, a in zip(*side, strict=True)]
            for side in sides
        )
        return HloFunction(f.name, HloBlock(arguments, [*self.ops, end]), *attributes)

    def _split(self, both: HloValue) -> ComplexParts:
        *shape, _ = both.type.shape
        zeros = (0,) * len(shape)
        out = []
        for k in (0, 1):
            column = self.emit(
                "slice", both, shape=(*shape, 1), start_indices=(*zeros, k),
                limit_indices=(*shape, k + 1), strides=(1,) * (len(shape) + 1),
            )  # fmt: skip
            out.append(self.emit("reshape", column, shape=tuple(shape)))
        return out[0], out[1]

    def block(self, block: HloBlock) -> HloBlock:
        """Lower a block: each complex argument and result becomes two."""
        outer, self.ops = self.ops, []
        arguments: list[HloValue] = []
        for a in block.arguments:
            if is_complex(a):
                t = real_type(a.type)
                self.parts[a] = HloValue(t), HloValue(t)
                arguments += self.parts[a]
            else:
                arguments.append(a)
        for op in block.ops:
            self.op(op)
        out, self.ops = HloBlock(arguments, self.ops), outer
        return out

    def flat(self, values: Sequence[HloValue]) -> list[HloValue]:
        return [p for v in values for p in (self.parts[v] if is_complex(v) else (v,))]

    # ---- ops ----

    def op(self, op: HloOp) -> None:
        self.location = op.location
        has_complex = any(map(is_complex, (*op.operands, *op.results)))
        if not has_complex and not any(map(_has_complex, op.regions)):
            self.ops.append(op)
        elif op.name in PARTWISE and all(map(_is_partwise, op.regions)):
            self.partwise(op)
        elif op.name in BY_BOTH:
            if op.name.startswith("stablehlo.reduce") and all(map(_is_partwise, op.regions)):
                self.partwise(op)
            else:
                self.by_both(op)
        elif (formula := FORMULAS.get(op.name)) is not None:
            out = formula(self, op, *(self.parts.get(v, (v, v)) for v in op.operands))
            (result,) = op.results
            sharding = {k: v for k, v in op.attributes.items() if k == SHARDING}
            if not is_complex(result):  # readers have the value itself
                self.emit_as("reshape", result, out[0], **sharding)
            elif sharding:
                real, imag = (self.emit_as("reshape", HloValue(p.type), p, **sharding) for p in out)
                out = real, imag
            self.parts[result] = out
        else:  # the importer refuses it, and what reads its parts is nothing
            name = f"{op.name} of complex numbers"
            results = [HloValue(real_type(r.type)) if is_complex(r) else r for r in op.results]
            self.ops.append(HloOp(name, (), results, op.attributes, (), op.location))
            self.parts.update((r, (v, v)) for r, v in zip(op.results, results, strict=True))

    def partwise(self, op: HloOp) -> None:
        """Do an op to both parts."""
        if not op.results:
            self.by_both(op)
            return
        sides = []
        for k in (0, 1):
            operands = [self.parts[v][k] if is_complex(v) else v for v in op.operands]
            results = [HloValue(real_type(r.type)) for r in op.results]
            regions = [_part_of(block, k) for block in op.regions]
            self.ops.append(replace_op(op, operands, results, regions))
            sides.append(results)
        self.parts.update(zip(op.results, zip(*sides, strict=True), strict=True))

    def by_both(self, op: HloOp) -> None:
        results: list[HloValue] = []
        for r in op.results:
            if is_complex(r):
                t = real_type(r.type)
                self.parts[r] = HloValue(t), HloValue(t)
                results += self.parts[r]
            else:
                results.append(r)
        regions = [self.block(block) for block in op.regions]
        if op.name == "stablehlo.sort":  # arguments are pairs of the elements of an operand
            (block,) = op.regions
            pairs = zip(block.arguments[::2], block.arguments[1::2], strict=True)
            sides = [zip(*(self.flat([v]) for v in pair), strict=True) for pair in pairs]
            regions[0].arguments = [v for side in sides for pair in side for v in pair]
        attributes = _for_both(op)
        self.ops.append(
            HloOp(op.name, self.flat(op.operands), results, attributes, regions, op.location)
        )

    def emit(
        self, name: str, *operands: HloValue, shape: tuple[int, ...] | None = None,
        element: str = "", **attributes: Any,
    ) -> HloValue:  # fmt: skip
        """Add an op whose result has the type of the first operand, but for shape and element."""
        t = operands[0].type
        result = HloValue(HloType(t.shape if shape is None else shape, element or t.element))
        return self.emit_as(name, result, *operands, **attributes)

    def emit_as(
        self, name: str, result: HloValue, *operands: HloValue, **attributes: Any
    ) -> HloValue:  # fmt: skip
        name = name if "." in name else f"stablehlo.{name}"
        self.ops.append(HloOp(name, operands, [result], attributes, (), self.location))
        return result

    def constant(self, number: float, like: HloValue) -> HloValue:
        value = np.full(like.type.shape, number)
        return self.emit_as("constant", HloValue(like.type), value=value)

    def compare(self, x: HloValue, how: str, y: HloValue) -> HloValue:
        return self.emit(
            "compare", x, y, element="i1", comparison_direction=how, compare_type="FLOAT"
        )


def replace_op(
    op: HloOp, operands: Sequence[HloValue], results: Sequence[HloValue],
    regions: Sequence[HloBlock],
) -> HloOp:  # fmt: skip
    return HloOp(op.name, operands, results, op.attributes, regions, op.location)


def _stacked(t: HloType) -> HloType:
    return HloType((*t.shape, 2), COMPLEX[t.element], t.problem)


def _of_pairs(attributes: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the attributes of an argument or a result with a further dimension, which is whole."""
    if (text := attributes.get(SHARDING)) is None:
        return attributes
    dims = re.sub(r"\[(.*?)\]", lambda m: f"[{m[1]}, {{}}]" if m[1] else "[{}]", text, count=1)
    return {**attributes, SHARDING: dims}


def _for_both(op: HloOp) -> Mapping[str, Any]:
    """Return the attributes of an op, with a sharding for each part of its operands and results."""
    attributes = dict(op.attributes)
    for key, values in ((SHARDING, op.results), ("out_shardings", op.results),
                        ("in_shardings", op.operands)):  # fmt: skip
        if (text := attributes.get(key)) is not None:
            entries = re.findall(r"<@[^<>]*>", text)
            both = [
                e for v, e in zip(values, entries, strict=True) for _ in range(1 + is_complex(v))
            ]
            attributes[key] = f"#sdy.sharding_per_value<[{', '.join(both)}]>"
    return attributes


def _is_partwise(block: HloBlock) -> bool:
    return all(op.name in PARTWISE for op in block.ops)


def _part_of(block: HloBlock, part: int) -> HloBlock:
    """Return a region of ops that do the same to both parts, for one part."""
    values = {a: HloValue(real_type(a.type)) for a in block.arguments}
    ops = []
    for op in block.ops:
        results = [HloValue(real_type(r.type)) for r in op.results]
        ops.append(replace_op(op, [values.get(v, v) for v in op.operands], results, ()))
        values.update(zip(op.results, results, strict=True))
    return HloBlock([values[a] for a in block.arguments], ops)


# ---- formulas: of the lowering, the op and the parts of the operands ----


def _multiply(l: _Lowering, op: HloOp, x: ComplexParts, y: ComplexParts) -> ComplexParts:
    (a, b), (c, d) = x, y
    real = l.emit("subtract", l.emit("multiply", a, c), l.emit("multiply", b, d))
    return real, l.emit("add", l.emit("multiply", a, d), l.emit("multiply", b, c))


def _divide(l: _Lowering, op: HloOp, x: ComplexParts, y: ComplexParts) -> ComplexParts:
    """By the larger part of the divisor (Smith, 1962), so that no square overflows."""
    (a, b), (c, d) = x, y
    is_real = l.compare(l.emit("abs", c), "GE", l.emit("abs", d))

    def either(p: HloValue, q: HloValue) -> HloValue:
        return l.emit_as("select", HloValue(p.type), is_real, p, q)

    large, small = either(c, d), either(d, c)
    ratio = l.emit("divide", small, large)
    scale = l.emit("add", large, l.emit("multiply", small, ratio))
    a_r, b_r = l.emit("multiply", a, ratio), l.emit("multiply", b, ratio)
    real = either(l.emit("add", a, b_r), l.emit("add", a_r, b))
    imag = either(l.emit("subtract", b, a_r), l.emit("subtract", b_r, a))
    return l.emit("divide", real, scale), l.emit("divide", imag, scale)


def _abs(l: _Lowering, op: HloOp, x: ComplexParts) -> ComplexParts:
    """The hypotenuse, by the larger part, so that no square overflows."""
    sizes = [l.emit("abs", p) for p in x]
    large, small = l.emit("maximum", *sizes), l.emit("minimum", *sizes)
    ratio = l.emit("divide", small, large)
    one = l.constant(1, large)
    out = l.emit("sqrt", l.emit("add", one, l.emit("multiply", ratio, ratio)))
    is_plain = l.compare(small, "EQ", large)  # 0 / 0 is NaN
    equal = l.emit("multiply", large, l.constant(math.sqrt(2), large))
    out = l.emit_as("select", HloValue(large.type), is_plain, equal, l.emit("multiply", large, out))
    is_infinite = l.compare(large, "EQ", l.constant(math.inf, large))
    out = l.emit_as("select", HloValue(large.type), is_infinite, large, out)
    return out, out


def _complex(l: _Lowering, op: HloOp, x: ComplexParts, y: ComplexParts) -> ComplexParts:
    return x[0], y[0]


def _constant(l: _Lowering, op: HloOp) -> ComplexParts:
    values, t = op.attributes["value"], HloValue(real_type(op.results[0].type))
    if not isinstance(values, np.ndarray):
        raise ShardirError(f"expected complex numbers that can be read, got {str(values)[:60]}")
    real = l.emit_as("constant", HloValue(t.type), value=values.real.copy())
    return real, l.emit_as("constant", HloValue(t.type), value=values.imag.copy())


def _convert(l: _Lowering, op: HloOp, x: ComplexParts) -> ComplexParts:
    (operand,), (result,) = op.operands, op.results
    element = COMPLEX.get(result.type.element, result.type.element)
    real = l.emit("convert", x[0], element=element)
    if not is_complex(operand):
        return real, l.constant(0, real)
    if not is_complex(result):
        return real, real
    return real, l.emit("convert", x[1], element=element)


def _compare(l: _Lowering, op: HloOp, x: ComplexParts, y: ComplexParts) -> ComplexParts:
    how = op.attributes["comparison_direction"]
    parts = [l.compare(p, how, q) for p, q in zip(x, y, strict=True)]
    out = l.emit("and" if how == "EQ" else "or", *parts)
    return out, out


def _dot(l: _Lowering, op: HloOp, x: ComplexParts, y: ComplexParts) -> ComplexParts:
    """Products of parts, as those of numbers."""
    is_real = [not is_complex(v) for v in op.operands]
    t = real_type(op.results[0].type)

    def dot(p: HloValue, q: HloValue) -> HloValue:
        return l.emit_as(op.name, HloValue(t), p, q, **op.attributes)

    (a, b), (c, d) = x, y
    if is_real[0]:
        return dot(a, c), dot(a, d)
    if is_real[1]:
        return dot(a, c), dot(b, c)
    real = l.emit("subtract", dot(a, c), dot(b, d))
    return real, l.emit("add", dot(a, d), dot(b, c))


def _exp(l: _Lowering, op: HloOp, x: ComplexParts) -> ComplexParts:
    size = l.emit("exponential", x[0])
    return (
        l.emit("multiply", size, l.emit("cosine", x[1])),
        l.emit("multiply", size, l.emit("sine", x[1])),
    )


def _expm1(l: _Lowering, op: HloOp, x: ComplexParts) -> ComplexParts:
    """e^x cos y - 1 = (e^x - 1) cos y - 2 sin(y / 2)^2"""
    a, b = x
    half = l.emit("sine", l.emit("multiply", b, l.constant(0.5, b)))
    rest = l.emit("multiply", l.constant(2, b), l.emit("multiply", half, half))
    less = l.emit("multiply", l.emit("exponential_minus_one", a), l.emit("cosine", b))
    imag = l.emit("multiply", l.emit("exponential", a), l.emit("sine", b))
    return l.emit("subtract", less, rest), imag


def _sine(l: _Lowering, op: HloOp, x: ComplexParts) -> ComplexParts:
    """sin x cosh y + i cos x sinh y"""
    a, b = x
    real = l.emit("multiply", l.emit("sine", a), l.emit("chlo.cosh", b))
    return real, l.emit("multiply", l.emit("cosine", a), l.emit("chlo.sinh", b))


def _cosine(l: _Lowering, op: HloOp, x: ComplexParts) -> ComplexParts:
    """cos x cosh y - i sin x sinh y"""
    a, b = x
    real = l.emit("multiply", l.emit("cosine", a), l.emit("chlo.cosh", b))
    imag = l.emit("multiply", l.emit("sine", a), l.emit("chlo.sinh", b))
    return real, l.emit("negate", imag)


def _tanh(l: _Lowering, op: HloOp, x: ComplexParts) -> ComplexParts:
    """With t = tanh x and s = tan y: (t (1 + s^2) + i s (1 - t^2)) / (1 + t^2 s^2), where the
    cosine of y is not 0; written by sines and cosines so that it may be."""
    a, b = x
    t, one = l.emit("tanh", a), l.constant(1, a)
    s, c = l.emit("sine", b), l.emit("cosine", b)
    decay = l.emit("chlo.cosh", a)
    below = l.emit("divide", one, l.emit("multiply", decay, decay))  # 1 - t^2
    ts, imag = l.emit("multiply", t, s), l.emit("multiply", l.emit("multiply", s, c), below)
    base = l.emit("add", l.emit("multiply", c, c), l.emit("multiply", ts, ts))
    return l.emit("divide", t, base), l.emit("divide", imag, base)


def _tan(l: _Lowering, op: HloOp, x: ComplexParts) -> ComplexParts:
    """tan z = -i tanh(i z)"""
    real, imag = _tanh(l, op, (l.emit("negate", x[1]), x[0]))
    return imag, l.emit("negate", real)


def _sign(l: _Lowering, op: HloOp, x: ComplexParts) -> ComplexParts:
    size, _ = _abs(l, op, x)
    zero = l.constant(0, size)
    is_zero = l.compare(size, "EQ", zero)
    real, imag = (
        l.emit_as("select", HloValue(size.type), is_zero, zero, l.emit("divide", p, size))
        for p in x
    )
    return real, imag


def _power(l: _Lowering, op: HloOp, x: ComplexParts, y: ComplexParts) -> ComplexParts:
    """With the size r and the angle a of x, and y = c + di: the size r^c e^(-d a), and the angle
    c a + d ln r; 0 for x = 0, but 0^0 = 1."""
    (c, d), (size, _), angle = y, _abs(l, op, x), l.emit("atan2", x[1], x[0])
    decay = l.emit("exponential", l.emit("negate", l.emit("multiply", d, angle)))
    size_of, log = l.emit("multiply", l.emit("power", size, c), decay), l.emit("log", size)
    turn = l.emit("add", l.emit("multiply", c, angle), l.emit("multiply", d, log))
    real = l.emit("multiply", size_of, l.emit("cosine", turn))
    imag = l.emit("multiply", size_of, l.emit("sine", turn))
    zero, one = l.constant(0, real), l.constant(1, real)

    def both_zero(v: ComplexParts) -> HloValue:
        return l.emit("and", *(l.compare(p, "EQ", zero) for p in v))

    at_zero, no_power = both_zero(x), both_zero(y)
    first = l.emit_as("select", HloValue(real.type), no_power, one, zero)
    return (
        l.emit_as("select", HloValue(real.type), at_zero, first, real),
        l.emit_as("select", HloValue(real.type), at_zero, zero, imag),
    )


def _rsqrt(l: _Lowering, op: HloOp, x: ComplexParts) -> ComplexParts:
    """The conjugate of the root, by the size. The root has the parts sqrt((size + |x|) / 2) and
    y / 2 by it, in this order where x is not negative."""
    a, b = x
    size, _ = _abs(l, op, x)
    half, zero = l.constant(0.5, a), l.constant(0, a)
    large = l.emit(
        "sqrt", l.emit("multiply", l.emit("add", size, l.emit("abs", a)), half)
    )  # fmt: skip
    small = l.emit("divide", l.emit("multiply", b, half), large)
    is_right = l.compare(a, "GE", zero)

    def either(p: HloValue, q: HloValue) -> HloValue:
        return l.emit_as("select", HloValue(p.type), is_right, p, q)

    signed = l.emit_as(
        "select", HloValue(a.type), l.compare(b, "LT", zero), l.emit("negate", large), large
    )
    real, imag = either(large, l.emit("abs", small)), either(small, signed)
    return l.emit("divide", real, size), l.emit("negate", l.emit("divide", imag, size))


def _fft(l: _Lowering, op: HloOp, x: ComplexParts) -> ComplexParts:
    """A discrete transform of a dimension after another, as products with cosines and sines."""
    kind, lengths = str(op.attributes["fft_type"]), [int(n) for n in op.attributes["fft_length"]]
    (operand,) = op.operands
    first = len(operand.type.shape) - len(lengths)
    dims = [*range(first, first + len(lengths))]
    out = x if is_complex(operand) else (x[0], l.constant(0, x[0]))
    for d, n in zip(dims, lengths, strict=True) if kind == "FFT" else ():
        out = _transformed(l, out, d, n, n, -1)
    if kind == "RFFT":
        out = _transformed(l, out, dims[-1], lengths[-1], lengths[-1] // 2 + 1, -1)
        for d, n in zip(dims[:-1], lengths[:-1], strict=True):
            out = _transformed(l, out, d, n, n, -1)
    for d, n in zip(dims, lengths, strict=True) if kind == "IFFT" else ():
        out = _transformed(l, out, d, n, n, 1)
    if kind == "IRFFT":
        for d, n in zip(dims[:-1], lengths[:-1], strict=True):
            out = _transformed(l, out, d, n, n, 1)
        out = _real_inverse(l, out, dims[-1], lengths[-1])
    return out


def _transformed(
    l: _Lowering, x: ComplexParts, dim: int, n: int, count: int, sign: int
) -> ComplexParts:
    """Return `count` frequencies of n numbers; the inverse transform has sign 1 and divides."""
    angles = 2 * np.pi * (np.outer(np.arange(n), np.arange(count)) % n) / n
    scale = 1 / n if sign == 1 else 1
    c, s = np.cos(angles) * scale, sign * np.sin(angles) * scale
    a, b = x
    real = l.emit("subtract", _product(l, a, dim, c), _product(l, b, dim, s))
    return real, l.emit("add", _product(l, a, dim, s), _product(l, b, dim, c))


def _real_inverse(l: _Lowering, x: ComplexParts, dim: int, n: int) -> ComplexParts:
    """Return the n real numbers of n // 2 + 1 frequencies: all but the first, and the last of an
    even n, stand for two."""
    count = n // 2 + 1
    twice = np.array([1 if k == 0 or 2 * k == n else 2 for k in range(count)])[:, None] / n
    angles = 2 * np.pi * (np.outer(np.arange(count), np.arange(n)) % n) / n
    real = _product(l, x[0], dim, np.cos(angles) * twice)
    imag = _product(l, x[1], dim, np.sin(angles) * twice)
    out = l.emit("subtract", real, imag)
    return out, out


def _product(l: _Lowering, x: HloValue, dim: int, matrix: np.ndarray) -> HloValue:
    """Return the product of a dimension with a matrix, whose columns are the new elements."""
    shape, rank = x.type.shape, len(x.type.shape)
    weights = l.emit_as("constant", HloValue(HloType(matrix.shape, x.type.element)), value=matrix)
    numbers = {
        "lhs_batching_dimensions": (), "rhs_batching_dimensions": (),
        "lhs_contracting_dimensions": (dim,), "rhs_contracting_dimensions": (0,),
    }  # fmt: skip
    moved = (*shape[:dim], *shape[dim + 1 :], matrix.shape[1])
    out = l.emit("dot_general", x, weights, shape=moved, dot_dimension_numbers=numbers)
    order = [*range(dim), rank - 1, *range(dim, rank - 1)]
    result = tuple(moved[d] for d in order)
    return l.emit("transpose", out, shape=result, permutation=tuple(order))


Formula = Callable[..., ComplexParts]
"""The parts of a result, of the lowering, the op and the parts of the operands. A real operand
stands for both of its parts; of a real result the first part counts."""

FORMULAS: Mapping[str, Formula] = {
    f"stablehlo.{name}": formula
    for name, formula in (
        ("multiply", _multiply), ("divide", _divide), ("abs", _abs), ("complex", _complex),
        ("real", lambda l, op, x: x), ("imag", lambda l, op, x: x[::-1]), ("constant", _constant),
        ("convert", _convert), ("compare", _compare), ("dot_general", _dot),
        ("convolution", _dot), ("exponential", _exp), ("exponential_minus_one", _expm1),
        ("sine", _sine), ("cosine", _cosine), ("tanh", _tanh), ("tan", _tan), ("sign", _sign),
        ("power", _power), ("rsqrt", _rsqrt), ("fft", _fft),
    )
}  # fmt: skip


def as_complex(values: np.ndarray) -> np.ndarray:
    """Return the complex numbers of a result with a last dimension of size 2."""
    kind = np.complex128 if values.dtype == np.float64 else np.complex64
    out = np.empty(values.shape[:-1], kind)
    out.real, out.imag = values[..., 0], values[..., 1]
    return out


def as_parts(values: np.ndarray) -> np.ndarray:
    """Return complex numbers as real ones with a last dimension of size 2."""
    return np.stack([values.real, values.imag], -1)
