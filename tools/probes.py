"""The programs that shard-calibrate measures, as text: one module, a small function for each probe.

All ranks run them at once, as they do a program: what a rank gets of cores, caches and links that
others use too is what is measured. A collective is called between products, as a program calls it:
between nothing it is quicker, since no rank has to be woken.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isqrt

from shardir.algebra.cluster import BYTES
from shardir.algebra.collectives import State, between

ROW = 256
"""Elements of f32 in a row of what is communicated: 1 KB."""

LEAST = 1 << 12
CALLS = 2
"""How often a function calls its collective."""

BETWEEN = 96
"""The side of the products between collectives."""

BESIDE, WIDE = (1, 4), 256
"""How many products are calculated beside a collective that is started, and their side."""

LARGEST = {"f64": 1 << 20, "f32": 1 << 20, "bf16": 1 << 18, "f16": 1 << 18}
"""Bytes, of f32, of the largest square of each type on a CPU, where some types are very slow."""

LONGER = 4
"""How much longer than a square's side is the one that a batch's rows have."""

HEADS = 16
"""How many squares an attention multiplies at once."""

ELEMENTWISE = ("add", "relu", "gelu")

REPLICATED, SHARDED, PARTIAL, _ = State

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
"""Each collective that is measured: its text with the operand's place, and the operand's and the
result's layout."""


@dataclass(frozen=True)
class Probe:
    """A function of the module, what it is about (an element type, `memory`, `overhead`,
    `interference` or a collective), and about how many bytes its values have. What counts of one
    that has another to stand `against` is how much quicker it is; that one is about nothing."""

    name: str
    about: str
    size: int
    text: str
    against: str = ""


def module(probes: Sequence[Probe], ranks: int) -> str:
    """The module with all of them, on one mesh."""
    return "\n".join([f"dist.mesh @m <r = {ranks}>", *(p.text for p in probes)])


def probes(ranks: int, most: int, cpu: bool = True) -> list[Probe]:
    """The probes on so many ranks, none of which has a value of more than about `most` bytes."""
    largest = {e: min(most, n) if cpu else most for e, n in LARGEST.items()}
    communication = (p for n in groups(ranks) for p in communicating(ranks, n, most))
    return [*products(largest), *elementwise(most), *communication]


def against(probes: Sequence[Probe]) -> dict[int, int]:
    """The places of those that stand against others, with theirs."""
    places = {p.name: i for i, p in enumerate(probes)}
    return {i: places[p.against] for i, p in enumerate(probes) if p.against}


def groups(ranks: int) -> list[int]:
    """The sizes of groups of neighbours that all ranks divide into."""
    return [n for n in range(2, ranks + 1) if ranks % n == 0]


def sizes(most: int) -> list[int]:
    """4 KB, 16 KB, ... up to `most` bytes, at least one."""
    found = [LEAST]
    while found[-1] * 4 <= most:
        found.append(found[-1] * 4)
    return found


