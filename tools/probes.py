"""The programs that shard-calibrate measures, as text: one module.

The probes of collectives are in collective_probes.py. The probes of computation are ops of one
function, OPS. Adjacent ops differ in kind and operands, and are about equal in size: a repeated op
finds its code and operands in caches, and is up to three times as fast as in a program. An earlier
op makes the first operand, as in a program.

All ranks run the probes at once, like a program, so a probe measures a rank's share of cores,
caches and links.
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from math import isqrt
from typing import NamedTuple

from shardir.algebra.cluster import BYTES
from shardir.tools.collective_probes import communicating, groups
from shardir.tools.probe_functions import ROW, Probe, ProbeFunction, sizes, type_text

OPS = "computed"
"""The function of the probes of computation."""

LARGEST = {"f64": 1 << 20, "f32": 1 << 20, "bf16": 1 << 18, "f16": 1 << 18}
"""The size of the largest square of each type on a CPU, in bytes of f32: some types are very
slow."""

LONGER = 4
"""The ratio of a batch's rows to the side of a square."""

HEADS = 16
"""The number of squares in a batched product, as in attention."""

ELEMENTWISE = {
    "add": ("{0}, {1}", "xx", "x"), "mul": ("{0}, {1}", "xx", "x"), "sub": ("{0}, {1}", "xx", "x"),
    "relu": ("{0}", "x", "x"), "neg": ("{0}", "x", "x"),
}  # fmt: skip
"""Ops that are as fast as memory: operands and options, and the types of operands and results. Type
x is a matrix of rows, w a weight, i row numbers, c one number per row, t the transposed matrix, f
the flat one, and d twice the rows."""

SLOW = {
    "exp": ("{0}", "x", "x"), "tanh": ("{0}", "x", "x"), "gelu": ("{0}", "x", "x"),
    "gelu_grad": ("{0}, {1}", "xx", "x"), "relu_grad": ("{0}, {1}", "xx", "x"),
    "softmax": ("{0} axis 1", "x", "x"), "softmax_grad": ("{0}, {1} axis 1", "xx", "x"),
    "layer_norm": ("{0}, {1}, {2} eps 1.0e-5", "xww", "x"),
    "layer_norm_grad": ("{0}, {1}, {2}, {3}, {4}", "xwxcc", "xww"),
    "gather": ("{0}, {1} axis 0", "xi", "x"), "concat": ("{0}, {1} axis 0", "xx", "d"),
}  # fmt: skip
"""Ops that the roofline does not predict. Each is a subject, for a ratio of the cluster."""

REDUCE, REDUCED = "nn.reduce", ((0, "w"), (1, "c"))
"""Sums along a dimension, with their result types, also a subject. Sums of all elements, as for a
loss, make the results of OPS."""

VIEWED = {"transpose": ("{0} perm <1, 0>", "x", "t"), "reshape": ("{0}", "x", "f")}
"""Views, which only take the time of a call."""

SMALL, SMALL_OPS = (8, 8), 12
"""The shape of values of negligible work, and the number of ops of each kind on them: they weigh as
much as the smallest values of all other kinds, some of which take several calls."""


def module(probes: Sequence[Probe], ranks: int) -> str:
    """Return the text of the module with all probes, on one mesh."""
    head = [f"dist.mesh @m <r = {ranks}>", *(p.text for p in probes if p.text)]
    return "\n".join(head)


def probes(ranks: int, most: int, cpu: bool = True) -> list[Probe]:
    """Return the probes for a number of ranks. Their values have at most about `most` bytes."""
    largest = {e: min(most, n) if cpu else most for e, n in LARGEST.items()}
    communication = (p for n in groups(ranks) for p in communicating(ranks, n, most))
    return [*communication, *computing(largest, most, cpu)]


def against(probes: Sequence[Probe]) -> dict[int, int]:
    """Map the index of each probe with a reference to the index of the reference."""
    indices = {p.name: i for i, p in enumerate(probes)}
    return {i: indices[p.against] for i, p in enumerate(probes) if p.against}


class _ComputedOp(NamedTuple):
    """An op of OPS: its subject, the bytes of its values, its text with a field for each operand,
    and the types of operands and results."""

    about: str
    size: int
    text: str
    operands: list[str]
    results: list[str]


