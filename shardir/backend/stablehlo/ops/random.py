"""Random numbers by key and position: the bits of splitmix64, as in shardir/dialects/random.py."""

import math
from typing import Any

from xdsl.ir import Operation, SSAValue

from shardir.backend.stablehlo.literals import NARROW, element_of
from shardir.backend.stablehlo.place import DevicePlace
from shardir.backend.stablehlo.traced import TracedArray
from shardir.backend.stablehlo.writer import WriteOp
from shardir.dialects import nn
from shardir.dialects.nn.properties import float_of, int_of
from shardir.dialects.random import GOLDEN, MIX


def _outputs(seed: TracedArray, index: TracedArray) -> TracedArray:
    """The outputs of splitmix64 of a seed, at indices; all are ui64, which wraps around."""
    first = seed + seed.constant(GOLDEN, "ui64")
    z = index * index.constant(GOLDEN, "ui64") + first
    for shift, factor in MIX:
        z = (z ^ _shifted(z, shift)) * z.constant(factor, "ui64")
    return z ^ _shifted(z, 31)


def _shifted(z: TracedArray, by: int) -> TracedArray:
    return z.same("shift_right_logical", z.constant(by, "ui64", z.shape))


def _bits(
    p: DevicePlace, op: nn.RandomOp | nn.DropoutOp, key: TracedArray, of: SSAValue
) -> TracedArray:
    """64 random bits for each element."""
    stride = 0 if op.stride is None else op.stride.value.data
    stream = int_of(op.properties, "stream") + stride * p.run
    seed = _outputs(key.to("ui64"), key.constant(stream, "ui64"))
    shape, place, step = p.shape(of), None, 1
    for d in reversed(range(len(shape))):
        along = p.indices(of, d, "i64").broadcast(shape, [d]) * step
        place = along if place is None else place + along
        step *= p.global_shape(of)[d]
    place = p.constant(0, "i64") if place is None else place
    return _outputs(seed, place.to("ui64"))


def _uniform(bits: TracedArray) -> TracedArray:
    return _shifted(bits, 11).to("f64") * 2.0**-53


def _normal(bits: TracedArray) -> TracedArray:
    """Box and Muller's transform of the two halves."""
    u = _shifted(bits, 32).to("f64") + 0.5
    v = (bits & bits.constant(0xFFFFFFFF, "ui64", bits.shape)).to("f64") * 2.0**-32
    log = u.same("log") - 32 * math.log(2)
    return (log * -2.0).same("sqrt") * (v * (2 * math.pi)).same("cosine")


def _random(p: DevicePlace, op: nn.RandomOp, key: TracedArray) -> TracedArray:
    bits, element = _bits(p, op, key, op.out), element_of(op.out.type)
    n: dict[str, Any] = op.distribution.values
    match op.distribution.kind:
        case "bernoulli":
            return _uniform(bits) < n["p"]
        case "uniform":
            values = _uniform(bits) * (n["high"] - n["low"]) + n["low"]
        case "normal":
            values = _normal(bits) * n["std"] + n["mean"]
        case _:
            rest = _shifted(bits, 1).to("i64") % (n["high"] - n["low"])
            return (rest + n["low"]).to(element)
    return values.to("f32").to(element) if element in NARROW else values.to(element)


def _dropout(p: DevicePlace, op: nn.DropoutOp, x: TracedArray, key: TracedArray) -> TracedArray:
    share = float_of(op, "p")
    if share == 1:
        return x * 0.0
    bits = _shifted(_bits(p, op, key, op.x), 11)
    least = bits.constant(math.ceil(share * 2.0**53), "ui64", bits.shape)
    wide = x.to("f32") if x.element in NARROW else x
    scaled = wide * (1 / (1 - share))
    kept = bits.compare("GE", least)
    return kept.select(scaled, scaled.constant(0, scaled.element, x.shape)).to(x.element)


WRITERS: dict[type[Operation], WriteOp] = {
    nn.RandomOp: _random,
    nn.DropoutOp: _dropout,
}
