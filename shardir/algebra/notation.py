"""The notation of layouts, axes, meshes and strategies: text -> value, by a Lark grammar.

Both parsers of the IR (ours and xDSL's own) pass the text between `<` and `>` to these functions;
`str` of the value is its text.
"""

import math
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Self

from shardir.algebra.cluster import BYTES, Cluster, HostLink, Level
from shardir.algebra.collectives import PRICED
from shardir.algebra.layout import REDUCTIONS, Layout, LocalLayout
from shardir.algebra.mesh import Axes, Axis, Mesh, SizedAxes
from shardir.algebra.sharding import Sharding
from shardir.algebra.strategy import Strategy
from shardir.diagnostics import NotationError, ShardirError, coded
from shardir.grammar.machine import Machine, UnexpectedError

STARTS = [
    "layout",
    "sharding",
    "local",
    "axes",
    "mesh",
    "cluster",
    "strategy",
    "numbers",
    "options",
]

NamedOptions = tuple[str, tuple[tuple[str, Any], ...]]
"""A word, then names with values: int, float, str, or options again."""


def _figure(at: "Word", name: str, figure: Any) -> Any:
    """Return a figure of a cluster. `at` is its place, for messages.

    Raises:
        NotationError: the figure is out of range.
    """
    figures: dict[str, Any] = {"levels": (), name: figure}
    try:
        Cluster(**figures)
    except ShardirError as e:
        raise NotationError(str(e), at.start_pos) from None
    return figure


def _number_of(name: str) -> Callable[[Any, list[Any]], float]:
    """Return the reduction of a rule whose figure is one number."""
    return lambda values, c: _figure(c[0], name, float(c[0]))


def _rate(what: str, c: list[Any], names: tuple[str, ...]) -> tuple[Any, float]:
    """Return a name with its number.

    Raises:
        NotationError: `names` does not have the name, or the number is out of range.
    """
    name, number = c[0], float(c[1])
    if name not in names:
        raise NotationError(
            f"{what}: expected one of {', '.join(names)}, got {name}", name.start_pos
        )
    _figure(c[1], what, ((name, number),))
    return name, number


def _once(what: str, c: list[Any]) -> tuple[tuple[str, float], ...]:
    """Return names with their numbers.

    Raises:
        NotationError: a name occurs twice.
    """
    seen: set[str] = set()
    for name, _ in c:
        if name in seen:
            raise NotationError(f"{what}: expected {name} once, got it twice", name.start_pos)
        seen.add(name)
    return tuple((str(n), number) for n, number in c)


def check_sizes(axes: Sequence[tuple[Any, int]]) -> None:
    """Raise NotationError for an axis (its token, its size) that a mesh cannot have."""
    seen: set[str] = set()
    for name, size in axes:
        if size < 1:
            raise NotationError(
                f"expected a size of at least 1 for axis {name}, got {size}", name.start_pos
            )
        if name in seen:
            raise NotationError(
                f"expected axis {name} once in the mesh, got it twice", name.start_pos
            )
        seen.add(name)


class Word(str):
    """A terminal, and its offset in the text."""

    start_pos: int

    def __new__(cls, text: str, start: int, end: int) -> Self:
        word = super().__new__(cls, text)
        word.start_pos = start
        return word


