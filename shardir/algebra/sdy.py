"""Shardy's text of shardings and meshes, to and from ours.

    #sdy.sharding<@m, [{"dp"}, {"tp":(1)2, ?}p1], replicated={"ep"}, unreduced={"x"}>
    sdy.mesh @m = <["dp"=2, "tp"=4]>

Axes, sub-axes of axes, and their order are the same on both sides, and so are the shards.
`unreduced={"x"}` is `partial sum {x}`, and `unreduced=max{"x"}` is `partial max {x}`. Open
dimensions, priorities and replicated axes are no part of a layout, but of a `Sharding`. The grammar
is that of Shardy's sharding representation and of its attributes' printers (openxla/shardy,
docs/sharding_representation.md).
"""

import re
from functools import cache, lru_cache
from typing import Any

from shardir.algebra.layout import Layout
from shardir.algebra.mesh import Axes, Axis, Mesh, sizes_of
from shardir.algebra.notation import Word, check_sizes, grammar, read
from shardir.algebra.sharding import Sharding
from shardir.diagnostics import NotationError, ShardirError, coded, one_of
from shardir.grammar.machine import Machine

REDUCTIONS = ("sum", "max", "min")
"""The reductions of unreduced axes in Shardy."""

NAME = re.compile(r"[A-Za-z_][\w$.]*")
"""The names of meshes and axes that are valid in both notations."""


def to_sdy(sharding: Layout | Sharding, mesh: Mesh) -> str:
    """Return the text of a sharding. A layout has closed dimensions of priority 0.

    Raises:
        ShardirError: the sharding does not fit the mesh, or Shardy cannot express it.
    """
    if isinstance(sharding, Layout):
        sharding = Sharding(sharding)
    sharding.check(mesh)
    sharding = sharding.simplified(mesh)
    layout = sharding.layout
    if layout.partial and layout.reduction not in REDUCTIONS:
        raise ShardirError(
            f"expected a partial {one_of(REDUCTIONS)}, as Shardy has, got [{layout}]; "
            "redistribute to a layout without it"
        )
    if layout.host:
        raise ShardirError(
            f"expected a layout in device memory, as all of Shardy's are, got [{layout}]; "
            "redistribute to it"
        )
    if any(map(sizes_of, layout.dims)):
        raise ShardirError(
            f"expected shards of ceil(N / n) elements, as in Shardy, got [{layout}]; redistribute "
            "to a layout without explicit sizes"
        )
    dims = []
    for i, axes in enumerate(layout.dims):
        entries = [*map(_axis_text, axes), *(["?"] if i in sharding.open else [])]
        priority = f"p{sharding.priority(i)}" if sharding.priority(i) else ""
        dims.append("{" + ", ".join(entries) + "}" + priority)
    parts = [f"@{mesh.name}", f"[{', '.join(dims)}]"]
    kind = "" if layout.reduction == "sum" else layout.reduction
    for word, axes in (("replicated=", sharding.replicated), (f"unreduced={kind}", layout.partial)):
        if axes:
            parts.append(f"{word}{{{', '.join(map(_axis_text, axes))}}}")
    return f"#sdy.sharding<{', '.join(parts)}>"


def from_sdy(text: str, mesh: Mesh) -> Sharding:
    """Return the sharding of a text, `#sdy.sharding<...>` or only `<...>`, in normal form.

    Raises:
        NotationError: the text does not parse, or has no equivalent here.
        ShardirError: the sharding does not fit the mesh.
    """
    return _checked(read_sharding(text), mesh)


def read_sharding(text: str) -> Sharding:
    """Return the sharding of a text on the mesh that it names. Raises NotationError."""
    return _parse(
        text, "sharding", 'a sharding: #sdy.sharding<@mesh, [{"axis", ?}, ...], replicated={...}>'
    )


def read_shardings(text: str) -> list[Sharding]:
    """Return the shardings of several values, on the meshes that they name. Raises
    NotationError."""
    return _parse(text, "per_value", "#sdy.sharding_per_value<[<@mesh, [...]>, ...]>")


def manual_axes_from_sdy(text: str) -> list[str]:
    """Return the names in `#sdy<manual_axes{"x", "y"}>`. Raises NotationError."""
    return _parse(text, "manual_axes", '#sdy<manual_axes{"axis", ...}>')


def _checked(found: Sharding, mesh: Mesh) -> Sharding:
    if found.layout.mesh != mesh.name:
        raise ShardirError(
            f"expected a sharding of mesh @{mesh.name}, got one of @{found.layout.mesh}"
        )
    found.check(mesh)
    return found.simplified(mesh)


