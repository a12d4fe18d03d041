"""The programs that shard-calibrate measures, as text: one module.

Each collective has functions of its own. It is called between ops of several kinds that sweep
caches, as in a program: called one after the other collectives find their code and buffers there,
and no rank has to be woken, and take half of the time or less. What counts is what a call takes
beyond its computation (`exposed`, as in traces). The probes of computation are ops of one function,
OPS, in an order in which neighbours are of other kinds and have other operands, of about the same
size: an op that is called again and again finds its code and its operands in caches, and is up to
three times as fast as in a program. The first operand is made by an op before it, as in a program.

All ranks run them at once, as they run a program, so a probe measures a rank's share of cores,
caches and links.
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isqrt
from typing import NamedTuple

from shardir.algebra.cluster import BYTES
from shardir.algebra.collectives import COLLECTIVES as RECORDS
from shardir.algebra.collectives import AxisState, between

ROW = 256
"""Elements of f32 in a row of a communicated value: 1 KB."""

SMALLEST = 1 << 12
"""The bytes of the smallest value."""

CALLS, CLOSE = 2, 4
"""The number of calls of its collective in a function: between other ops; one after the other."""

SEVERAL = 8
"""The number of values that are moved together."""

OPS = "computed"
"""The function of the probes of computation."""

SWEEPING = 384
"""The side of the squares on which ops of several kinds are between collectives: 0.6 MB. After one
kind alone a gather of 4 KB on 4 ranks takes half of the processor's time that it takes in
programs."""

MIXED = (
    "nn.neg {0} : ({1}) -> {1}",
    "nn.softmax {0} axis 1 : ({1}) -> {1}",
    "nn.mul {0}, %w : ({1}, {1}) -> {1}",
    "nn.gelu {0} : ({1}) -> {1}",
    "nn.transpose {0} perm <1, 0> : ({1}) -> {1}",
    "nn.add {0}, %w : ({1}, {1}) -> {1}",
)
"""These ops, of an operand and its type."""

BESIDE, WIDE = (1, 4), 256
"""The numbers of products computed while a collective is in flight, and their side."""

APART, LATE = (1, 4, 16), 3
"""The numbers of products before a collective after which ranks are apart, and the number of such
collectives: no two products have the same weight, as in a program."""

LARGEST = {"f64": 1 << 20, "f32": 1 << 20, "bf16": 1 << 18, "f16": 1 << 18}
"""Bytes of f32 of the largest square of each type on a CPU, where some types are very slow."""

LONGER = 4
"""The number of rows of a batch, relative to the side of a square."""

HEADS = 16
"""The number of squares that an attention multiplies at once."""

ELEMENTWISE = {
    "add": ("{0}, {1}", "xx", "x"), "mul": ("{0}, {1}", "xx", "x"), "sub": ("{0}, {1}", "xx", "x"),
    "relu": ("{0}", "x", "x"), "neg": ("{0}", "x", "x"),
}  # fmt: skip
"""Ops that take the time of their bytes: operands and options, and the types of operands and
results, of rows x, a weight w, the numbers i of rows, a number of each row c, and x transposed t or
without dimensions f."""

SLOW = {
    "exp": ("{0}", "x", "x"), "tanh": ("{0}", "x", "x"), "gelu": ("{0}", "x", "x"),
    "gelu_grad": ("{0}, {1}", "xx", "x"), "relu_grad": ("{0}, {1}", "xx", "x"),
    "softmax": ("{0} axis 1", "x", "x"), "softmax_grad": ("{0}, {1} axis 1", "xx", "x"),
    "layer_norm": ("{0}, {1}, {2} eps 1.0e-5", "xww", "x"),
    "layer_norm_grad": ("{0}, {1}, {2}, {3}, {4}", "xwxcc", "xww"),
    "gather": ("{0}, {1} axis 0", "xi", "x"), "concat": ("{0}, {1} axis 0", "xx", "d"),
}  # fmt: skip
"""Ops whose time the roofline does not have. Each is a subject, of a ratio of the cluster."""

REDUCE, REDUCED = "nn.reduce", ((0, "w"), (1, "c"))
"""Sums, also a subject: along a dimension, and of all elements, of which a program has one for each
loss; those that make the results of OPS are of this kind."""

VIEWED = {"transpose": ("{0} perm <1, 0>", "x", "t"), "reshape": ("{0}", "x", "f")}
"""Views, whose time is that of a call."""

SMALL, SMALL_OPS = (8, 8), 12
"""The shape of values of negligible work, and the number of ops of each kind on them: they weigh as
much as the smallest values of all other kinds, some of which take several calls."""

REPLICATED, SHARDED, PARTIAL, _ = AxisState

COLLECTIVES = (
    (between(PARTIAL, REPLICATED).name, "<sum> {}", "partial", "replicated"),
    (between(SHARDED, REPLICATED).name, "{} dim 0", "rows", "replicated"),
    (between(SHARDED, REPLICATED).name, "{} dim 1", "columns", "replicated"),
    (between(PARTIAL, SHARDED).name, "<sum> {} dim 0", "partial", "rows"),
    (between(PARTIAL, SHARDED).name, "<sum> {} dim 1", "partial", "columns"),
    (between(SHARDED, SHARDED).name, "{} split 1 concat 0", "rows", "columns"),
    ("exchange", "{}", "columns", "rows"),
    ("permute", "{} pairs <PAIRS>", "rows", "rows"),
)
"""Each measured collective: its text with a field for the operand, and the operand's and the
result's layout."""