class NotationValues:
    """The reductions of notation.lark; `c` is the list of a rule's children."""

    def axis(self, c: list[Any]) -> Axis:
        name, pre, size = c
        return Axis(str(name)) if pre is None else Axis(str(name), int(pre), int(size))

    def axes(self, c: list[Any]) -> Axes:
        return tuple(a for a in c if a is not None)

    def axis_set(self, c: list[Any]) -> Axes:
        *axes, sizes = c
        return self.axes(axes) if sizes is None else SizedAxes(self.axes(axes), sizes)

    def dims(self, c: list[Any]) -> tuple[Axes, ...]:
        return tuple(d for d in c if d is not None)

    def layout(self, c: list[Any]) -> Layout:
        mesh, dims, partial, host = c
        layout = Layout(str(mesh), dims, host=host is not None)
        return layout if partial is None else layout.with_partial(*partial)

    def host(self, c: list[Any]) -> bool:
        return True

    def open_dim(self, c: list[Any]) -> tuple[Axes, bool, int]:
        *entries, priority = c
        axes = tuple(e for e in entries if isinstance(e, Axis))
        return axes, "?" in entries, int(priority[1:]) if priority else 0

    def sharding(self, c: list[Any]) -> Sharding:
        mesh, *dims, replicated, host = c
        dims = [d for d in dims if d is not None]
        return Sharding(
            Layout(str(mesh), tuple(axes for axes, _, _ in dims), host=host is not None),
            frozenset(i for i, (_, is_open, _) in enumerate(dims) if is_open),
            tuple(priority for _, _, priority in dims),
            replicated or (),
        )

    def partial(self, c: list[Any]) -> tuple[Axes, str]:
        reduction, axes = c
        if reduction not in REDUCTIONS:
            message = f"expected a reduction of {', '.join(REDUCTIONS)}, got {reduction}"
            raise NotationError(coded("L4", message), reduction.start_pos)
        return axes, str(reduction)

    def local(self, c: list[Any]) -> LocalLayout:
        return LocalLayout(self.layout(c[:4]), c[4])

    def of(self, c: list[Any]) -> tuple[int, ...]:
        return c[0]

    def ints(self, c: list[Any]) -> tuple[int, ...]:
        return tuple(int(n) for n in c if n is not None)

    numbers = ints
    sizes = ints

    def size(self, c: list[Any]) -> tuple[Any, int]:
        return c[0], int(c[1])

    def mesh(self, c: list[Any]) -> tuple[tuple[str, int], ...]:
        check_sizes(c)
        return tuple((str(n), s) for n, s in c)

    def level(self, c: list[Any]) -> Level:
        name, count, bandwidth, latency = c
        found = Level(str(name), int(count), float(bandwidth), float(latency))
        return _figure(name, "levels", (found,))[0]

    def rate(self, c: list[Any]) -> tuple[Any, float]:
        return _rate("flops", c, tuple(BYTES))

    def operand(self, c: list[Any]) -> tuple[Any, float]:
        return _rate("operands", c, tuple(BYTES))

    def kind(self, c: list[Any]) -> tuple[Any, float]:
        return _rate("collectives", c, PRICED)

    def byte_ratio(self, c: list[Any]) -> tuple[Any, float]:
        return _rate("bytes", c, PRICED)

    def slower(self, c: list[Any]) -> tuple[Any, float]:
        name, number = c[0], float(c[1])
        if "." not in name:
            message = f"ops: expected the name of an op, such as nn.gelu, got {name}"
            raise NotationError(message, name.start_pos)
        _figure(c[1], "ops", ((name, number),))
        return name, number

    def slow(self, c: list[Any]) -> tuple[tuple[str, float], ...]:
        return _once("ops", c)

    def rates(self, c: list[Any]) -> tuple[tuple[str, float], ...]:
        return _once("flops", c)

    def operands(self, c: list[Any]) -> tuple[tuple[str, float], ...]:
        return _once("operands", c)

    def kinds(self, c: list[Any]) -> tuple[tuple[str, float], ...]:
        return _once("collectives", c)

    def bytes(self, c: list[Any]) -> tuple[tuple[str, float], ...]:
        return _once("bytes", c)

    def cluster(self, c: list[Any]) -> Cluster:
        *levels, memory, rates, operands, overhead, interference, occupancy = c[:-8]
        skew, call, packing, kinds, bytes, slow, link, error = c[-8:]
        size, bandwidth = memory or (None, None)
        return Cluster(
            tuple(levels), size, rates or (), bandwidth, overhead or 0.0, interference or 0.0,
            kinds or (), slow or (), link, operands or (), skew or 0.0, occupancy or 0.0,
            bytes or (), call or 0.0, packing or 0.0, error,
        )  # fmt: skip

    def memory(self, c: list[Any]) -> tuple[int, float | None]:
        size, *rates = c
        bytes = _figure(size, "memory", int(size))
        found = [_figure(rate, "memory_bandwidth", float(rate)) for rate in rates]
        return bytes, found[0] if found else None

    def link(self, c: list[Any]) -> HostLink:
        return _figure(c[0], "host", HostLink(float(c[0]), float(c[1])))

    overhead, interference, occupancy = map(_number_of, ("overhead", "interference", "occupancy"))
    skew, call, packing, error = map(_number_of, ("skew", "call", "packing", "error"))

    def count(self, c: list[Any]) -> int:
        if int(c[0]) < 1:
            raise NotationError(f"expected at least 1 slice, got {c[0]}", c[0].start_pos)
        return int(c[0])

    def cut(self, c: list[Any]) -> tuple[Any, ...]:
        return tuple(e for e in c if e is not None)

    cuts = cut

    def option(self, c: list[Any]) -> tuple[Any, Any]:
        return c[0], c[1]

    def int(self, c: list[Any]) -> int:
        return int(c[0])

    def float(self, c: list[Any]) -> float:
        if math.isinf(number := float(c[0])):
            raise NotationError(
                f"expected a number in the range of floats, got {c[0]}", c[0].start_pos
            )
        return number

    def string(self, c: list[Any]) -> str:
        return str(c[0])[1:-1]

    def word(self, c: list[Any]) -> str:
        return str(c[0])

    def options(self, c: list[Any]) -> NamedOptions:
        pairs = [o for o in c[1:] if o is not None]
        names = [n for n, _ in pairs]
        for i, n in enumerate(names):
            if n in names[:i]:
                raise NotationError(f"expected option {n} once, got it twice", n.start_pos)
        return str(c[0]), tuple((str(n), v) for n, v in pairs)

    nested = options

    def strategy(self, c: list[Any]) -> Strategy:
        mesh, operands, results, partial = c
        return Strategy(None if mesh is None else str(mesh), operands, results, *(partial or ()))


