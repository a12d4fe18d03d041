"""The meshes of a program as one mesh: shardings on any of them, on its axes.

    sdy.mesh @a = <["x"=2, "y"=4]>        {"x"} on @a is {x}
    sdy.mesh @b = <["z"=8]>               {"z"} on @b is {x, y}, {"z":(2)4} is {y}
    sdy.mesh @c = <[], device_ids=[3]>    a value of device 3 alone has any layout

An axis of another mesh is those axes and sub-axes of ours whose groups of devices are the same.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import gcd

from shardir.algebra.mesh import Axes, Axis, Mesh, axes_text
from shardir.algebra.sdy import mesh_from_sdy, read_sharding, read_shardings
from shardir.algebra.sharding import Sharding
from shardir.diagnostics import ShardirError
from shardir.frontends.stablehlo.form import HloOp, HloProgram
from shardir.syntax.source import warn

NO_AXES, NO_DEVICES = "<[]", "<[]>"
"""The text of a mesh of one device or of none begins, and the text of one without devices ends."""

DEVICE_IDS = re.compile(r",\s*device_ids\s*=\s*\[([\d,\s]*)\]")
MESH_NAME = re.compile(r"<@([\w$.]+)")


def meshes_of(program: HloProgram) -> dict[str, Mesh]:
    """Return the meshes of a program that have axes, by name. Rank r of a mesh with device_ids
    is its device number r.

    Raises:
        ShardirError: a mesh can't be expressed.
    """
    meshes: dict[str, Mesh] = {}
    for name, text in program.meshes.items():
        if (text := text.removeprefix("#sdy.mesh")).startswith(NO_AXES):
            continue
        if (ids := device_ids_of(text)) is not None and sorted(ids) == [*range(len(ids))]:
            text = DEVICE_IDS.sub("", text)
        meshes[name] = mesh_from_sdy(f"sdy.mesh @{name} = {text}")
    return meshes


def device_ids_of(text: str) -> list[int] | None:
    """Return the device_ids of the text of a mesh; None without."""
    m = DEVICE_IDS.search(text)
    return None if m is None else [int(n) for n in m[1].split(",") if n.strip()]


@dataclass
class ProgramMeshes:
    """The meshes of a program.

    Attributes:
        texts: the text of each, by name.
        mesh: the one on which the program is imported; None without axes.
    """

    texts: Mapping[str, str]
    mesh: Mesh | None
    _axes: dict[tuple[str, Axis], Axes] = field(default_factory=dict)
    _warned: set[str] = field(default_factory=set)

    @property
    def device_ids(self) -> list[int] | None:
        """The device at each place of the mesh; None where these are the same numbers."""
        return None if self.mesh is None else device_ids_of(self.texts.get(self.mesh.name, ""))

    # ---- shardings ----

    def sharding(self, text: str) -> Sharding | None:
        """Return a sharding of Shardy's text; None if it leaves the layout open: on a mesh without
        devices, as JAX has one for values that may have any layout, or on a single device."""
        return self._on_mesh(read_sharding(text), text)

    def shardings(self, text: str) -> list[Sharding | None]:
        """Return the shardings of several values, of Shardy's text."""
        return [self._on_mesh(sharding, text) for sharding in read_shardings(text)]

    def _on_mesh(self, sharding: Sharding, text: str) -> Sharding | None:
        """Return a sharding on any mesh as one on ours; `text` is what messages show.

        Raises:
            ShardirError: our mesh has no such axes, or the sharding does not fit its own.
        """
        name = sharding.layout.mesh
        mesh = self.texts.get(name, "").removeprefix("#sdy.mesh")
        if mesh.endswith(NO_DEVICES):
            return None
        if mesh.startswith(NO_AXES):
            self._warn(
                name,
                f"expected values of all devices, got some of device {self.device(name)} alone "
                f"(@{name}): they have layouts as other values do",
            )
            return None
        if self.mesh is None:
            raise ShardirError(f"expected a mesh for the sharding {text}, got none; pass mesh=...")
        if name != self.mesh.name:
            other = self._other(name)
            sharding.check(other)
            layout = sharding.layout
            layout = replace(
                layout, mesh=self.mesh.name, partial=self.axes(name, layout.partial),
                dims=tuple(self.axes(name, axes) for axes in layout.dims),
            )  # fmt: skip
            sharding = replace(
                sharding, layout=layout, replicated=self.axes(name, sharding.replicated)
            )
        sharding.check(self.mesh)
        return sharding.simplified(self.mesh)

    # ---- devices ----

    def device(self, name: str) -> int | None:
        """Return the device of a mesh of a single device; None of another mesh."""
        text = self.texts.get(name, "").removeprefix("#sdy.mesh")
        ids = device_ids_of(text)
        return ids[0] if text.startswith(NO_AXES) and ids else None

    def device_of(self, op: HloOp) -> int | None:
        """Return the device that alone computes an op, by its sharding; None if there is none."""
        keys = ("sdy.sharding", "sharding", "out_sharding")
        texts = [str(op.attributes[key]) for key in keys if key in op.attributes]
        devices = {self.device(name) for text in texts for name in MESH_NAME.findall(text)}
        return devices.pop() if len(devices) == 1 else None

    # ---- axes ----

    def axes(self, name: str, axes: Axes) -> Axes:
        """Return the axes of a mesh as those of ours."""
        return tuple(own for axis in axes for own in self._own(name, axis))

    def manual_axes(self, name: str, names: Sequence[str]) -> list[str]:
        """Return the axes of ours that are these axes of a mesh, of a manual computation.

        Raises:
            ShardirError: they are no whole axes, or the devices have another order, by which the
                computation would run on other shards.
        """
        mesh = self.mesh
        if mesh is None or name == mesh.name:
            return [*names]
        axes = tuple(map(Axis, names))
        own = () if self.is_reordered(name) else mesh.union(self.axes(name, axes), ())
        if (axes and not own) or any(a not in mesh.names for a in own):
            raise ShardirError(
                f"expected a manual computation over axes of mesh {mesh}, got one over "
                f"{axes_text(axes)} of {self._other(name)}, which are none of it; write it on one "
                "mesh"
            )
        return [a.name for a in own]

    def _own(self, name: str, axis: Axis) -> Axes:
        if self.mesh is None or name == self.mesh.name:
            return (axis,)
        if (name, axis) not in self._axes:
            self._axes[name, axis] = self._translated(self.mesh, self._other(name), axis)
        return self._axes[name, axis]

    def _translated(self, mesh: Mesh, other: Mesh, axis: Axis) -> Axes:
        name = other.name
        if self.is_reordered(name):
            self._warn(
                name,
                f"expected the devices of @{mesh.name} in its order, got another one in "
                f"@{name}: shards are at the same places of both",
            )
            places = {n: own for (n, _), own in zip(other.axes, mesh.names, strict=True)}
            return (axis._replace(name=places[axis.name].name),)
        axes = self._own_axes(other, axis)
        if axes is None:
            raise ShardirError(
                f"expected a sharding of mesh {mesh}, got one of {other} whose axis {axis} is no "
                "axis of it; write it on one mesh"
            )
        return axes

    def _other(self, name: str) -> Mesh:
        """Return another mesh of the program. Raises ShardirError where there is none, or it has
        other devices than ours."""
        if name not in self.texts:
            mesh = getattr(self.mesh, "name", "")
            raise ShardirError(f"expected a sharding of mesh @{mesh}, got one of @{name}")
        other = mesh_from_sdy(f"sdy.mesh @{name} = {DEVICE_IDS.sub('', self.texts[name])}")
        if self.mesh is not None and sorted(self._ids(self.mesh)) != sorted(self._ids(other)):
            raise ShardirError(
                f"expected a sharding of mesh {self.mesh}, got one of {other}, which has other "
                "devices; write it on one mesh"
            )
        return other

    def _ids(self, mesh: Mesh) -> list[int]:
        """Return the device at each place of a mesh."""
        return device_ids_of(self.texts.get(mesh.name, "")) or [*range(mesh.size)]

    def _own_axes(self, other: Mesh, axis: Axis) -> Axes | None:
        """Return an axis of a mesh with the devices of ours as axes of ours; None without some."""
        assert self.mesh is not None
        place = {device: n for n, device in enumerate(self._ids(self.mesh))}
        others = self._ids(other)
        rows = [[place[others[rank]] for rank in group] for group in other.groups((axis,))]
        return axes_of_groups(rows, self.mesh)

    def is_reordered(self, name: str) -> bool:
        """Whether a mesh has the sizes of ours, and its devices in an order that is not that of
        axes: its shards are then at the same places of ours."""
        if self.mesh is None or name == self.mesh.name:
            return False
        other = self._other(name)
        if [n for _, n in other.axes] != [n for _, n in self.mesh.axes]:
            return False
        return any(self._own_axes(other, axis) is None for axis in other.names)

    def _warn(self, name: str, message: str) -> None:
        if name not in self._warned:
            self._warned.add(name)
            warn(None, message)


# ---- groups of devices ----


def axes_of_groups(groups: Sequence[Sequence[int]], mesh: Mesh) -> Axes | None:
    """Return the axes of which these are all groups, each in row-major order; None without some."""
    first, axes, size = groups[0], list[Axis](), 1
    while size < len(first):
        stride = first[size] - first[0]
        step = _axis_of_stride(stride, mesh)
        if step is None:
            return None
        axis, most = step
        count = gcd(most, len(first) // size)
        if count == 1:
            return None
        axes.insert(0, Axis(axis.name, axis.pre * (most // count), count))
        size *= count
    found = mesh.simplify(tuple(axes))
    if mesh.clash(found) or sorted(map(tuple, groups)) != sorted(mesh.groups(found)):
        return None
    return found


def _axis_of_stride(stride: int, mesh: Mesh) -> tuple[Axis, int] | None:
    """Return the longest sub-axis along which neighbours are `stride` ranks apart, and its size."""
    for name, n in mesh.axes:
        unit = mesh.stride(Axis(name))
        if n > 1 and unit <= stride < unit * n and stride % unit == 0 and n % (stride // unit) == 0:
            most = n // (stride // unit)
            return Axis(name, 1, most), most
    return None