def mesh_to_sdy(mesh: Mesh) -> str:
    """`sdy.mesh @m = <["dp"=2, "tp"=4]>`: devices are numbered row-major on both sides."""
    sizes = ", ".join(f'"{n}"={s}' for n, s in mesh.axes)
    return f"sdy.mesh @{mesh.name} = <[{sizes}]>"


def mesh_from_sdy(text: str) -> Mesh:
    """Return the mesh of a text. Raises NotationError."""
    return _parse(text, "mesh", 'a mesh: sdy.mesh @mesh = <["axis"=size, ...]>')


def _axis_text(a: Axis) -> str:
    return f'"{a.name}":({a.pre}){a.size}' if a.size else f'"{a.name}"'


class _SdyValues:
    """The reductions of sdy.lark; `c` is the list of a rule's children."""

    def axis(self, c: list[Any]) -> Axis:
        name, pre, size = c
        return Axis(str(name)) if pre is None else Axis(str(name), int(pre), int(size))

    def dim(self, c: list[Any]) -> tuple[Axes, bool, int]:
        *entries, priority = c
        axes = tuple(e for e in entries if isinstance(e, Axis))
        return axes, "?" in entries, int(priority[1:]) if priority else 0

    def keyed(self, c: list[Any]) -> tuple[Any, tuple[str, Axes]]:
        word, reduction, *axes = c
        if reduction is not None and word != "unreduced":
            message = f"expected the axes of {word}, got {reduction}; drop it"
            raise NotationError(message, reduction.start_pos)
        return word, (str(reduction or "sum"), tuple(a for a in axes if a is not None))

    def sharding(self, c: list[Any]) -> Sharding:
        mesh, *rest = c
        dims = [d for d in rest if d is not None and len(d) == 3]
        given: dict[str, tuple[str, Axes]] = {}
        for word, axes in (k for k in rest if k is not None and len(k) == 2):
            if str(word) in given:
                raise NotationError(
                    f"expected {word} once in the sharding, got it twice", word.start_pos
                )
            given[str(word)] = axes
        layout = Layout(str(mesh), tuple(axes for axes, _, _ in dims))
        reduction, axes = given.get("unreduced", ("sum", ()))
        return Sharding(
            layout.with_partial(axes, reduction),
            frozenset(i for i, (_, is_open, _) in enumerate(dims) if is_open),
            tuple(priority for _, _, priority in dims),
            given["replicated"][1] if "replicated" in given else (),
        )

    def per_value(self, c: list[Any]) -> list[Sharding]:
        return [s for s in c if s is not None]

    def manual_axes(self, c: list[Any]) -> list[str]:
        return [str(name) for name in c if name is not None]

    def inlined(self, c: list[Any]) -> Any:
        raise NotationError(
            'expected the name of a mesh, got an inlined mesh; declare sdy.mesh @m = <["x"=2]>, '
            "and write @m",
            c[0].start_pos,
        )

    def size(self, c: list[Any]) -> tuple[Word, int]:
        return c[0], int(c[1])

    def device_ids(self, c: list[Any]) -> list[int]:
        return [int(n) for n in c if n is not None]

    def mesh(self, c: list[Any]) -> Mesh:
        name, *sizes, ids = c
        axes = tuple(s for s in sizes if s is not None)
        if not axes:
            message = f"expected an axis in mesh @{name}, got none"
            fix = 'write <["x"=1]> for one device'
            raise NotationError(coded("M1", message, use=fix), name.start_pos)
        check_sizes(axes)
        mesh = Mesh(str(name), tuple((str(n), s) for n, s in axes))
        if ids is not None and (len(ids) != mesh.size or ids != [*range(len(ids))]):
            raise NotationError(
                f"expected the device_ids of mesh @{name} to be 0 to {mesh.size - 1} in order, got "
                f"{ids}; start the ranks in that order, and drop device_ids",
                name.start_pos,
            )
        return mesh


def _symbol(text: str, start: int, end: int) -> Word:
    return _name(text[1:].strip('"'), "a mesh", start, end)


def _string(text: str, start: int, end: int) -> Word:
    return _name(text[1:-1], "an axis", start, end)


def _name(text: str, what: str, start: int, end: int) -> Word:
    if not NAME.fullmatch(text):
        raise NotationError(
            f"expected a name of {what} of letters, digits, _, $ and ., beginning with a letter or "
            f'_, got "{text}"; rename it',
            start,
        )
    return Word(text, start, end)


@cache
def _machine() -> Machine:
    names = {"SYMBOL": _symbol, "STRING": _string}
    starts = ["sharding", "mesh", "per_value", "manual_axes"]
    return Machine(grammar("sdy.lark"), starts, _SdyValues(), names, token=Word)


@lru_cache(maxsize=65536)
def _parse(text: str, start: str, what: str) -> Any:
    return read(_machine(), text, start, what)