@dataclass(frozen=True)
class Probe:
    """A function of the module, its subject (an element type, `memory`, `overhead`,
    `interference`, `skew`, a collective, or the name of an op), and the approximate bytes of its
    values. Of a probe `against` another one, which has no subject, the ratio of both times counts;
    of one that is `exposed` what it takes beyond its computation. A probe of computation has no
    text: its name is that of an op's result in OPS."""

    name: str
    about: str
    size: int
    text: str
    against: str = ""
    exposed: bool = False


def module(probes: Sequence[Probe], ranks: int) -> str:
    """Return the module of all probes, on one mesh."""
    head = [f"dist.mesh @m <r = {ranks}>", *(p.text for p in probes if p.text)]
    return "\n".join(head)


def probes(ranks: int, most: int, cpu: bool = True) -> list[Probe]:
    """Return the probes on that many ranks, whose values have at most about `most` bytes."""
    largest = {e: min(most, n) if cpu else most for e, n in LARGEST.items()}
    communication = (p for n in groups(ranks) for p in communicating(ranks, n, most))
    return [*communication, *computing(largest, most, cpu)]


def against(probes: Sequence[Probe]) -> dict[int, int]:
    """Return the indices of probes against others, with the indices of these."""
    indices = {p.name: i for i, p in enumerate(probes)}
    return {i: indices[p.against] for i, p in enumerate(probes) if p.against}


def groups(ranks: int) -> list[int]:
    """Return the sizes of groups of neighbours that divide the ranks."""
    return [n for n in range(2, ranks + 1) if ranks % n == 0]


def sizes(most: int) -> list[int]:
    """Return 4 KB, 16 KB, ... up to `most` bytes, at least one."""
    found = [SMALLEST]
    while found[-1] * 4 <= most:
        found.append(found[-1] * 4)
    return found


class _ComputedOp(NamedTuple):
    """An op of OPS: its subject, the bytes of its values, its text with a field for each operand,
    and the types of operands and results."""

    about: str
    size: int
    text: str
    given: list[str]
    made: list[str]


