"""Microbenchmarks of collectives: cold cache, back to back, fused, overlapped with a matmul, with a
late rank.

Back to back, collectives find their code and buffers in caches, and no rank sleeps: they take at
most half of their time in a program. So other probes call them between ops of several kinds, and
count the time that computation does not hide (`exposed`, as in traces).
"""

from collections.abc import Iterator
from typing import NamedTuple

from shardir.algebra.collectives import COLLECTIVES as RECORDS
from shardir.algebra.collectives import AxisState, between
from shardir.tools.probe_functions import ROW, SMALLEST, Probe, ProbeFunction, sizes, type_text

CALLS, CLOSE = 2, 4
"""The number of calls of a collective in a function: between other ops; one after the other."""

SEVERAL = 8
"""The number of values that one call moves together."""

SWEEPING = 384
"""The side of the squares, of 0.6 MB, for the ops between collectives. After ops of only one kind,
a gather of 4 KB on 4 ranks takes half of the processor time that it takes in programs."""

SQUARE = type_text((SWEEPING, SWEEPING))

MIXED = (
    "nn.neg {0} : ({1}) -> {1}",
    "nn.softmax {0} axis 1 : ({1}) -> {1}",
    "nn.mul {0}, %w : ({1}, {1}) -> {1}",
    "nn.gelu {0} : ({1}) -> {1}",
    "nn.transpose {0} perm <1, 0> : ({1}) -> {1}",
    "nn.add {0}, %w : ({1}, {1}) -> {1}",
)
"""The ops between collectives, with fields for the operand and its type."""

BESIDE, WIDE = (1, 4), 256
"""The numbers of products computed while a collective is in flight, and their side."""

IN_FLIGHT = 8
"""The number of gathers in flight at the same time."""

APART, LATE = (1, 4, 16), 3
"""The number of products before a collective, after which the ranks are out of step; and the number
of such collectives. All products have different weights, as in a program."""

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
"""The measured collectives: the kind, the text with a field for the operand, and the layouts of the
operand and the result."""


def groups(ranks: int) -> list[int]:
    """Return the sizes of groups of neighbours: the divisors of the number of ranks."""
    return [n for n in range(2, ranks + 1) if ranks % n == 0]


