"""The work of a collective: the steps of its values, and their time in each form."""

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
"""The maximum number of elements of shorter floats that the runtime sums up in f32 at once."""

WIDE_BYTES = 4

moves = SignatureMemo()
"""The work of a collective of each signature on a mesh."""


@dataclass(frozen=True)
class Together:
    """Values that one collective moves."""

    forms: tuple[Form, ...]
    """The forms of the collective, of which each value has the same."""
    sending: tuple[tuple[float, ...], ...]
    """Of each value the seconds of its bytes, in each form."""
    packing: tuple[float, ...]
    """Of each value the seconds to move it with others (`step_packing`)."""

    def __add__(self, other: "Together") -> "Together":
        return Together(self.forms, self.sending + other.sending, self.packing + other.packing)

    @cached_property
    def fastest(self) -> tuple[Form, tuple[float, ...]]:
        """The form of minimum time, and the seconds of each value's bytes in it."""
        each = zip(self.forms, zip(*self.sending, strict=True), strict=True)
        return min(each, key=lambda choice: choice[0].latency + sum(choice[1]))

    @cached_property
    def seconds(self) -> float:
        form, each = self.fastest
        return form.latency + sum(each) + (sum(self.packing) if len(each) > 1 else 0.0)


def together(steps: Iterable["ValueStep"], mesh: Mesh) -> Together:
    """Return the values that one collective moves."""
    steps = tuple(steps)
    of_values = [
        [(form, form.rate * prod(shape) * size) for form in step_forms(mesh, shape, before, step)]
        for shape, before, step, size in steps
    ]
    return Together(
        tuple(form for form, _ in of_values[0]),
        tuple(tuple(seconds for _, seconds in of_value) for of_value in of_values),
        tuple(step_packing(mesh, *step) for step in steps),
    )


ValueStep = tuple[Shape, Layout, CollectiveStep, int]
"""The step of one value of a collective: its global shape, the layout before, the step, and the
bytes of an element."""


@dataclass(frozen=True, eq=False)
class CollectiveWork:
    """The work of a collective on a mesh: the step of each of its values. Collectives of one
    signature share it."""

    mesh: Mesh
    steps: tuple[ValueStep, ...]

    @cached_property
    def together(self) -> Together:
        return together(self.steps, self.mesh)

    @lru_cache(maxsize=4096)  # noqa: B019 - a fit asks for each many times, of one mesh at a time
    def together_on(self, mesh: Mesh) -> Together:
        """Return the times on a mesh whose cluster has the same levels, of any speed."""
        return self.together if mesh is self.mesh else together(self.steps, mesh)

    @cached_property
    def moved(self) -> int:
        """The bytes that the device which receives most receives; of a copy those of its shard."""
        return sum(
            step_moved(self.mesh, shape, before, step) * size
            for shape, before, step, size in self.steps
        )

    @cached_property
    def buffers(self) -> int:
        """The bytes of the buffers: packed operands, what is received and packed results; then,
        without operands that were packed to be reduced, sums in f32 of shorter floats, which are
        made one value after the other."""
        alone, each, packed, wide = len(self.steps) == 1, 0, 0, 0
        for shape, have, step, size in self.steps:
            each += step_buffers(self.mesh, shape, have, step, alone) * size
            packed += step_packed(self.mesh, shape, have, step, alone) * size
            if 1 < size < WIDE_BYTES:
                wide = max(wide, step_summed(self.mesh, shape, have, step, alone))
        return each + max(0, WIDE_BYTES * min(wide, MAX_WIDE) - packed)


def collective_work(op: dist.CollectiveOp, mesh: Mesh) -> CollectiveWork:
    """Return the work of a collective."""
    return moves.of_op(op, lambda: CollectiveWork(mesh, tuple(_steps(op, mesh))), mesh)


def _steps(op: dist.CollectiveOp, mesh: Mesh) -> Iterator[ValueStep]:
    """Yield the step of each value of a collective."""
    for value, out in zip(op.values, op.outs, strict=True):
        have = dist.layout_of(value)
        assert have is not None and isinstance(value.type, TensorType)
        yield (
            dist.global_shape(value.type, mesh),
            have,
            op.step_for(value, out, mesh),
            itemsize(value.type),
        )
