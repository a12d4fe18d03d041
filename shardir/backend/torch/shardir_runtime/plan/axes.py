"""The axes in a plan: of groups, of the splits of dimensions, and of transfers. This file needs
only Python."""

import math

from .fields import Field, short_json

Axes = tuple  # of names and (name, pre, size)


class Sized(tuple):
    """Axes that split a dimension into shards of explicit sizes."""

    sizes: tuple[int, ...]

    def __new__(cls, axes: Axes, sizes: tuple[int, ...]):
        new = super().__new__(cls, axes)
        new.sizes = sizes
        return new

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sized) and tuple.__eq__(self, other) and self.sizes == other.sizes

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash((tuple(self), self.sizes))


def axes_of(field: Field, sizes: dict[str, int]) -> Axes:
    """Return the axes of a dimension or group: each a name of the mesh, or [name, pre, size]."""
    axes = []
    for item in field.items():
        if isinstance(item.value, str):
            name, pre, size = item.value, 1, sizes.get(item.value, 1)
        elif isinstance(item.value, list) and len(item.value) == 3:
            parts = item.items()
            name = parts[0].of(str).value
            pre, size = Field(item.value[1:], item.path).ints(1)
        else:
            raise item.fail(f"expected an axis or [axis, pre, size], got {short_json(item.value)}")
        if name not in sizes:
            raise item.fail(
                f"expected an axis of the mesh ({', '.join(sizes) or 'none'}), got {name!r}"
            )
        if sizes[name] % (pre * size):
            raise item.fail(f"{pre} * {size} does not divide the axis {name!r} of {sizes[name]}")
        axes.append(item.value if isinstance(item.value, str) else (name, pre, size))
    return tuple(axes)


def split_of(field: Field, sizes: dict[str, int]) -> Axes:
    """Return the axes of a dimension, with the sizes of its shards if they are explicit."""
    if not isinstance(field.value, dict):
        return axes_of(field, sizes)
    return Sized(axes_of(field.get("axes"), sizes), field.get("sizes").ints(0))


def channel_of(field: Field, sizes: dict[str, int]) -> tuple[Axes, int, int]:
    """Return the axes of a transfer, and the positions of its sender and its receiver."""
    parts = field.items()
    if len(parts) != 3:
        raise field.fail(f"expected [axes, sender, receiver], got {short_json(field.value)}")
    axes = axes_of(parts[0], sizes)
    count = math.prod(sizes[axis] if isinstance(axis, str) else axis[2] for axis in axes)
    source, target = Field(field.value[1:], field.path).ints(0)
    if source == target or max(source, target) >= count:
        found = f"{source} and {target}"
        raise field.fail(f"expected two different positions below {count}, got {found}")
    return axes, source, target
