"""The steps of a redistribution: what one move receives, how long it takes, what it needs to hold.

Bytes and seconds are those of the device that has most of them. Rings (all-reduce, reduce-scatter,
all-gather) receive all of their bytes over the links of the outermost level that the group crosses,
which the devices at the edge of a unit do; an all-to-all and an exchange fetch each piece from the
level where it lies.
"""

from math import prod

from shardir.algebra.collectives import Step
from shardir.algebra.forms import NOTHING, Form, Forms, copying, forms_of, quickest
from shardir.algebra.layout import Layout, Shape
from shardir.algebra.mesh import Mesh
from shardir.algebra.traffic import fetched, sent, within

SMALL = 1 << 16
"""Up to so many elements the runtime gathers by an all-to-all, for which it copies."""


def elements(mesh: Mesh, shape: Shape, layout: Layout) -> int:
    """What a device holds at most."""
    return prod(layout.local_shape(mesh, shape))


def received_by_level(
    mesh: Mesh, shape: Shape, before: Layout, step: Step
) -> tuple[tuple[int, ...], ...]:
    """Elements that a device receives in one step from each level, innermost first; the distinct
    cases.

    With n devices in a group: an all-reduce 2 (n - 1) / n of the value, a reduce-scatter n - 1
    shards of what comes out and an all-gather n - 1 of what goes in (uneven ones are padded to the
    largest), an all-to-all and an exchange what the device lacks.
    """
    n = mesh.extent(step.axes)
    match step.kind:
        case "all_reduce":
            ring = -(-2 * elements(mesh, shape, before) * (n - 1) // n)
        case "reduce_scatter":
            ring = elements(mesh, shape, step.layout) * (n - 1)
        case "all_gather":
            ring = elements(mesh, shape, before) * (n - 1)
        case "broadcast":
            ring = elements(mesh, shape, before)
        case "all_to_all" if before.even(mesh, shape) and step.layout.even(mesh, shape):
            return (_evenly(mesh, shape, step),)
        case "all_to_all" | "exchange":
            return fetched(mesh, shape, before.complete, step.layout.complete)
        case _:
            ring = 0
    level = mesh.level(step.axes)
    return (tuple(ring if i == level else 0 for i in range(len(mesh.cluster_or_default.levels))),)


def _evenly(mesh: Mesh, shape: Shape, step: Step) -> tuple[int, ...]:
    """The same of an all-to-all of even shards: as much from each device."""
    part = elements(mesh, shape, step.layout) // mesh.extent(step.axes)
    sub_axes = mesh.cut(step.axes, mesh.level_sub_axes)
    found, reached = [], 1
    for level in range(len(mesh.cluster_or_default.levels)):
        near = mesh.extent(tuple(within(mesh, level, sub_axes)))
        found.append((near - reached) * part)
        reached = near
    return tuple(found)


def step_received(mesh: Mesh, shape: Shape, before: Layout, step: Step) -> int:
    """Elements that the device which receives most receives in one step."""
    return max(sum(case) for case in received_by_level(mesh, shape, before, step))


def step_forms(mesh: Mesh, shape: Shape, before: Layout, step: Step) -> Forms:
    """The forms in which a step can be done, by the bytes of the global tensor; with what is packed
    before it and unpacked after. They are the same for all tensors that both layouts split evenly
    and that have as many dimensions."""
    if not step.communicates(mesh):
        return NOTHING
    match step.kind:
        case "all_reduce" | "broadcast":
            part = elements(mesh, shape, before)
        case "all_gather":
            part = elements(mesh, shape, before) * mesh.extent(step.axes)
        case "reduce_scatter":
            part = elements(mesh, shape, step.layout) * mesh.extent(step.axes)
        case _:
            part = _receiving(mesh, shape, before, step)
    packing = 0.0
    if mesh.cluster_or_default.memory_bandwidth:
        packing = copying(step_buffers(mesh, shape, before, step, typical=True), mesh)
    size = max(prod(shape), 1)
    return tuple([
        Form(name, latency, (rate * part + packing) / size)
        for name, latency, rate in forms_of(step.kind, mesh, step.axes)
    ])  # fmt: skip


def _receiving(mesh: Mesh, shape: Shape, before: Layout, step: Step) -> float:
    """The seconds for each byte of an element in which a device receives pieces of others."""
    levels = mesh.cluster_or_default.levels
    return max(
        sum(n / l.bandwidth for n, l in zip(case, levels, strict=True) if n)
        for case in received_by_level(mesh, shape, before, step)
    )


def step_form(mesh: Mesh, shape: Shape, before: Layout, step: Step, itemsize: int) -> Form:
    """The quickest form of a step."""
    return quickest(step_forms(mesh, shape, before, step), prod(shape) * itemsize)


def step_seconds(mesh: Mesh, shape: Shape, before: Layout, step: Step, itemsize: int) -> float:
    """The time of a step, in its quickest form."""
    if not step.communicates(mesh):
        return 0.0
    return step_form(mesh, shape, before, step, itemsize).seconds(prod(shape) * itemsize)


def step_memory(
    mesh: Mesh, shape: Shape, before: Layout, step: Step, held: int, alone: bool = True,
    typical: bool = False,
) -> tuple[int, int]:  # fmt: skip
    """(the most elements that live on a device during a step, those that the result keeps alive),
    as the runtime does it on CPU devices, where it needs the larger buffers.

    `held` is what the operand keeps alive: more than itself where it is a slice. A value that is
    not `alone` travels in one buffer with others. What is sent lives until the results are made:
    Gloo's thread lets go of it a moment later than it says that it is done. `typical`: what holds
    for any tensor, which is not small, and of which no device has a single row in a dimension.
    """
    have, after = elements(mesh, shape, before), elements(mesh, shape, step.layout)
    n = mesh.extent(step.axes)
    local = before.local_shape(mesh, shape)
    in_order = list(step.axes) == sorted(step.axes, key=mesh.order)

    def as_they_lie(dim: int, of: Shape) -> bool:
        """Whether the blocks along a dimension lie behind each other, in the group's order."""
        return alone and in_order and (dim == 0 if typical else prod(of[:dim]) == 1)

    match step.kind:
        case _ if n == 1 or (
            step.kind == "replicated_to_partial" and step.layout.reduction != "sum"
        ):
            return held, held
        case "all_slice":
            return held, held
        case "reduce_scatter":
            blocks = 0 if local[step.dim] % n == 0 and as_they_lie(step.dim, local) else n * after
            return held + blocks + n * after + after, after
        case "all_gather":
            rows = step.layout.local_shape(mesh, shape)[step.dim]
            largest = -(-rows // n)
            packed = have * ((rows % n > 0) + (not alone))  # padded, by who has a short shard
            copies = n * have if n * have <= SMALL and not typical else 0
            views = as_they_lie(step.dim, local)
            assert largest == local[step.dim]
            blocks = n * have
            return held + packed + blocks + max(copies, 0 if views else after), (
                blocks if views else after
            )
        case "all_to_all":
            total = step.layout.local_shape(mesh, shape)[step.concat]
            even = local[step.dim] % n == 0 and total % n == 0
            flat = 0 if even and as_they_lie(step.dim, local) else have
            views = as_they_lie(step.concat, step.layout.local_shape(mesh, shape))
            joined = 0 if views else after
            return held + max(2 * flat, flat + after + joined), after
        case "exchange":
            out = sent(mesh, shape, before.complete, step.layout.complete)
            got = step_received(mesh, shape, before, step)
            return held + after + 2 * out + got, after
        case _:
            return held + after, after


def step_buffers(
    mesh: Mesh, shape: Shape, before: Layout, step: Step, alone: bool = True, typical: bool = False
) -> int:
    """The elements that a step holds besides its operand and result, to pack what is not
    contiguous and to unpack what arrives."""
    held, after = elements(mesh, shape, before), elements(mesh, shape, step.layout)
    peak, _ = step_memory(mesh, shape, before, step, held, alone, typical)
    return max(0, peak - held - after)
