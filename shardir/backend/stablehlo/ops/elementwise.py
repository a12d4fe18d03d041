"""Elementwise ops with a form of their own, and those by position."""

import math
from collections.abc import Callable
from typing import Any

from xdsl.ir import Operation

from shardir.backend.stablehlo.literals import element_of
from shardir.backend.stablehlo.place import Place
from shardir.backend.stablehlo.traced import Traced
from shardir.backend.stablehlo.writer import WriteOp
from shardir.dialects import nn
from shardir.dialects.nn.properties import int_of


def _same(name: str) -> WriteOp:
    return lambda p, op, x: x.same(name)


def erf(x: Traced) -> Traced:
    (out,) = x.writer.results("chlo.erf", [x.value], [(x.shape, x.element)], " ")
    x.writer.ops[-1].types = f"{x.value.type} -> {out.type}"
    return x.make(out)


def _gelu(p: Place, op: nn.GeluOp, x: Traced) -> Traced:
    if op.exact is None:
        evaluate: Any = op.evaluate
        return evaluate(p, x)
    return 0.5 * x * (1 + erf(x / math.sqrt(2)))


def _gelu_grad(p: Place, op: nn.GeluGradOp, x: Traced, dy: Traced) -> Traced:
    if op.exact is None:
        evaluate: Any = op.evaluate
        return evaluate(p, x, dy)
    bell = nn.ExpOp.NUMPY(-0.5 * x * x) / math.sqrt(2 * math.pi)
    return dy * (0.5 * (1 + erf(x / math.sqrt(2))) + x * bell)


def _convert(p: Place, op: nn.ConvertOp, x: Traced) -> Traced:
    element = element_of(op.out.type)
    return x.to(element)


def _identity(p: Place, op: Operation, x: Traced, *_: Traced) -> Traced:
    return x


def _remainder(p: Place, op: nn.RemainderOp, x: Traced, y: Traced) -> Traced:
    return x % y


def _triangle(how: str) -> Callable[..., Traced]:
    def write(p: Place, op: nn.TrilOp | nn.TriuOp, x: Traced) -> Traced:
        rows, columns = (p.iota(x.shape, d) + p.start(op.x, d) for d in (x.ndim - 2, x.ndim - 1))
        bound = rows + int_of(op.properties, "diagonal")
        return columns.compare(how, bound).select(x, x.constant(0, x.element, x.shape))

    return write


WRITERS: dict[type[Operation], WriteOp] = {
    nn.ErfOp: lambda p, op, x: erf(x),
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
