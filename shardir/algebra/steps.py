"""The steps of a redistribution: what one receives, how long it takes, what it needs to hold.

Bytes and seconds are those of the device that has most of them.
"""

from functools import lru_cache
from math import prod

from shardir.algebra.collectives import Cases, CollectiveStep, Transfer
from shardir.algebra.forms import NO_COMMUNICATION, Form, Forms, copying, quickest
from shardir.algebra.layout import Layout, Shape
from shardir.algebra.mesh import Mesh


def elements(mesh: Mesh, shape: Shape, layout: Layout) -> int:
    """What a device holds at most."""
    return prod(layout.local_shape(mesh, shape))


def received_by_level(mesh: Mesh, shape: Shape, before: Layout, step: CollectiveStep) -> Cases:
    """Elements that a device receives in one step from each level, innermost first; the distinct
    cases."""
    return step.record.received_by_level(Transfer(mesh, shape, before, step))


def step_received(mesh: Mesh, shape: Shape, before: Layout, step: CollectiveStep) -> int:
    """Elements that the device which receives most receives in one step."""
    return max(sum(case) for case in received_by_level(mesh, shape, before, step))


@lru_cache(maxsize=65536)
def step_forms(mesh: Mesh, shape: Shape, before: Layout, step: CollectiveStep) -> Forms:
    """The forms in which a step can be done, by the bytes of the global tensor; with what is packed
    before it and unpacked after. They are the same for all tensors that both layouts split evenly
    and that have as many dimensions."""
    if not step.communicates(mesh):
        return NO_COMMUNICATION
    transfer = Transfer(mesh, shape, before, step, typical=True)
    part, packing = step.record.size(transfer), 0.0
    if mesh.cluster_or_default.memory_bandwidth:
        packing = copying(step.record.buffers(transfer), mesh)
    size = max(prod(shape), 1)
    return tuple([
        Form(name, latency, (rate * part + packing) / size)
        for name, latency, rate in step.forms(mesh)
    ])  # fmt: skip


def step_form(
    mesh: Mesh, shape: Shape, before: Layout, step: CollectiveStep, itemsize: int
) -> Form:
    """The quickest form of a step."""
    return quickest(step_forms(mesh, shape, before, step), prod(shape) * itemsize)


def step_seconds(
    mesh: Mesh, shape: Shape, before: Layout, step: CollectiveStep, itemsize: int
) -> float:
    """The time of a step, in its quickest form."""
    if not step.communicates(mesh):
        return 0.0
    return step_form(mesh, shape, before, step, itemsize).seconds(prod(shape) * itemsize)


def step_memory(
    mesh: Mesh, shape: Shape, before: Layout, step: CollectiveStep, held: int
) -> tuple[int, int]:
    """(the most elements that live on a device during a step, those that the result keeps alive),
    as the runtime does it on CPU devices, where it needs the larger buffers.

    `held` is what the operand keeps alive: more than itself where it is a slice. What is sent lives
    until the results are made: Gloo's thread lets go of it a moment later than it says that it is
    done.
    """
    if mesh.extent(step.axes) == 1:
        return held, held
    return step.record.memory(Transfer(mesh, shape, before, step), held)


def step_buffers(
    mesh: Mesh, shape: Shape, before: Layout, step: CollectiveStep, alone: bool = True
) -> int:
    """The elements that a step holds besides its operand and result. A value that is not `alone`
    travels in one buffer with others."""
    return step.record.buffers(Transfer(mesh, shape, before, step, alone))
