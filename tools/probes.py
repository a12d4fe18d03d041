"""The programs that shard-calibrate measures, as text: one module, a small function for each probe.

All ranks run them at once, as they run a program, so a probe measures a rank's share of cores,
caches and links. A collective is called between products, as in a program: without them it is
faster, since no rank has to be woken.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isqrt

from shardir.algebra.cluster import BYTES
from shardir.algebra.collectives import AxisState, between

ROW = 256
"""Elements of f32 in a row of a communicated value: 1 KB."""

SMALLEST = 1 << 12
"""The bytes of the smallest value."""

CALLS = 2
"""The number of calls of its collective in a function."""

BETWEEN = 96
"""The side of the products between collectives."""

BESIDE, WIDE = (1, 4), 256
"""The numbers of products computed while a collective is in flight, and their side."""

LARGEST = {"f64": 1 << 20, "f32": 1 << 20, "bf16": 1 << 18, "f16": 1 << 18}
"""Bytes of f32 of the largest square of each type on a CPU, where some types are very slow."""

LONGER = 4
"""The number of rows of a batch, relative to the side of a square."""

HEADS = 16
"""The number of squares that an attention multiplies at once."""

ELEMENTWISE = ("add", "relu", "neg")
"""Ops that take the time of their bytes."""

SLOW = {
    "exp": ("{0}", "x", "x"), "tanh": ("{0}", "x", "x"), "gelu": ("{0}", "x", "x"),
    "gelu_grad": ("{0}, %x", "xx", "x"), "softmax": ("{0} axis 1", "x", "x"),
    "softmax_grad": ("{0}, %x axis 1", "xx", "x"),
    "layer_norm": ("{0}, %w, %w eps 1.0e-5", "xww", "x"),
    "layer_norm_grad": ("%x, %w, {0} eps 1.0e-5", "xwx", "xww"),
}  # fmt: skip
"""Ops whose time the roofline does not have, of rows x and a weight w: operands and options, and
the types of operands and results. Each is a subject, of a ratio of the cluster."""

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
    `interference`, a collective, or the name of an op), and the approximate bytes of its values. Of
    a probe `against` another one the ratio of both times counts; that other one has no subject."""

    name: str
    about: str
    size: int
    text: str
    against: str = ""


def module(probes: Sequence[Probe], ranks: int) -> str:
    """Return the module of all probes, on one mesh."""
    return "\n".join([f"dist.mesh @m <r = {ranks}>", *(p.text for p in probes)])


def probes(ranks: int, most: int, cpu: bool = True) -> list[Probe]:
    """Return the probes on that many ranks, whose values have at most about `most` bytes."""
    largest = {e: min(most, n) if cpu else most for e, n in LARGEST.items()}
    communication = (p for n in groups(ranks) for p in communicating(ranks, n, most))
    return [*products(largest), *elementwise(most), *communication, *slower(most)]


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


def products(largest: Mapping[str, int]) -> Iterator[Probe]:
    """Yield squares of each element type; of f32 also a batch, as in a layer, and many squares, as
    in an attention. Each has the product of its gradient."""
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
    f = _ProbeFunction(name, [("x", t), ("w", square)])
    f.op(f"nn.matmul %x, %w : ({t}, {square}) -> {t}", t)
    f.op(f'nn.einsum "{b}ik,{b}ij->{b}kj" %x, {f.last} : ({t}, {t}) -> {square}', square)
    return f.probe(element, n * n * BYTES["f32"])


def elementwise(most: int) -> Iterator[Probe]:
    """Yield ops bound by memory, and a chain of ops of negligible work."""
    for kind in ELEMENTWISE:
        for size in sizes(LONGER * most):
            t = _type((size // (ROW * 4), ROW))
            f = _ProbeFunction(f"{kind}_{size}", [("x", t)])
            for _ in range(CALLS):
                f.elementwise(kind, t)
            yield f.probe("memory", size)
    t = _type((8, 8))
    for count in (1, 32):
        f = _ProbeFunction(f"small_{count}", [("x", t)])
        for _ in range(count):
            f.elementwise("add", t)
        yield f.probe("overhead", 0)


def slower(most: int) -> Iterator[Probe]:
    """Yield the ops whose time the roofline does not have."""
    for kind, (text, given, made) in SLOW.items():
        for size in sizes(most):
            types = {"x": _type((size // (ROW * 4), ROW)), "w": _type((ROW,))}
            f = _ProbeFunction(f"{kind}_{size}", list(types.items()))
            sides = [", ".join(types[name] for name in side) for side in (given, made)]
            for _ in range(CALLS):
                call = f"nn.{kind} {text.format(f.last)} : ({sides[0]}) -> ({sides[1]})"
                f.op(call, types["x"], len(made))
            yield f.probe(f"nn.{kind}", size)


def communicating(ranks: int, n: int, most: int) -> Iterator[Probe]:
    """Yield each collective in all groups of n neighbours at once. The size is that of the largest
    shape of a value: before an all-reduce, after an all-gather."""
    axes = "r" if n == ranks else f"r:({ranks // n}){n}"
    near, wide = _type((BETWEEN, BETWEEN)), _type((WIDE, WIDE))
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
            along = text.rpartition(" dim ")[2] if " dim " in text else ""
            given = mine if source is sums else source
            f = _ProbeFunction(f"{kind}{along}_{n}_{size}", [("x", given), ("w", near)])
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


class _ProbeFunction:
    """The lines of a function; the last value is its result, unless `results` are set."""

    def __init__(self, name: str, arguments: list[tuple[str, str]]):
        self.name, self.arguments = name, arguments
        self.lines: list[str] = []
        self.last = f"%{arguments[0][0]}"
        self.results = [(self.last, arguments[0][1])]

    def op(self, text: str, type: str, results: int = 1) -> None:
        """Add an op; of several results the first, which has the type, is the value."""
        self.last = f"%v{len(self.lines)}"
        self.results = [(self.last, type)]
        names = [self.last, *(f"{self.last}_{i}" for i in range(1, results))]
        self.lines.append(f"  {', '.join(names)} = {text}")

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
    """Return a type of the local view."""
    split = ", ".join(f"{{{axes}}}" for axes in dims or ("",) * len(shape))
    sums = f", partial sum {{{partial}}}" if partial else ""
    return f"tensor<{'x'.join(map(str, shape))}x{element}, #dist.local<@m, [{split}]{sums}>>"
