"""The laws of ops, and what covers them: for each op and each law, in words, a cell.

A cell says what is tried; an empty one is a law that nobody checks of that op, and fails in
`test/dialects/test_ops.py`. The layouts of a cell are counted from those of `op_layouts.py`.
`python test/op_laws.py` prints the list.
"""

from collections.abc import Callable
from functools import cache

from op_cases import REFERENCES, Case

from shardir.algebra.mesh import Mesh
from shardir.backend.torch.ops import TORCH as TEXTS
from shardir.diagnostics import Failure
from shardir.dialects import nn, train
from shardir.dialects.nn.base import Composite, TensorOp, decomposes, is_in_parts
from support.harness import FLOATS, MESH, apply, elements_of, function, program
from support.op_layouts import (
    WIDE_MESH,
    Tried,
    cases_of,
    factors,
    partials,
    signature,
    tried,
)

OPS: list[type[TensorOp]] = [
    op for d in (nn.Nn, train.Train) for op in d.operations
    if issubclass(op, TensorOp) and op not in (*train.LOOP, train.TransferOp, train.EitherOp)
]  # fmt: skip
"""The ops on tensors that can be alone in a function."""


def counted(n: int, what: str) -> str:
    return f"{n} {what}{'s' * (n != 1)}" if n else ""


def elements(op: type[TensorOp]) -> str:
    found = dict.fromkeys(e for c in cases_of(op) for e in c.elements)
    return " ".join(found) if op in REFERENCES else ""


def gradient(op: type[TensorOp]) -> str:
    """The number of cases whose gradients are torch's; or why there is none."""
    cases = cases_of(op)
    n = sum(bool(c.wrt(e)) for c in cases for e in c.elements)
    if n or not cases:
        return counted(n, "gradient")
    floats = [
        (c, e, i)
        for c in cases
        for e in c.elements
        for i, a in enumerate(c.args(e))
        if a.element in FLOATS
    ]
    if not floats:
        return "none: no float operand"
    case, element, first = floats[0]
    module = program(case.args(element), case.body(element), [first])
    results = function(module, "f").function_type.outputs.data
    if not any(e in FLOATS for e in elements_of(results)):
        return "none: no float result"
    try:
        apply(module, "distributed-autodiff")
    except Failure:
        return "none: an error says so"
    return ""


@cache
def runs(op: type[TensorOp]) -> list[tuple[Case, str, Tried]]:
    return [(c, e, t) for c in cases_of(op) for e in c.elements for t in tried(c, e)]


def over(mesh: Mesh) -> Callable[[type[TensorOp]], str]:
    return lambda op: counted(sum(m is mesh for _, _, (m, _) in runs(op)), "layout")


def shards(test: Callable[[int, int], bool]) -> Callable[[type[TensorOp]], str]:
    """The number of layouts that cut a dimension of n rows over k devices so that `test` holds."""

    def cell(op: type[TensorOp]) -> str:
        total, scalars = 0, True
        for case, element, (mesh, some) in runs(op):
            ins, outs = signature(str(case), element)
            shapes = (*ins, *outs)
            scalars = scalars and not any(shapes)
            total += any(
                test(s[d], mesh.extent(axes))
                for s, l in zip(shapes, some, strict=False)
                if l is not None
                for d, axes in enumerate(l.dims)
            )
        return counted(total, "layout") or ("none: scalars" if scalars else "")

    return cell


def uneven(n: int, devices: int) -> bool:
    return n % devices != 0


def empty(n: int, devices: int) -> bool:
    """Ceil division leaves the last device nothing."""
    return -(-n // devices) * (devices - 1) >= n > 0


def partial(op: type[TensorOp]) -> str:
    cases = cases_of(op)
    if not any(c.operands for c in cases):
        return "none: no operand" if cases else ""
    return counted(sum(len(some) for _, some in partials(op)), "layout")


def in_parts(op: type[TensorOp]) -> str:
    """The number of layouts that split what the op needs unsharded."""
    if issubclass(op, Composite):
        return "is its parts"
    if not decomposes(op):
        return "none: has no parts"
    total = 0
    for case, element, (_, some) in runs(op):
        f = factors(str(case), element)
        total += is_in_parts(op, f, [l for l in some[: len(f.operands)] if l is not None])
    return counted(total, "layout")


def emitted(op: type[TensorOp]) -> str:
    """Its text against the interpreter, on every split of its factors (test_emit.py)."""
    return "is its parts" if issubclass(op, Composite) else "each split" if op in TEXTS else ""


LAWS: dict[str, Callable[[type[TensorOp]], str]] = {
    "one device is torch": elements,
    "gradient is torch's": gradient,
    "all ranks are one device, 2x2": over(MESH),
    "2x3": over(WIDE_MESH),
    "uneven shards": shards(uneven),
    "empty shards": shards(empty),
    "partial operands": partial,
    "split where it needs no split": in_parts,
    "emitted text is the interpreter": emitted,
}


def cells() -> dict[tuple[type[TensorOp], str], str]:
    """The coverage of each law of each op."""
    return {(op, law): cover(op) for op in OPS for law, cover in LAWS.items()}


def main() -> int:
    """Print what covers each law of each op."""
    found = cells()
    for op in OPS:
        print(op.name, *(f"{law}: {found[op, law] or '-'}" for law in LAWS), sep="; ")
    return 0
