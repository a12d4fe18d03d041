"""The work of a collective: one step for each of its values, and the seconds of each form."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod

from xdsl.dialects.builtin import TensorType

from shardir.algebra.collectives import CollectiveStep
from shardir.algebra.forms import Form
from shardir.algebra.layout import Layout, Shape
from shardir.algebra.mesh import Mesh
from shardir.algebra.steps import (
    step_buffers,
    step_forms,
    step_moved,
    step_packed,
    step_packing,
    step_summed,
)
from shardir.dialects import dist
from shardir.dialects.nn.types import itemsize
from shardir.dialects.signatures import SignatureMemo

MAX_WIDE = 1 << 16
"""The elements of f16 or bf16 that the runtime sums in f32 at once (`shardir_runtime` has the same
number, which a test compares)."""

WIDE_BYTES = 4
"""The bytes of an f32."""

works = SignatureMemo()
"""`CollectiveWork` by the signature of the collective and the mesh."""


@dataclass(frozen=True)
class CollectiveTimes:
    """The seconds of a collective that moves one value, or several in one buffer."""

    forms: tuple[Form, ...]
    """The forms of the collective; all values have equal ones."""
    sending: tuple[tuple[float, ...], ...]
    """sending[value][form]: the seconds of the value's bytes, without the latency."""
    packing: tuple[float, ...]
    """packing[value]: the seconds to copy the value into and out of a buffer (`step_packing`)."""

    def __add__(self, other: "CollectiveTimes") -> "CollectiveTimes":
        sending, packing = self.sending + other.sending, self.packing + other.packing
        return CollectiveTimes(self.forms, sending, packing)

    @cached_property
    def fastest(self) -> tuple[Form, tuple[float, ...]]:
        """The form of minimum time, and the seconds of each value's bytes in it."""
        choices = zip(self.forms, zip(*self.sending, strict=True), strict=True)
        return min(choices, key=lambda choice: choice[0].latency + sum(choice[1]))

    @cached_property
    def seconds(self) -> float:
        """The seconds of the fastest form; several values are packed too."""
        form, sending = self.fastest
        return form.latency + sum(sending) + (sum(self.packing) if len(sending) > 1 else 0.0)


def collective_times(steps: Iterable["ValueStep"], mesh: Mesh) -> CollectiveTimes:
    """Return the seconds of one collective that takes all the steps."""
    steps = tuple(steps)
    forms = [step_forms(mesh, shape, before, step) for shape, before, step, _ in steps]
    sending = (
        tuple(form.rate * prod(shape) * size for form in own)
        for own, (shape, _, _, size) in zip(forms, steps, strict=True)
    )
    packing = (step_packing(mesh, *step) for step in steps)
    return CollectiveTimes(tuple(forms[0]), tuple(sending), tuple(packing))


ValueStep = tuple[Shape, Layout, CollectiveStep, int]
"""The step of one value of a collective: its global shape, the layout before, the step, and the
bytes of an element."""


@dataclass(frozen=True, eq=False)
class CollectiveWork:
    """The work of a collective on a mesh, one step for each value. Collectives of equal signatures
    share one object."""

    mesh: Mesh
    steps: tuple[ValueStep, ...]

    @cached_property
    def times(self) -> CollectiveTimes:
        """The seconds of the collective on its mesh."""
        return collective_times(self.steps, self.mesh)

    @lru_cache(maxsize=4096)  # noqa: B019 - a fit prices all works on one mesh after the other
    def times_on(self, mesh: Mesh) -> CollectiveTimes:
        """Return the seconds on a mesh whose cluster has levels of equal sizes, of any speed."""
        return self.times if mesh is self.mesh else collective_times(self.steps, mesh)

    @cached_property
    def moved(self) -> int:
        """The bytes received by the device that receives most; for a host copy, its shard's."""
        return sum(
            step_moved(self.mesh, shape, before, step) * size
            for shape, before, step, size in self.steps
        )

    @cached_property
    def buffers(self) -> int:
        """The bytes of the buffers of a device.

        Packed operands, received shards and packed results live together. f16 and bf16 are summed
        in f32, one value after the other, once the operands packed for the reduction are freed.
        """
        alone, buffers, packed, wide = len(self.steps) == 1, 0, 0, 0
        for shape, before, step, size in self.steps:
            buffers += step_buffers(self.mesh, shape, before, step, alone) * size
            packed += step_packed(self.mesh, shape, before, step, alone) * size
            if 1 < size < WIDE_BYTES:
                wide = max(wide, step_summed(self.mesh, shape, before, step, alone))
        return buffers + max(0, WIDE_BYTES * min(wide, MAX_WIDE) - packed)


def collective_work(op: dist.CollectiveOp, mesh: Mesh) -> CollectiveWork:
    """Return the work of a collective."""
    return works.of_op(op, lambda: CollectiveWork(mesh, tuple(_steps(op, mesh))), mesh)


def _steps(op: dist.CollectiveOp, mesh: Mesh) -> Iterator[ValueStep]:
    """Yield the step of each value of a collective."""
    for value, out in zip(op.values, op.outs, strict=True):
        before = dist.layout_of(value)
        assert before is not None and isinstance(value.type, TensorType)
        shape, size = dist.global_shape(value.type, mesh), itemsize(value.type)
        yield shape, before, op.step_for(value, out, mesh), size
