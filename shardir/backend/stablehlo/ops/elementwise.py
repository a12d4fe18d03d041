"""Elementwise ops with a form of their own, and those by position."""

import math
from collections.abc import Callable
from typing import Any

from xdsl.ir import Operation

from shardir.backend.stablehlo.literals import NARROW, element_of
from shardir.backend.stablehlo.place import DevicePlace
from shardir.backend.stablehlo.traced import TracedArray
from shardir.backend.stablehlo.writer import WriteOp
from shardir.dialects import nn
from shardir.dialects.nn.properties import int_of


def _same(name: str) -> WriteOp:
    return lambda p, op, x: x.same(name)


def _binary(name: str) -> WriteOp:
    def write(p: DevicePlace, op: Operation, x: TracedArray, y: TracedArray) -> TracedArray:
        lhs, rhs = x.promoted(x, y)
        return lhs.same(name, rhs)

    return write


def of_chlo(name: str, x: TracedArray) -> TracedArray:
    (out,) = x.writer.results(f"chlo.{name}", [x.value], [(x.shape, x.element)], " ")
    x.writer.ops[-1].types = f"{x.value.type} -> {out.type}"
    return x.make(out)


def erf(x: TracedArray) -> TracedArray:
    return of_chlo("erf", x)


def _gelu(p: DevicePlace, op: nn.GeluOp, x: TracedArray) -> TracedArray:
    if op.exact is None:
        evaluate: Any = op.evaluate
        return evaluate(p, x)
    return 0.5 * x * (1 + erf(x / math.sqrt(2)))


def _gelu_grad(p: DevicePlace, op: nn.GeluGradOp, x: TracedArray, dy: TracedArray) -> TracedArray:
    if op.exact is None:
        evaluate: Any = op.evaluate
        return evaluate(p, x, dy)
    bell = nn.ExpOp.NUMPY(-0.5 * x * x) / math.sqrt(2 * math.pi)
    return dy * (0.5 * (1 + erf(x / math.sqrt(2))) + x * bell)


def _convert(p: DevicePlace, op: nn.ConvertOp, x: TracedArray) -> TracedArray:
    element = element_of(op.out.type)
    return x.to(element)


def _bitcast(p: DevicePlace, op: nn.BitcastOp, x: TracedArray) -> TracedArray:
    """16-bit floats have the bits of the lower half of an i32."""
    target = element_of(op.out.type)
    if x.element in NARROW:
        return x.op("bitcast_convert", element="ui16").to("i32")
    if target in NARROW:
        return x.to("ui16").op("bitcast_convert", element=target)
    return x.op("bitcast_convert", element=target)


def _identity(p: DevicePlace, op: Operation, x: TracedArray, *_: TracedArray) -> TracedArray:
    return x


def _remainder(p: DevicePlace, op: nn.RemainderOp, x: TracedArray, y: TracedArray) -> TracedArray:
    return x % y


def _triangle(how: str) -> Callable[..., TracedArray]:
    def write(p: DevicePlace, op: nn.TrilOp | nn.TriuOp, x: TracedArray) -> TracedArray:
        rows, columns = (p.iota(x.shape, d) + p.start(op.x, d) for d in (x.ndim - 2, x.ndim - 1))
        bound = rows + int_of(op.properties, "diagonal")
        return columns.compare(how, bound).select(x, x.constant(0, x.element, x.shape))

    return write


WRITERS: dict[type[Operation], WriteOp] = {
    nn.ErfOp: lambda p, op, x: erf(x),
    nn.ErfcOp: lambda p, op, x: of_chlo("erfc", x),
    nn.QuotientOp: _binary("divide"),
    nn.ShiftLeftOp: _binary("shift_left"),
    nn.ShiftRightOp: _binary("shift_right_arithmetic"),
    nn.BitcastOp: _bitcast,
    nn.RsqrtOp: _same("rsqrt"),
    nn.SigmoidOp: _same("logistic"),
    nn.GeluOp: _gelu,
    nn.GeluGradOp: _gelu_grad,
    nn.RemainderOp: _remainder,
    nn.ConvertOp: _convert,
    nn.StopGradientOp: _identity,
    nn.StraightThroughOp: _identity,
    nn.TrilOp: _triangle("LE"),
    nn.TriuOp: _triangle("GE"),
}