@cache
def _machine() -> Machine:
    return Machine(grammar("notation.lark"), STARTS, NotationValues(), token=Word)


@lru_cache(maxsize=65536)
def _parse(text: str, start: str, what: str) -> Any:
    return read(_machine(), text, start, what)


def grammar(file: str) -> str:
    """Return the text of a grammar in this folder."""
    return (Path(__file__).parent / file).read_text()


def read(machine: Machine, text: str, start: str, what: str) -> Any:
    """Return the value of a text. `what` names it in messages. Raises NotationError."""
    try:
        return machine.run(text, start)
    except UnexpectedError as e:
        got = repr(text[e.start]) if e.start < len(text) else "end"
        raise NotationError(f"expected {what}, got {got}", e.start) from None
    except ValueError as e:
        raise NotationError(f"expected {what}, got an invalid number: {e}") from None


def parse_layout(text: str) -> Layout:
    """`@m, [{dp}, {tp:(2)4}], partial sum {x}, on host` -> Layout. Raises NotationError."""
    return _parse(
        text, "layout", "a layout: @mesh, [{axis, ...}, ...], partial sum {axis, ...}, on host"
    )


def parse_sharding(text: str) -> Sharding:
    """`@m, [{dp, ?}, {?}p1], replicated {tp}` -> Sharding. Raises NotationError."""
    return _parse(text, "sharding", "a sharding: @mesh, [{axis, ?}, {?}p1], replicated {axis, ...}")


def parse_local(text: str) -> LocalLayout:
    """A layout, then perhaps `, of [10, 16]`, the global shape. Raises NotationError."""
    return _parse(text, "local", "a local layout: @mesh, [{axis, ...}, ...], of [size, ...]")


def parse_axes(text: str) -> Axes:
    """`dp, tp:(2)4` -> axes. Raises NotationError."""
    return _parse(text, "axes", "a list of axes: dp, tp, d:(2)4")


def parse_mesh(text: str) -> tuple[tuple[str, int], ...]:
    """`dp = 2, tp = 4` -> names and sizes. Raises NotationError."""
    return _parse(text, "mesh", "a mesh: name = size, ...")


def parse_cluster(text: str) -> Cluster:
    """`levels [node = 8 {bandwidth = 4.5e+11, latency = 3e-06}], memory = 80000000000 {bandwidth =
    3.35e+12}, flops {f32 = 6.7e+13}, operands {f32 = 1e+12}, overhead = 4e-06,
    interference = 0.1, occupancy = 0.1, skew = 0.0001, call = 1e-06, packing = 1e-06,
    collectives {all_reduce = 0.8}, bytes {all_reduce = 1.5},
    host {bandwidth = 2.5e+10, latency = 1e-05}, error = 0.1` -> Cluster. Raises NotationError."""
    return _parse(
        text,
        "cluster",
        "a cluster: levels [name = count {bandwidth = B/s, latency = s}, ...], "
        "memory = bytes {bandwidth = B/s}, flops {f32 = flop/s, ...}, operands {f32 = B/s, ...}, "
        "overhead = s, interference = share, occupancy = share, skew = s, call = s, "
        "packing = s, collectives {all_reduce = factor, ...}, bytes {all_reduce = factor, ...}, "
        "host {bandwidth = B/s, latency = s}, error = share",
    )


def parse_strategy(text: str) -> Strategy:
    """`((2, 4), (4, 1))`, `@m, (({tp}, {}), ...) -> ((...)), partial sum {dp}` -> Strategy.

    Raises:
        NotationError: the text is not a strategy.
    """
    return _parse(text, "strategy", "a strategy: ((2, 4), (4, 1)) or (({dp}, {tp}), ({tp}, {}))")


def parse_numbers(text: str) -> tuple[int, ...]:
    """`1, 0` -> (1, 0). Raises NotationError."""
    return _parse(text, "numbers", "a list of integers")


def parse_options(text: str) -> NamedOptions:
    """`normal, mean = 0.0` -> ("normal", (("mean", 0.0),)); a value may be `word<name = value>`.
    Raises NotationError."""
    return _parse(text, "options", "options: word, name = value, ...")


def options_text(options: NamedOptions) -> str:
    """Return the text of options."""
    word, pairs = options
    return ", ".join([word, *(f"{n} = {_value_text(v)}" for n, v in pairs)])


def nested_text(options: NamedOptions) -> str:
    """Return the text of options that are a value of another option."""
    word, pairs = options
    return f"{word}<{', '.join(f'{n} = {_value_text(v)}' for n, v in pairs)}>"


def _value_text(v: Any) -> str:
    if isinstance(v, tuple):
        return nested_text(v)
    return f'"{v}"' if isinstance(v, str) else repr(v)


def mesh_of(name: str, text: str) -> Mesh:
    return Mesh(name, parse_mesh(text))
