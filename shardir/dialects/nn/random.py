"""Random numbers, and dropout.

    %mask = nn.random <bernoulli, p = 0.5> %key stream 2 : (tensor<i64>) -> tensor<8x4xi1>
    %y = nn.dropout %x, %key p 0.1 stream 3 : (tensor<8x4xf32>, tensor<i64>) -> tensor<8x4xf32>

An element depends only on the key, the stream and its global position (shardir/dialects/random.py).
So results do not depend on the mesh, replicas are equal, shards differ, and a recomputed op draws
equal elements. Each op has a stream of its own, in a loop (`stride 4`) one for each run. All ops
share the key, a state that the step's function increments.
"""

from abc import ABC
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from xdsl.dialects.builtin import (
    AnyFloat,
    FloatAttr,
    IntegerAttr,
    IntegerType,
    TensorType,
    f64,
    i1,
    i64,
)
from xdsl.ir import SSAValue
from xdsl.irdl import (
    irdl_attr_definition,
    operand_def,
    opt_prop_def,
    prop_def,
    result_def,
)

from shardir.algebra.factors import Factors
from shardir.diagnostics import ShardirError, coded
from shardir.dialects.definition import op_definition
from shardir.dialects.dist import tensor
from shardir.dialects.nn.base import STRATEGY, Array, Device, Props, TensorOp, Types, factor_names
from shardir.dialects.nn.properties import float_of, int_of
from shardir.dialects.nn.types import float_element
from shardir.dialects.random import DRAWN, check_range, fill, positions, seed_at, uniform
from shardir.dialects.text import Kinds, OptionsAttr, OptionSpec

if TYPE_CHECKING:
    from shardir.dialects.builder import OpBuilder


@irdl_attr_definition
class DistributionAttr(OptionsAttr):
    """A distribution: `<uniform, low = 0.0, high = 1.0>`, `<normal, mean = 0.0,
    std = 1.0>`, `<integers, low = 0, high = 10>` (without high) or `<bernoulli, p = 0.5>`."""

    name = "nn.distribution"
    KINDS: ClassVar[Kinds] = {
        **DRAWN,
        "bernoulli": {"p": OptionSpec(float)},
    }


def needs_key(t: TensorType) -> None:
    if t != tensor(i64, ()):
        raise ShardirError(coded("T5", f"expected a key of type tensor<i64>, got {t}"))


def check_probability(p: float) -> None:
    if not 0 <= p <= 1:
        raise ShardirError(coded("T10", f"expected p from 0 to 1, got {p}"))


def part_of(device: Device, v: SSAValue) -> list[tuple[int, int]]:
    """The range [start, stop) of each dimension in a device's shard."""
    starts = [device.start(v, d) for d in range(len(device.global_shape(v)))]
    return [(a, a + n) for a, n in zip(starts, device.shape(v), strict=True)]


class Drawn(TensorOp, ABC):
    """An op that draws random numbers, from stream + stride * run, where run is the index of the
    loop's run."""

    key = operand_def(TensorType)
    stream = prop_def(IntegerAttr.constr(type=i64))
    stride = opt_prop_def(IntegerAttr.constr(type=i64))

    def seed(self, key: Array, run: int) -> int:
        stride = 0 if self.stride is None else self.stride.value.data
        return seed_at(int(key), int_of(self.properties, "stream") + stride * run)


@op_definition
class RandomOp(Drawn):
    """Random numbers of a distribution, by key and position"""

    name = "nn.random"
    distribution = prop_def(DistributionAttr)
    out = result_def(TensorType)
    INFERRED: ClassVar[bool] = False
    assembly_format = f"$distribution $key `stream` $stream (`stride` $stride^)? {STRATEGY}"

    @classmethod
    def check_results(cls, operands: Types, results: Types, props: Props) -> None:
        needs_key(operands[0])
        how, element = props["distribution"], results[0].element_type
        assert isinstance(how, DistributionAttr)
        integer = isinstance(element, IntegerType) and element != i1
        fits = {"bernoulli": element == i1, "integers": integer}
        if not fits.get(how.kind, isinstance(element, AnyFloat)):
            raise ShardirError(
                coded(
                    "T5",
                    f"expected an element type that {how.kind} numbers have, got {element}",
                    use="nn.convert them",
                )
            )
        if how.kind == "bernoulli":
            check_probability(how.values["p"])
        check_range(how.kind, how.values, str(element))

    @classmethod
    def rule(cls, operands: Types, results: Types, props: Props) -> Factors:
        shape = results[0].get_shape()
        return Factors.of([[]], [factor_names(len(shape))], [(), shape])

    def evaluate(self, device: Device, *arrays: Array) -> Array:
        element = self.out.type.element_type
        integer = isinstance(element, IntegerType) and element != i1
        dtype = bool if element == i1 else np.int64 if integer else np.float64
        how, shape = self.distribution, device.global_shape(self.out)
        part = part_of(device, self.out)
        return fill(how.kind, how.values, shape, part, self.seed(arrays[0], device.run), dtype)

    def pullback(self, b: "OpBuilder", dy: SSAValue) -> Sequence[SSAValue | None]:
        return (None,)


@op_definition
class DropoutOp(Drawn):
    """x / (1 - p), with zeros at a share p of the positions, chosen by the key"""

    name = "nn.dropout"
    x = operand_def(TensorType)
    key = operand_def(TensorType)
    p = prop_def(FloatAttr.constr(type=f64))
    out = result_def(TensorType)
    assembly_format = f"$x `,` $key `p` $p `stream` $stream (`stride` $stride^)? {STRATEGY}"

    @classmethod
    def infer(cls, operands: Types, props: Props) -> list[TensorType]:
        float_element(cls.name, operands[:1])
        needs_key(operands[1])
        p = props["p"]
        assert isinstance(p, FloatAttr)
        check_probability(p.value.data)
        return [operands[0]]

    @classmethod
    def rule(cls, operands: Types, results: Types, props: Props) -> Factors:
        shape = results[0].get_shape()
        n = factor_names(len(shape))
        return Factors.of([n, []], [n], [shape, (), shape])

    def evaluate(self, device: Device, *arrays: Array) -> Array:
        x, key = arrays
        p = float_of(self, "p")
        if p == 1:
            return x * 0
        index = positions(device.global_shape(self.x), part_of(device, self.x))
        kept = uniform(self.seed(key, device.run), index) >= p
        return x * kept * x.dtype.type(1 / (1 - p))

    def pullback(self, b: "OpBuilder", dy: SSAValue) -> Sequence[SSAValue | None]:
        """Draw the same positions again: nothing is saved."""
        return b.value(DropoutOp, dy, self.key, props={"p": self.p, "stream": self.stream}), None