def communicating(ranks: int, n: int, most: int) -> Iterator[Probe]:
    """Yield probes of each collective in all groups of `n` neighbours at once. The size of a probe
    is its largest value: the operand of an all-reduce, the result of an all-gather."""
    axes = "r" if n == ranks else f"r:({ranks // n}){n}"
    wide = type_text((WIDE, WIDE))
    for size in sizes(most):
        rows, row = (-(-k // n) * n for k in (size // (ROW * 4), ROW))  # equal shards
        full, sums = type_text((rows, row)), type_text((rows, row), partial=axes)
        addend = type_text((1, rows, row), dims=(axes, "", ""))
        by_rows = type_text((rows // n, row), dims=(axes, ""))
        by_columns = type_text((rows, row // n), dims=("", axes))
        types = {"replicated": full, "partial": sums, "rows": by_rows, "columns": by_columns}
        pairs = ", ".join(f"{i}, {(i + 1) % n}" for i in range(n))
        for kind, text, before, after in COLLECTIVES:
            source, target = types[before], types[after]
            text = f"dist.{kind} {text.replace('PAIRS', pairs)} over <{axes}>"
            along = text.partition(" dim ")[2][:1]
            types_of_probe = addend if source is sums else source, source, target
            collective = _CollectiveCall(
                kind, f"{kind}{along}_{n}_{size}", size, text, types_of_probe
            )
            yield collective.probe("", CALLS, 1, 1)
            if size == SMALLEST:
                yield collective.probe("close_", 1, CLOSE, 1)
            if size in (SMALLEST, 16 * SMALLEST) and RECORDS[kind].fusible:
                yield collective.probe("several_", CALLS, 1, SEVERAL)
        for products in BESIDE:
            about = f"{products}_{n}_{size}"
            for name, started in ((f"apart_{about}", ""), (f"beside_{about}", " async")):
                f = ProbeFunction(name, [("x", by_rows), ("w", wide)])
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
            yield from (_late_gathers(n, k, axes, (by_rows, full), wide) for k in APART)
            yield _concurrent_gathers(n, axes, (by_rows, full))


class _CollectiveCall(NamedTuple):
    """A collective of a probe: its text with a field for the operands, and the types of an
    argument, an operand and a result."""

    kind: str
    name: str
    size: int
    text: str
    types: tuple[str, str, str]

    def probe(self, prefix: str, times: int, close: int, values: int) -> Probe:
        """Return a probe that runs, `times` times, other ops and then `close` calls with `values`
        values each."""
        argument, source, target = self.types
        arguments = [(f"x{i}", argument) for i in range(close * values)]
        f = ProbeFunction(prefix + self.name, [*arguments, ("w", SQUARE)])
        results, other = list[tuple[str, str]](), "%w"
        for _ in range(times):
            other = _add_ops_between(f, other)
            operands = [f"%{name}" for name, _ in arguments]
            if source != argument:
                operands = [
                    f.op(f"nn.reduce <sum> {x} dims <0> : ({argument}) -> {source}", source)
                    for x in operands
                ]
            for i in range(0, len(operands), values):
                types = (", ".join([type] * values) for type in (source, target))
                call = self.text.format(", ".join(operands[i : i + values]))
                f.op(f"{call} : ({') -> ('.join(types)})", target, values)
                results += f.results
        _add_loss(f, other)
        f.results += results  # unused ops would be erased
        return f.probe(self.kind, self.size, exposed=True)


def _add_ops_between(f: ProbeFunction, operand: str) -> str:
    """Add a chain of ops of several kinds on a square; return the last value."""
    for text in MIXED:
        operand = f.op(text.replace("{0}", operand).replace("{1}", SQUARE), SQUARE)
    return operand


def _add_loss(f: ProbeFunction, square: str) -> None:
    """Reduce a square to a number, which makes the function a step."""
    f.op(f"nn.reduce <sum> {square} dims <0, 1> : ({SQUARE}) -> {type_text(())}", type_text(()))


def _concurrent_gathers(n: int, axes: str, gathered: tuple[str, str]) -> Probe:
    """Return a probe of gathers in flight at the same time, like the gathers of a layer's
    parameters, after other ops. There is no computation meanwhile, so that the threads that move
    the data work only during these lines."""
    by_rows, full = gathered
    xs = [f"x{i}" for i in range(IN_FLIGHT)]
    f = ProbeFunction(f"flight_{n}", [*((x, by_rows) for x in xs), ("w", SQUARE)])
    other, results = _add_ops_between(f, "%w"), []
    started = [
        f.op(f"dist.all_gather %{x} dim 0 over <{axes}> async : ({by_rows}) -> {full}", full)
        for x in xs
    ]
    for value in started:
        f.op(f"dist.wait {value} : ({full}) -> {full}", full)
        results += f.results
    _add_loss(f, other)
    f.results += results
    return f.probe("occupancy", SMALLEST, exposed=True)


def _late_gathers(
    n: int, products: int, axes: str, gathered: tuple[str, str], square: str
) -> Probe:
    """Return a probe of gathers after products, which take longer than the wait for the last
    rank."""
    weights = [f"w{i}" for i in range(products * LATE)]
    by_rows, full = gathered
    f = ProbeFunction(f"late_{n}_{products}", [("x", by_rows), *((w, square) for w in weights)])
    product, results = "%w0", []
    for i, weight in enumerate(weights, 1):
        f.op(f"nn.matmul {product}, %{weight} : ({square}, {square}) -> {square}", square)
        product = f.last
        if i % products == 0:
            f.op(f"dist.all_gather %x dim 0 over <{axes}> : ({by_rows}) -> {full}", full)
            results += f.results
    f.results = [*results, (product, square)]
    return f.probe("skew", SMALLEST, exposed=True)
