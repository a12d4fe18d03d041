"""Attributes of training: words with named options.

    #train.init<normal, mean = 0.0, std = 1.0>
    <adamw, lr = cosine<rate = 0.001, steps = 1000, warmup = 100>, weight_decay = 0.01>

A value may itself be a word with options in angle brackets: a learning-rate schedule.
"""

import re
from math import inf, isfinite
from typing import ClassVar, NamedTuple

from xdsl.irdl import irdl_attr_definition

from shardir.algebra.notation import NamedOptions
from shardir.diagnostics import NotationError, ShardirError, coded
from shardir.dialects.random import DRAWN, LARGEST
from shardir.dialects.text import Kinds, OptionsAttr, OptionSpec, TextAttr, option_offset


@irdl_attr_definition
class InitAttr(OptionsAttr):
    """The initial values of a tensor.

    Random values depend on the global position only, not on the mesh. `file` and `batches` read
    rows of an array in an .npz file: `file` in a new order for each epoch, `batches` in the order
    of the file. `tokens` packs a file without a header into rows. `copy` is the value of another
    state, repeated along new leading dimensions.
    """

    name = "train.init"
    KINDS: ClassVar[Kinds] = {
        **DRAWN,
        "constant": {"value": OptionSpec(float)},
        "copy": {"of": OptionSpec(str)},
        "file": {"path": OptionSpec(str), "array": OptionSpec(str)},
        "batches": {"path": OptionSpec(str), "array": OptionSpec(str)},
        "tokens": {
            "path": OptionSpec(str),
            "type": OptionSpec(str),
            "shift": OptionSpec(int, 0, minimum=0, maximum=1),
        },
    }


RATE = OptionSpec(float, minimum=0.0)


END = OptionSpec(float, 0.0, minimum=0.0)


STEPS = OptionSpec(int, minimum=1)


WARMUP = OptionSpec(int, 0, minimum=0)


@irdl_attr_definition
class ScheduleAttr(OptionsAttr):
    """A learning rate: a function of the number of steps done, or `given`, a state that the loop of
    the training sets."""

    name = "train.schedule"
    KINDS: ClassVar[Kinds] = {
        "constant": {"rate": RATE, "warmup": WARMUP},
        "cosine": {"rate": RATE, "steps": STEPS, "end": END, "warmup": WARMUP},
        "polynomial": {
            "rate": RATE, "steps": STEPS, "end": END, "power": OptionSpec(float, 1.0, minimum=0.0),
            "warmup": WARMUP,
        },
        "step": {
            "rate": RATE, "every": STEPS, "factor": OptionSpec(float, 0.1, minimum=0.0),
            "warmup": WARMUP,
        },
        "inverse_sqrt": {"rate": RATE, "warmup": WARMUP},
        "points": {"rate": RATE, "at": OptionSpec(str)},
        "given": {"rate": RATE},
    }  # fmt: skip

    @classmethod
    def completed(cls, options: NamedOptions, text: str) -> NamedOptions:
        word, pairs = super().completed(options, text)
        values = dict(pairs)
        if word == "points":
            try:
                points_of(values["at"])
            except ShardirError as e:
                raise NotationError(str(e), option_offset("at", text)) from None
        elif values.get("warmup", 0) >= values.get("steps", inf):
            raise NotationError(
                coded(
                    "G10",
                    f"expected warmup below steps, {values['steps']}, got {values['warmup']}",
                ),
                option_offset("warmup", text),
            )
        return word, pairs


class Point(NamedTuple):
    """A factor of the learning rate after `step` steps. The factors up to the next point are half a
    period of a cosine (`is_cosine`), or linear."""

    step: int
    factor: float
    is_cosine: bool = False

    def __str__(self) -> str:
        return f"{self.step}: {self.factor!r}{' cosine' if self.is_cosine else ''}"


POINT = re.compile(r"\s*(\d+)\s*:\s*(\d+(?:\.\d*)?(?:[eE][-+]?\d+)?)(\s+cosine)?\s*")


