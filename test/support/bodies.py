"""Shorthands for the bodies and arguments of small programs."""

from typing import Any

from shardir.dialects import nn
from shardir.dialects.builder import OpBuilder
from support.harness import Arg


def matmul(b: OpBuilder, x: Any, y: Any) -> Any:
    return b.value(nn.MatmulOp, x, y)


def relu(b: OpBuilder, x: Any) -> Any:
    return b.value(nn.ReluOp, x)


def mean(b: OpBuilder, x: Any, rank: int = 2) -> Any:
    return b.reduce(x, "mean", range(rank))


def f64(*shape: int) -> Arg:
    return Arg("f64", shape)
