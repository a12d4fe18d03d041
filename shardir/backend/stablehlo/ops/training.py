"""Scalars of a training step whose definition looks at their values."""

import math
from collections.abc import Sequence
from itertools import pairwise

from xdsl.ir import Operation

from shardir.backend.stablehlo.place import DevicePlace
from shardir.backend.stablehlo.traced import TracedArray, numpy
from shardir.backend.stablehlo.writer import WriteOp
from shardir.dialects import train
from shardir.dialects.nn.properties import float_of
from shardir.dialects.train.options import Point


def _learning_rate(p: DevicePlace, op: train.LearningRateOp, done: TracedArray) -> TracedArray:
    done, n = done.to("f64"), op.schedule.values
    if op.schedule.kind == "points":
        return n["rate"] * _factor(train.points_of(n["at"]), done)
    warmup = n["warmup"]
    rate = p.constant(n["rate"], "f64")
    after = numpy.maximum(done - warmup, 0.0)
    part = numpy.minimum(after / (n["steps"] - warmup), 1.0) if "steps" in n else after
    match op.schedule.kind:
        case "cosine":
            rate = n["end"] + (n["rate"] - n["end"]) * 0.5 * (1 + numpy.cos(math.pi * part))
        case "polynomial":
            rate = n["end"] + (n["rate"] - n["end"]) * (1 - part) ** n["power"]
        case "step":
            rate = n["rate"] * n["factor"] ** numpy.floor(after / n["every"])
        case "inverse_sqrt":
            rate = rate * numpy.sqrt(max(1, warmup) / numpy.maximum(done + 1, max(1, warmup)))
    return rate * numpy.minimum((done + 1) / max(1, warmup), 1.0)


def _factor(points: Sequence[Point], done: TracedArray) -> TracedArray:
    """The factor of the learning rate: between the points, at the first before them."""
    out = done.constant(points[-1].factor, "f64")
    for a, b in reversed([*pairwise(points)]):
        part = (done - a.step) / (b.step - a.step)
        left = 0.5 * (1 + numpy.cos(math.pi * part)) if a.is_cosine else 1 - part
        out = numpy.where(done < b.step, b.factor + (a.factor - b.factor) * left, out)
    return numpy.where(done < points[0].step, points[0].factor, out)


def _next_loss_scale(
    p: DevicePlace,
    op: train.NextLossScaleOp,
    scale: TracedArray,
    good: TracedArray,
    finite: TracedArray,
) -> tuple[TracedArray, TracedArray]:
    grown = scale * float_of(op, "growth")
    grown = numpy.where(numpy.isfinite(grown), grown, scale)
    more, zero = good + 1, good.constant(0, good.element)
    waits = more < op.interval.value.data
    new_scale = waits.select(scale, grown)
    reduced = scale * float_of(op, "backoff")
    return finite.select(new_scale, reduced), finite.select(waits.select(more, zero), zero)


WRITERS: dict[type[Operation], WriteOp] = {
    train.LearningRateOp: _learning_rate,
    train.NextLossScaleOp: _next_loss_scale,
}
