"""The price of a step of a redistribution: received elements, seconds and memory.

Each is a maximum over devices.
"""

from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import NamedTuple

from shardir.algebra.collectives import Cases, CollectiveStep, Transfer
from shardir.algebra.forms import NO_COMMUNICATION, Form, Forms, copying, fastest
from shardir.algebra.layout import Layout, Shape
from shardir.algebra.mesh import Mesh


def elements(mesh: Mesh, shape: Shape, layout: Layout) -> int:
    """Return the maximum number of elements of a shard."""
    return prod(layout.local_shape(mesh, shape))


def received_by_level(mesh: Mesh, shape: Shape, before: Layout, step: CollectiveStep) -> Cases:
    """Return the elements that a device receives in a step from each level, innermost first: the
    distinct cases of devices."""
    return step.record.received_by_level(Transfer(mesh, shape, before, step))


def step_received(mesh: Mesh, shape: Shape, before: Layout, step: CollectiveStep) -> int:
    """Return the maximum number of elements that a device receives in a step."""
    return max(sum(case) for case in received_by_level(mesh, shape, before, step))


def step_moved(mesh: Mesh, shape: Shape, before: Layout, step: CollectiveStep) -> int:
    """Return the elements that cross a device's links in a step: received elements, or elements
    copied from or to its host."""
    if step.takes_time(mesh) and not step.communicates(mesh):
        return elements(mesh, shape, before)
    return step_received(mesh, shape, before, step)


@lru_cache(maxsize=65536)
def step_forms(mesh: Mesh, shape: Shape, before: Layout, step: CollectiveStep) -> Forms:
    """Return the forms of a step, with packing and unpacking; rates are for a byte of the global
    tensor.

    Forms are equal for all tensors of one rank that both layouts split evenly.
    """
    if not step.takes_time(mesh):
        return NO_COMMUNICATION
    return with_transfer(step.forms(mesh), step_transfer(mesh, shape, before, step))


class StepTransfer(NamedTuple):
    """The costs of a step, for each byte of an element.

    Attributes:
        part: bytes that the collective's forms price.
        packing: seconds of packing and unpacking.
        size: the elements of the global tensor.
    """

    part: float
    packing: float
    size: int


def step_transfer(mesh: Mesh, shape: Shape, before: Layout, step: CollectiveStep) -> StepTransfer:
    """Return the costs of a step that do not depend on the form of its collective."""
    transfer = Transfer(mesh, shape, before, step, typical=True)
    part, packing = step.record.size(transfer), 0.0
    if mesh.cluster_or_default.memory_bandwidth:
        packing = copying(step.record.buffers(transfer), mesh)
    return StepTransfer(part, packing, max(prod(shape), 1))


def with_transfer(forms: Forms, transfer: StepTransfer) -> Forms:
    """Return the forms of a step for a byte of the global tensor, from its collective's forms."""
    part, packing, size = transfer
    return tuple([
        Form(name, latency, (rate * part + packing) / size) for name, latency, rate in forms
    ])  # fmt: skip


def step_form(
    mesh: Mesh, shape: Shape, before: Layout, step: CollectiveStep, itemsize: int
) -> Form:
    """Return the fastest form of a step."""
    return fastest(step_forms(mesh, shape, before, step), prod(shape) * itemsize)


def step_seconds(
    mesh: Mesh, shape: Shape, before: Layout, step: CollectiveStep, itemsize: int
) -> float:
    """Return the seconds of a step in its fastest form."""
    if not step.takes_time(mesh):
        return 0.0
    return step_form(mesh, shape, before, step, itemsize).seconds(prod(shape) * itemsize)


def steps_seconds(
    mesh: Mesh, shape: Shape, before: Layout, steps: Sequence[CollectiveStep], itemsize: int
) -> float:
    """Return the seconds of consecutive steps."""
    total = 0.0
    for step in steps:
        total += step_seconds(mesh, shape, before, step, itemsize)
        before = step.layout
    return total


def step_memory(
    mesh: Mesh, shape: Shape, before: Layout, step: CollectiveStep, retained: int
) -> tuple[int, int]:
    """Return the maximum number of elements that live on a device during a step, and the number of
    elements that its result retains.

    Buffers are those of the runtime on CPUs, which are larger than on GPUs. Sent elements live
    until the results are made: Gloo's thread releases them after it reports the end.

    Args:
        retained: elements that the operand retains: more than its own if it is a slice.
    """
    if not step.record.moves(mesh.extent(step.axes)):
        return retained, retained
    return step.record.memory(Transfer(mesh, shape, before, step), retained)


def step_buffers(
    mesh: Mesh, shape: Shape, before: Layout, step: CollectiveStep, alone: bool = True
) -> int:
    """Return the elements of a step's buffers, without operand and result.

    Args:
        alone: the collective moves this value only.
    """
    return step.record.buffers(Transfer(mesh, shape, before, step, alone))


def step_packed(
    mesh: Mesh, shape: Shape, before: Layout, step: CollectiveStep, alone: bool = True
) -> int:
    """Return the elements of a step's buffers that the runtime frees before it sums."""
    return step.record.packed(Transfer(mesh, shape, before, step, alone))


def step_summed(
    mesh: Mesh, shape: Shape, before: Layout, step: CollectiveStep, alone: bool = True
) -> int:
    """Return the elements that the runtime sums after a step for which it frees no buffer."""
    return step.record.summed(Transfer(mesh, shape, before, step, alone))


def step_packing(
    mesh: Mesh, shape: Shape, before: Layout, step: CollectiveStep, itemsize: int
) -> float:
    """Return the seconds that a value costs because it is moved with others: of the ops that bring
    it into their buffer and out of it, and to copy it, or to call the library for it too."""
    seconds = copying(elements(mesh, shape, before) * itemsize, mesh)
    if step.record.is_direct(Transfer(mesh, shape, before, step, alone=False, typical=True)):
        seconds = min(seconds, mesh.cluster_or_default.overhead)
    return packing_ops_seconds(mesh, step) + seconds


def packing_ops_seconds(mesh: Mesh, step: CollectiveStep) -> float:
    """Return the seconds of the ops that move each of several values into their buffer and out of
    it, without the seconds of its bytes."""
    return mesh.cluster_or_default.packing * step.record.packing_ops(mesh.extent(step.axes))