def points_of(text: str) -> tuple[Point, ...]:
    """Return the points of `0: 0.1, 10: 1.0 cosine, 100: 0.0`.

    Raises:
        ShardirError: the text is not a list of points, or the steps do not increase.
    """
    points = list[Point]()
    for part in text.split(","):
        if (m := POINT.fullmatch(part)) is None or not isfinite(float(m[2])):
            use = 'write at = "0: 0.1, 10: 1.0 cosine, 100: 0.0"'
            raise ShardirError(coded("G10", f"expected step: factor, got {part.strip()!r}", use))
        points.append(Point(int(m[1]), float(m[2]), m[3] is not None))
        if len(points) > 1 and points[-2].step >= points[-1].step:
            message = f"expected steps that increase, got {points[-2].step}, {points[-1].step}"
            raise ShardirError(coded("G10", message))
    return tuple(points)


BETA1, BETA2 = (OptionSpec(float, x, minimum=0.0, maximum=1.0, ends="[)") for x in (0.9, 0.999))


@irdl_attr_definition
class AccumulateAttr(OptionsAttr):
    """The combination of the gradients of microbatches: `<mean, microbatches = 4>`. `tokens` is the
    mean over all tokens, if each loss is the mean over its microbatch's tokens."""

    name = "train.accumulate"
    KINDS: ClassVar[Kinds] = {
        "mean": {"microbatches": OptionSpec(int, minimum=1)},
        "sum": {"microbatches": OptionSpec(int, minimum=1)},
        "tokens": {"microbatches": OptionSpec(int, minimum=1)},
    }

    @property
    def averages(self) -> bool:
        """Whether losses and gradients are divided by the number of microbatches."""
        return self.kind != "sum"


@irdl_attr_definition
class ClipAttr(OptionsAttr):
    """The maximum of the gradients' global norm, or of each element's absolute value."""

    name = "train.clip"
    KINDS: ClassVar[Kinds] = {
        "norm": {"max": OptionSpec(float, minimum=0.0, ends="()")},
        "value": {"max": OptionSpec(float, minimum=0.0, ends="()")},
    }


@irdl_attr_definition
class LossScaleAttr(OptionsAttr):
    """The factor of cotangents, in f32, that keeps small cotangents from underflow in a narrow
    type."""

    name = "train.loss_scale"
    KINDS: ClassVar[Kinds] = {
        "static": {"factor": OptionSpec(float, minimum=0.0, maximum=LARGEST["f32"], ends="(]")},
        "dynamic": {
            "initial": OptionSpec(float, 65536.0, minimum=0.0, maximum=LARGEST["f32"], ends="(]"),
            "growth": OptionSpec(float, 2.0, minimum=1.0),
            "backoff": OptionSpec(float, 0.5, minimum=0.0, maximum=1.0, ends="()"),
            "interval": OptionSpec(int, 2000, minimum=1),
        },
    }


METRICS = ("gradient_norm", "learning_rate")
"""The metrics of a step: the norm of all gradients before clipping, and the optimizer's learning
rate."""


@irdl_attr_definition
class MetricsAttr(TextAttr[tuple[str, ...]]):
    """The scalars that a step returns beside its loss: `<gradient_norm, learning_rate>`."""

    name = "train.metrics"

    @classmethod
    def from_text(cls, text: str) -> tuple[str, ...]:
        names = tuple(name.strip() for name in text.split(","))
        for at, name in enumerate(names):
            if name not in METRICS or name in names[:at]:
                got = f"{name!r} twice" if name in names[:at] else repr(name)
                raise NotationError(
                    f"expected metrics of {', '.join(METRICS)}, got {got}",
                    sum(len(part) + 1 for part in text.split(",")[:at]),
                )
        return names

    @classmethod
    def to_text(cls, data: tuple[str, ...]) -> str:
        return ", ".join(data)


@irdl_attr_definition
class AverageAttr(TextAttr[float]):
    """The decay of the exponential moving averages of parameters: `<0.999>`."""

    name = "train.average"

    @classmethod
    def from_text(cls, text: str) -> float:
        try:
            decay = float(text)
        except ValueError:
            decay = -1.0
        if not 0 <= decay < 1:
            raise NotationError(f"expected a decay from 0.0 to below 1.0, got {text.strip()!r}", 0)
        return decay

    @classmethod
    def to_text(cls, data: float) -> str:
        return repr(data)


ATTRS = [
    InitAttr, ScheduleAttr, AccumulateAttr, ClipAttr, LossScaleAttr, MetricsAttr, AverageAttr,
]  # fmt: skip