def computing(largest: Mapping[str, int], most: int, cpu: bool = True) -> Iterator[Probe]:
    """Yield the probes of computation. The last one has the text of the function OPS."""
    ops = [*products(largest), *kinds("memory", ELEMENTWISE, LONGER * most)]
    ops += [op for kind, form in SLOW.items() for op in kinds(f"nn.{kind}", {kind: form}, most)]
    ops += [op for kind, form in VIEWED.items() for op in kinds(f"nn.{kind}", {kind: form}, most)]
    for size in sizes(most):
        types = _types(_rows(size))
        for dim, result in REDUCED:
            text = f"nn.reduce <sum> {{0}} dims <{dim}>"
            ops.append(_ComputedOp(REDUCE, size, text, [types["x"]], [types[result]]))
    for kind, form in ELEMENTWISE.items():
        ops += SMALL_OPS * [_computed_op("overhead", 0, kind, form, SMALL)]
    random.Random(0).shuffle(ops)
    # As in a program, adjacent ops have values of similar sizes. On a GPU the largest come first:
    # the host gets ahead of the device, so that kernels are measured, and not their launches.
    ops.sort(key=lambda op: op.size, reverse=not cpu)
    f, results = ProbeFunction(OPS, []), list[tuple[str, str]]()
    for i, op in enumerate(ops):
        names = [f"a{i}_{k}" for k in range(len(op.operands))]
        f.arguments += zip(names, op.operands, strict=True)
        f.filled |= set() if op.about in LARGEST else {*names}
        first = op.operands[0]
        f.op(f"nn.neg %{names[0]} : ({first}) -> {first}", first)
        operands = [f.last, *(f"%{n}" for n in names[1:])]
        sides = [", ".join(side) for side in (op.operands, op.results)]
        call = f"{op.text.format(*operands)} : ({sides[0]}) -> ({sides[1]})"
        f.op(call, op.results[0], len(op.results))
        yield Probe(f.last[1:], op.about, op.size, "")
        *shape, element = op.results[0].removeprefix("tensor<").split(",")[0].split("x")
        dims, scalar = ", ".join(map(str, range(len(shape)))), type_text((), element)
        f.op(f"nn.reduce <sum> {f.last} dims <{dims}> : ({op.results[0]}) -> {scalar}", scalar)
        results += f.results
    f.results = sorted(results, key=lambda result: "f32" not in result[1])  # a loss comes first
    yield f.probe("", 0)


def products(largest: Mapping[str, int]) -> Iterator[_ComputedOp]:
    """Yield products of squares of each element type; for f32 also of a batch, as in a layer, and
    of many squares, as in attention. Each is followed by the product of its gradient."""
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
    t, square = (type_text((*heads, k, n), element) for k in (rows, n))
    yield _ComputedOp(element, size, "nn.matmul {0}, {1}", [t, square], [t])
    gradient = f'nn.einsum "{b}ik,{b}ij->{b}kj" {{0}}, {{1}}'
    yield _ComputedOp(element, size, gradient, [t, t], [square])


def kinds(
    about: str, forms: Mapping[str, tuple[str, str, str]], most: int
) -> Iterator[_ComputedOp]:
    """Yield ops of each kind and size."""
    for kind, form in forms.items():
        for size in sizes(most):
            yield _computed_op(about, size, kind, form, _rows(size))


def _computed_op(
    about: str, size: int, kind: str, form: tuple[str, str, str], shape: tuple[int, int]
) -> _ComputedOp:
    types, (text, operands, results) = _types(shape), form
    sides = [[types[name] for name in side] for side in (operands, results)]
    return _ComputedOp(about, size, f"nn.{kind} {text}", *sides)


def _types(shape: tuple[int, int]) -> dict[str, str]:
    n, m = shape
    return {
        "x": type_text((n, m)), "w": type_text((m,)), "c": type_text((n,)),
        "i": type_text((n,), "i32"), "t": type_text((m, n)), "f": type_text((n * m,)),
        "d": type_text((2 * n, m)),
    }  # fmt: skip


def _rows(size: int) -> tuple[int, int]:
    return size // (ROW * 4), ROW