def products(largest: Mapping[str, int]) -> Iterator[Probe]:
    """For each element type squares; of f32 also a batch's rows, as in a layer, and many squares,
    as in an attention. Each with the product of its gradient."""
    for element, most in largest.items():
        for size in sizes(most):
            n = isqrt(size // BYTES["f32"])
            yield _product(element, n, n)
            if element == "f32":
                yield _product(element, LONGER * n, n)
                if HEADS * size <= most:
                    yield _product(element, n, n, (HEADS,))


def _product(element: str, rows: int, n: int, heads: tuple[int, ...] = ()) -> Probe:
    b = "b" * len(heads)
    t, square = (_type((*heads, k, n), element) for k in (rows, n))
    name = "_".join(map(str, ("product", element, *heads, rows, n)))
    f = _Function(name, [("x", t), ("w", square)])
    f.op(f"nn.matmul %x, %w : ({t}, {square}) -> {t}", t)
    f.op(f'nn.einsum "{b}ik,{b}ij->{b}kj" %x, {f.last} : ({t}, {t}) -> {square}', square)
    return f.probe(element, n * n * BYTES["f32"])


def elementwise(most: int) -> Iterator[Probe]:
    """Ops that go through memory, and a row of ops that have next to nothing to do."""
    for kind in ELEMENTWISE:
        for size in sizes(LONGER * most):
            t = _type((size // (ROW * 4), ROW))
            f = _Function(f"{kind}_{size}", [("x", t)])
            for _ in range(CALLS):
                f.elementwise(kind, t)
            yield f.probe("memory", size)
    t = _type((8, 8))
    for count in (1, 32):
        f = _Function(f"small_{count}", [("x", t)])
        for _ in range(count):
            f.elementwise("add", t)
        yield f.probe("overhead", 0)


def communicating(ranks: int, n: int, most: int) -> Iterator[Probe]:
    """Each collective in all groups of n neighbours at once. The largest shape of a value is its
    size: before an all-reduce, after an all-gather."""
    axes = "r" if n == ranks else f"r:({ranks // n}){n}"
    near, wide = _type((BETWEEN, BETWEEN)), _type((WIDE, WIDE))
    for size in sizes(most):
        rows, row = (-(-k // n) * n for k in (size // (ROW * 4), ROW))  # whole shards
        whole, sums = _type((rows, row)), _type((rows, row), partial=axes)
        mine = _type((1, rows, row), dims=(axes, "", ""))
        by_rows = _type((rows // n, row), dims=(axes, ""))
        by_columns = _type((rows, row // n), dims=("", axes))
        types = {"replicated": whole, "partial": sums, "rows": by_rows, "columns": by_columns}
        pairs = ", ".join(f"{i}, {(i + 1) % n}" for i in range(n))
        for kind, text, before, after in COLLECTIVES:
            source, target = types[before], types[after]
            along = text.rpartition(" dim ")[2] if " dim " in text else ""
            given = mine if source is sums else source
            f = _Function(f"{kind}{along}_{n}_{size}", [("x", given), ("w", near)])
            product = "%w"
            for _ in range(CALLS):
                f.op(f"nn.matmul {product}, %w : ({near}, {near}) -> {near}", near)
                product, value = f.last, "%x"
                if source is sums:
                    f.op(f"nn.reduce <sum> %x dims <0> : ({mine}) -> {sums}", sums)
                    value = f.last
                call = text.format(value).replace("PAIRS", pairs)
                f.op(
                    f"dist.{kind} {call} over <{axes}> : ({source}) -> {target}",
                    target,
                )
            yield f.probe(kind, size)
        for products in BESIDE:
            about = f"{products}_{n}_{size}"
            for name, started in ((f"apart_{about}", ""), (f"beside_{about}", " async")):
                f = _Function(name, [("x", by_rows), ("w", wide)])
                f.op(
                    f"dist.all_gather %x dim 0 over <{axes}>{started} : ({by_rows}) -> {whole}",
                    whole,
                )
                gathered, product = f.last, "%w"
                for _ in range(products):
                    f.op(f"nn.matmul {product}, %w : ({wide}, {wide}) -> {wide}", wide)
                    product = f.last
                if started:
                    f.op(f"dist.wait {gathered} : ({whole}) -> {whole}", whole)
                    gathered = f.last
                f.results = [(gathered, whole), (product, wide)]
                against = f"apart_{about}" if started else ""
                yield f.probe("interference" if started else "", size, against)


class _Function:
    """Lines of a function, one after the other; the last value is its result, unless `results` are
    said."""

    def __init__(self, name: str, arguments: list[tuple[str, str]]):
        self.name, self.arguments = name, arguments
        self.lines: list[str] = []
        self.last = f"%{arguments[0][0]}"
        self.results = [(self.last, arguments[0][1])]

    def op(self, text: str, type: str) -> None:
        self.last = f"%v{len(self.lines)}"
        self.results = [(self.last, type)]
        self.lines.append(f"  {self.last} = {text}")

    def elementwise(self, kind: str, t: str) -> None:
        operands = [self.last, "%x"] if kind == "add" else [self.last]
        types = ", ".join(t for _ in operands)
        self.op(f"nn.{kind} {', '.join(operands)} : ({types}) -> {t}", t)

    def probe(self, about: str, size: int, against: str = "") -> Probe:
        init = "{train.input = #train.init<normal, std = 0.01>}"
        given = ", ".join(f"%{n}: {t} {init}" for n, t in self.arguments)
        values, types = (", ".join(each) for each in zip(*self.results, strict=True))
        text = (
            f"func.func @{self.name}({given}) -> ({types}) {{\n"
            + "\n".join(self.lines)
            + f"\n  func.return {values} : {types}\n}}"
        )
        return Probe(self.name, about, size, text, against)


def _type(
    shape: tuple[int, ...], element: str = "f32", dims: tuple[str, ...] = (), partial: str = ""
) -> str:
    """A type of the local view."""
    split = ", ".join(f"{{{axes}}}" for axes in dims or ("",) * len(shape))
    sums = f", partial sum {{{partial}}}" if partial else ""
    return f"tensor<{'x'.join(map(str, shape))}x{element}, #dist.local<@m, [{split}]{sums}>>"
