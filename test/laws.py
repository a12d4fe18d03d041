"""The laws of ops, and what covers them: for each op and each law, in words, a cell.

A cell says what is tried; an empty one is a law that nobody checks of that op, and fails in
`test/unit/test_ops.py`. `tried(case, element)` are the layouts with which the laws of layouts are
checked, from which their cells are counted. `python test/laws.py` prints the list.
"""

import random
from collections.abc import Callable, Sequence
from functools import cache
from itertools import islice, product
from math import prod

from harness import FLOATS, MESH, apply, elements_of, function, layouts, program
from op_cases import CASES, Case
from reference import TORCH
from xdsl.dialects.builtin import TensorType

from shardir.algebra.layout import Layout, Shape
from shardir.algebra.mesh import Axis, Mesh
from shardir.algebra.notation import mesh_of
from shardir.backend.torch.ops import TORCH as TEXTS
from shardir.dialects import nn, train
from shardir.dialects.nn.base import Composite, TensorOp, has_parts, splits_whole
from shardir.syntax.diagnostics import Failure

OPS: list[type[TensorOp]] = [
    op for d in (nn.Nn, train.Train) for op in d.operations if issubclass(op, TensorOp)
]
WIDE_MESH = mesh_of("m", "a = 2, b = 3")
PAIRS, SAMPLE, WIDE, FEW = 121, 60, 24, 3
"""Of the first element type: all layouts of the operands over 2x2, up to the exchange of its axes,
where there are no more than of two matrices (PAIRS), else a SAMPLE; over 2x3 up to WIDE. Of the
other types FEW of both."""

Tried = tuple[Mesh, tuple[Layout, ...]]
"""A mesh, and layouts of the operands and perhaps of the results."""


# ---- which layouts ----


@cache
def signature(case: str, element: str) -> tuple[tuple[Shape, ...], tuple[Shape, ...]]:
    """The shapes of the operands and of the results of the case of this name."""
    t = function(program_of(case, element), "f").function_type
    ins, outs = (
        tuple(x.get_shape() for x in types if isinstance(x, TensorType))
        for types in (t.inputs.data, t.outputs.data)
    )
    return ins, outs


BY_NAME = {str(case): case for case in CASES}


def program_of(name: str, element: str):
    case = BY_NAME[name]
    return program(case.args(element), case.body(element), case.wrt(element) or None)


def sample(
    shapes: Sequence[Shape], mesh: Mesh, most: int, draw: random.Random
) -> list[tuple[Layout, ...]]:
    """Layouts of values of these shapes: as many as `most`, and among the first of them each
    layout of each value."""
    lists = [draw.sample(found, len(found)) for s in shapes for found in [layouts(len(s), mesh)]]
    if prod(map(len, lists)) <= most:
        return list(product(*lists))
    longest = max(map(len, lists))
    rows = [tuple(l[i % len(l)] for l in lists) for i in range(longest)]
    while len(rows) < most:
        rows.append(tuple(map(draw.choice, lists)))
    return list(islice(dict.fromkeys(rows), most))


def exchanged(l: Layout) -> Layout:
    """The layout with a and b of the 2x2 mesh exchanged."""
    other = {"a": Axis("b"), "b": Axis("a")}
    return Layout(l.mesh, tuple(tuple(other[a.name] for a in d) for d in l.dims))


def of_pairs(shapes: Sequence[Shape], draw: random.Random) -> list[tuple[Layout, ...]]:
    """Layouts over the 2x2 mesh. Its axes are alike, so one of two that differ by their names."""
    if prod(len(layouts(len(s))) for s in shapes) > PAIRS:
        return sample(shapes, MESH, SAMPLE, draw)
    seen: set[tuple[Layout, ...]] = set()
    out = []
    for some in product(*(layouts(len(s)) for s in shapes)):
        if some not in seen:
            seen |= {some, tuple(map(exchanged, some))}
            out.append(some)
    return out


def tried(case: Case, element: str) -> list[Tried]:
    """The layouts that this case is tried with: of the operands, and for a third of them of the
    results too."""
    ins, outs = signature(str(case), element)
    draw = random.Random(f"{case} {element}")
    alone = not any(ins)  # operands that cannot be split: the results' layouts say all
    shapes = outs if alone else ins
    if element == case.elements[0]:
        found = [(MESH, some) for some in of_pairs(shapes, draw)]
        found += [(WIDE_MESH, some) for some in sample(shapes, WIDE_MESH, WIDE, draw)]
    else:
        found = [(m, some) for m in (MESH, WIDE_MESH) for some in sample(shapes, m, FEW, draw)]
    if alone:
        return [(m, (*(layouts(0, m)[0] for _ in ins), *some)) for m, some in found]
    return [
        (mesh, (*some, *(draw.choice(layouts(len(s), mesh)) for s in outs)) if i % 3 == 2 else some)
        for i, (mesh, some) in enumerate(found)
    ]


# ---- what covers what ----


def cases_of(op: type[TensorOp]) -> list[Case]:
    return [c for c in CASES if c.op is op]


def counted(n: int, what: str) -> str:
    return f"{n} {what}{'s' * (n != 1)}" if n else ""


def elements(op: type[TensorOp]) -> str:
    found = dict.fromkeys(e for c in cases_of(op) for e in c.elements)
    return " ".join(found) if op in TORCH else ""


def gradient(op: type[TensorOp]) -> str:
    """How many cases' gradients are torch's; or why there is none."""
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
    """How many of the layouts cut a dimension of n rows over k devices so that `test` holds."""

    def cell(op: type[TensorOp]) -> str:
        total, scalars = 0, True
        for case, element, (mesh, some) in runs(op):
            ins, outs = signature(str(case), element)
            shapes = (*ins, *outs)
            scalars = scalars and not any(shapes)
            total += any(
                test(s[d], mesh.extent(axes))
                for s, l in zip(shapes, some, strict=False)
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
    if not any(c.operands for c in cases_of(op)):
        return "none: no operand" if cases_of(op) else ""
    return counted(sum(bool(c.operands) for c in cases_of(op)), "case")


def in_parts(op: type[TensorOp]) -> str:
    """How many layouts split what the op wants whole."""
    if issubclass(op, Composite):
        return "is its parts"
    if not has_parts(op):
        return "none: has no parts"
    total = 0
    for case, element, (_, some) in runs(op):
        first = function(program_of(str(case), element), "f").body.block.first_op
        assert isinstance(first, TensorOp)
        n = len(first.operands)
        total += splits_whole(first.factors(), some[:n])
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
    "split where it wants to be whole": in_parts,
    "emitted text is the interpreter": emitted,
}


def cells() -> dict[tuple[type[TensorOp], str], str]:
    """What covers each law of each op."""
    return {(op, law): cover(op) for op in OPS for law, cover in LAWS.items()}


if __name__ == "__main__":
    found = cells()
    for op in OPS:
        print(op.name, *(f"{law}: {found[op, law] or '-'}" for law in LAWS), sep="; ")