def computing(largest: Mapping[str, int], most: int, cpu: bool = True) -> Iterator[Probe]:
    """Yield the probes of computation; the last one has the text of all."""
    ops = [*products(largest), *kinds("memory", ELEMENTWISE, LONGER * most)]
    ops += [op for kind, form in SLOW.items() for op in kinds(f"nn.{kind}", {kind: form}, most)]
    ops += [op for kind, form in VIEWED.items() for op in kinds(f"nn.{kind}", {kind: form}, most)]
    for size in sizes(most):
        types = _types(_rows(size))
        for dim, result in REDUCED:
            text = f"nn.reduce <sum> {{0}} dims <{dim}>"
            ops.append(_ComputedOp(REDUCE, size, text, [types["x"]], [types[result]]))
    for kind, form in ELEMENTWISE.items():
        ops += SMALL_OPS * [_of_kind("overhead", 0, kind, form, SMALL)]
    random.Random(0).shuffle(ops)
    # As in a program, values of neighbours are of similar sizes. On a GPU the largest come first:
    # the host gets ahead of the device, so that kernels are measured, and not their launches.
    ops.sort(key=lambda op: op.size, reverse=not cpu)
    f, results = _ProbeFunction(OPS, []), list[tuple[str, str]]()
    for i, op in enumerate(ops):
        names = [f"a{i}_{k}" for k in range(len(op.given))]
        f.arguments += zip(names, op.given, strict=True)
        f.filled |= set() if op.about in LARGEST else {*names}
        first = op.given[0]
        f.op(f"nn.neg %{names[0]} : ({first}) -> {first}", first)
        operands = [f.last, *(f"%{n}" for n in names[1:])]
        sides = [", ".join(side) for side in (op.given, op.made)]
        call = f"{op.text.format(*operands)} : ({sides[0]}) -> ({sides[1]})"
        f.op(call, op.made[0], len(op.made))
        yield Probe(f.last[1:], op.about, op.size, "")
        *shape, element = op.made[0].removeprefix("tensor<").split(",")[0].split("x")
        dims, scalar = ", ".join(map(str, range(len(shape)))), _type((), element)
        f.op(f"nn.reduce <sum> {f.last} dims <{dims}> : ({op.made[0]}) -> {scalar}", scalar)
        results += f.results
    f.results = sorted(results, key=lambda result: "f32" not in result[1])  # a loss comes first
    yield f.probe("", 0)


