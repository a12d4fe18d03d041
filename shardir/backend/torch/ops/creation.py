"""Ops without operands."""

from xdsl.ir import Operation, SSAValue

from shardir.backend.torch.emit.literals import number_text
from shardir.backend.torch.emit.names import axes_text, tuple_text
from shardir.backend.torch.emit.scope import EmissionScope, Entry, Text
from shardir.dialects import nn
from shardir.dialects.nn.creation import dense_values
from shardir.dialects.nn.properties import axis_of


def _constant(s: EmissionScope, op: nn.ConstantOp) -> Text:
    values = dense_values(op.value)
    element = s.element(op.out)
    if not values.size:
        shape = tuple_text(s.sizes(op.out))
        return f"torch.empty({shape}, dtype={s.dtype(op.out)}, device={s.device(op.out)})"
    if op.value.is_splat():
        text = number_text(values.item(*[0] * values.ndim), element)
        shape = tuple_text(s.sizes(op.out))
        return f"torch.full({shape}, {text}, dtype={s.dtype(op.out)}, device={s.device(op.out)})"
    s.use("ops")
    numbers = [number_text(n, element) for n in values.reshape(-1).tolist()]
    name = s.program.constant(numbers)
    shape = tuple_text(list(map(str, values.shape)))
    given = f"mesh, {name}, {shape}, {s.dtype(op.out)}"
    s.storages.pin(op.out)
    if all(s.parts(op.out, d) == 1 for d in range(values.ndim)):
        return f"ops.constant({given})"
    return f"ops.constant({given}, {part_text(s, op.out)})"


def _iota(s: EmissionScope, op: nn.IotaOp) -> Text:
    """Count along one dimension, and expand along the others."""
    sizes = s.sizes(op.out)
    dim = axis_of(op.properties, "dim", len(sizes))
    start = s.start(op.out, dim)
    stop = sizes[dim] if start == "0" else f"{start} + {sizes[dim]}"
    bounds = stop if start == "0" else f"{start}, {stop}"
    text = f"torch.arange({bounds}, dtype={s.dtype(op.out)}, device={s.device(op.out)})"
    if len(sizes) == 1:
        return text
    column = ["1"] * len(sizes)
    column[dim] = sizes[dim]
    text = f"{text}.view({tuple_text(column)})"
    if column == list(sizes):
        return text
    s.storages.pin(op.out)
    return f"{text}.expand({tuple_text(sizes)})"


def part_text(s: EmissionScope, v: SSAValue) -> str:
    """The range (start, stop) of this rank's shard in each dimension of a value."""
    bounds = []
    for d, n in enumerate(s.global_shape(v)):
        if s.parts(v, d) == 1:
            bounds.append(f"(0, {n})")
        elif s.rank is not None:
            bounds.append(str(s.bounds(v, d)))
        else:
            bounds.append(f"mesh.bounds({n}, {axes_text(s.axes(v, d))})")
    return tuple_text(bounds)


TORCH: dict[type[Operation], Entry] = {
    nn.ConstantOp: _constant,
    nn.IotaOp: _iota,
}