def products(largest: Mapping[str, int]) -> Iterator[_ComputedOp]:
    """Yield squares of each element type; of f32 also a batch, as in a layer, and many squares, as
    in an attention. Each has the product of its gradient."""
    for element, most in largest.items():
        for size in sizes(most):
            n = isqrt(size // BYTES["f32"])
            yield from _products(element, n, n)
            if element == "f32":
                yield from _products(element, LONGER * n, n)
                if HEADS * size <= most:
                    yield from _products(element, n, n, (HEADS,))


def _products(
    element: str, rows: int, n: int, heads: tuple[int, ...] = ()
) -> Iterator[_ComputedOp]:
    b, size = "b" * len(heads), n * n * BYTES["f32"]
    t, square = (_type((*heads, k, n), element) for k in (rows, n))
    yield _ComputedOp(element, size, "nn.matmul {0}, {1}", [t, square], [t])
    gradient = f'nn.einsum "{b}ik,{b}ij->{b}kj" {{0}}, {{1}}'
    yield _ComputedOp(element, size, gradient, [t, t], [square])


def kinds(
    about: str, forms: Mapping[str, tuple[str, str, str]], most: int
) -> Iterator[_ComputedOp]:
    """Yield ops of each kind by size."""
    for kind, form in forms.items():
        for size in sizes(most):
            yield _of_kind(about, size, kind, form, _rows(size))


def _of_kind(
    about: str, size: int, kind: str, form: tuple[str, str, str], shape: tuple[int, int]
) -> _ComputedOp:
    types, (text, given, made) = _types(shape), form
    sides = [[types[name] for name in side] for side in (given, made)]
    return _ComputedOp(about, size, f"nn.{kind} {text}", *sides)


def _types(shape: tuple[int, int]) -> dict[str, str]:
    n, m = shape
    return {
        "x": _type((n, m)), "w": _type((m,)), "c": _type((n,)), "i": _type((n,), "i32"),
        "t": _type((m, n)), "f": _type((n * m,)), "d": _type((2 * n, m)),
    }  # fmt: skip


def _rows(size: int) -> tuple[int, int]:
    return size // (ROW * 4), ROW


def communicating(ranks: int, n: int, most: int) -> Iterator[Probe]:
    """Yield each collective in all groups of n neighbours at once. The size is that of the largest
    shape of a value: before an all-reduce, after an all-gather."""
    axes = "r" if n == ranks else f"r:({ranks // n}){n}"
    wide = _type((WIDE, WIDE))
    for size in sizes(most):
        rows, row = (-(-k // n) * n for k in (size // (ROW * 4), ROW))  # equal shards
        full, sums = _type((rows, row)), _type((rows, row), partial=axes)
        mine = _type((1, rows, row), dims=(axes, "", ""))
        by_rows = _type((rows // n, row), dims=(axes, ""))
        by_columns = _type((rows, row // n), dims=("", axes))
        types = {"replicated": full, "partial": sums, "rows": by_rows, "columns": by_columns}
        pairs = ", ".join(f"{i}, {(i + 1) % n}" for i in range(n))
        for kind, text, before, after in COLLECTIVES:
            source, target = types[before], types[after]
            text = f"dist.{kind} {text.replace('PAIRS', pairs)} over <{axes}>"
            along = text.partition(" dim ")[2][:1]
            of_kind = _CollectiveProbes(kind, f"{kind}{along}_{n}_{size}", size, text)
            of_kind.types = (mine if source is sums else source, source, target)
            yield of_kind.called("", CALLS, 1, 1)
            if size == SMALLEST:
                yield of_kind.called("close_", 1, CLOSE, 1)
            if size in (SMALLEST, 16 * SMALLEST) and RECORDS[kind].fusible:
                yield of_kind.called("several_", CALLS, 1, SEVERAL)
        for products in BESIDE:
            about = f"{products}_{n}_{size}"
            for name, started in ((f"apart_{about}", ""), (f"beside_{about}", " async")):
                f = _ProbeFunction(name, [("x", by_rows), ("w", wide)])
                f.op(
                    f"dist.all_gather %x dim 0 over <{axes}>{started} : ({by_rows}) -> {full}",
                    full,
                )
                gathered, product = f.last, "%w"
                for _ in range(products):
                    f.op(f"nn.matmul {product}, %w : ({wide}, {wide}) -> {wide}", wide)
                    product = f.last
                if started:
                    f.op(f"dist.wait {gathered} : ({full}) -> {full}", full)
                    gathered = f.last
                f.results = [(gathered, full), (product, wide)]
                against = f"apart_{about}" if started else ""
                yield f.probe("interference" if started else "", size, against)
        if size == SMALLEST:
            yield from (_late(n, k, axes, (by_rows, full), wide) for k in APART)


class _CollectiveProbes:
    """The probes of a kind of collective: its text with a field for the operands, and the types of
    an argument, an operand and a result."""

    types: tuple[str, str, str]

    def __init__(self, kind: str, name: str, size: int, text: str):
        self.kind, self.name, self.size, self.text = kind, name, size, text

    def called(self, how: str, times: int, close: int, values: int) -> Probe:
        """Return the probe with other ops before, so many times, `close` calls with so many
        values."""
        given, source, target = self.types
        square = _type((SWEEPING, SWEEPING))
        arguments = [(f"x{i}", given) for i in range(close * values)]
        f = _ProbeFunction(how + self.name, [*arguments, ("w", square)])
        results, other = list[tuple[str, str]](), "%w"
        for _ in range(times):
            for text in MIXED:
                other = f.op(text.replace("{0}", other).replace("{1}", square), square)
            operands = [f"%{name}" for name, _ in arguments]
            if source != given:
                operands = [
                    f.op(f"nn.reduce <sum> {x} dims <0> : ({given}) -> {source}", source)
                    for x in operands
                ]
            for i in range(0, len(operands), values):
                types = (", ".join([each] * values) for each in (source, target))
                call = self.text.format(", ".join(operands[i : i + values]))
                f.op(f"{call} : ({') -> ('.join(types)})", target, values)
                results += f.results
        f.op(f"nn.reduce <sum> {other} dims <0, 1> : ({square}) -> {_type(())}", _type(()))
        f.results += results  # what no result needs is no part of a program
        return f.probe(self.kind, self.size, exposed=True)


def _late(n: int, products: int, axes: str, gathered: tuple[str, str], square: str) -> Probe:
    """Return gathers of a value each of which begins after products that take longer than the wait
    for the last rank."""
    weights = [f"w{i}" for i in range(products * LATE)]
    by_rows, full = gathered
    f = _ProbeFunction(f"late_{n}_{products}", [("x", by_rows), *((w, square) for w in weights)])
    product, results = "%w0", []
    for i, weight in enumerate(weights, 1):
        f.op(f"nn.matmul {product}, %{weight} : ({square}, {square}) -> {square}", square)
        product = f.last
        if i % products == 0:
            f.op(f"dist.all_gather %x dim 0 over <{axes}> : ({by_rows}) -> {full}", full)
            results += f.results
    f.results = [*results, (product, square)]
    return f.probe("skew", SMALLEST, exposed=True)


class _ProbeFunction:
    """The lines of a function; the last value is its result, unless `results` are set."""

    def __init__(self, name: str, arguments: list[tuple[str, str]]):
        self.name, self.arguments = name, arguments
        self.filled: set[str] = set()  # arguments of one number, but for indices
        self.lines: list[str] = []
        self.last = ""
        self.results: list[tuple[str, str]] = []

    def op(self, text: str, type: str, results: int = 1) -> str:
        """Add an op, and return its value; of several results the first, which has the type."""
        self.last = f"%v{len(self.lines)}"
        self.results = [(self.last, type)]
        names = [self.last, *(f"{self.last}_{i}" for i in range(1, results))]
        self.lines.append(f"  {', '.join(names)} = {text}")
        return self.last

    def probe(self, about: str, size: int, against: str = "", exposed: bool = False) -> Probe:
        inputs = ((n, t, _drawn(t, n in self.filled)) for n, t in self.arguments)
        given = ", ".join(f"%{n}: {t} {{train.input = {drawn}}}" for n, t, drawn in inputs)
        values, types = (", ".join(each) for each in zip(*self.results, strict=True))
        is_step = self.results[0][1] == _type(())  # then values are freed after their last use
        attributes = "attributes {train.step} " if is_step else ""
        text = (
            f"func.func @{self.name}({given}) -> ({types}) {attributes}{{\n"
            + "\n".join(self.lines)
            + f"\n  func.return {values} : {types}\n}}"
        )
        return Probe(self.name, about, size, text, against, exposed)


def _type(
    shape: tuple[int, ...], element: str = "f32", dims: tuple[str, ...] = (), partial: str = ""
) -> str:
    """Return a type of the local view."""
    split = ", ".join(f"{{{axes}}}" for axes in dims or ("",) * len(shape))
    sums = f", partial sum {{{partial}}}" if partial else ""
    return f"tensor<{'x'.join([*map(str, shape), element])}, #dist.local<@m, [{split}]{sums}>>"


def _drawn(type: str, filled: bool = False) -> str:
    """Return the values of an input of a type of the local view: integers, which number rows, are
    random, and so are others but those of ops whose time does not depend on them, since large ones
    are drawn for longer than they are computed with. (GPUs multiply equal numbers faster.)"""
    if "i32," in type:
        return "#train.init<integers, low = 0, high = 3>"
    return (
        f"#train.init<{'constant, value = 0.5' if filled else 'uniform, low = -0.02, high = 0.02'}>"
    )
