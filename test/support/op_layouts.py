"""The layouts with which the laws of ops are checked: `tried(case, element)`, `partials(op)`.

By default each case is tried over the 2x3 mesh with each of its factors split and no value
redistributed. Over the 2x2 mesh *kin* share layouts, which together split each dimension of each
value over no axis, over one and over both: the elementwise ops on values of the same ranks, the
composite ops of the same factors on them, or the cases of another op on them, by their factors.
Each op is tried, and each element type of each op, or of the elementwise ones together. The long
form (extent.py) takes each case with each element type on its own.
"""

import random
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import cycle, islice, permutations, product
from math import prod

from op_cases import CASES, Case
from xdsl.dialects.builtin import TensorType

from shardir.algebra.factors import Factors, try_op_sharding
from shardir.algebra.layout import Layout, Shape
from shardir.algebra.mesh import Axes, Axis, Mesh
from shardir.algebra.notation import mesh_of
from shardir.dialects.nn.base import Composite, TensorOp, decomposes
from support.extent import LONG
from support.harness import MESH, function, layouts, ordered_subsets, program

WIDE_MESH = mesh_of("m", "a = 2, b = 3")
PAIRS, SAMPLE, WIDE = 121, 60, 24
"""The bounds of the long form (`each_case`). PAIRS: all layouts of two matrices, together."""

Run = tuple[str, str]
"""A case, by its name, and an element type."""
Tried = tuple[Mesh, tuple[Layout | None, ...]]
"""A mesh, and layouts of the operands and perhaps of the results (None: not annotated)."""


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


@cache
def factors(case: str, element: str) -> Factors:
    op = function(program_of(case, element), "f").body.block.first_op
    assert isinstance(op, TensorOp)
    return op.factors()


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
    """Layouts over the 2x2 mesh. Its axes are equal, so one of two that differ by their names."""
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
    """The layouts that this case is tried with: of the operands, and of some results too."""
    return each_case(case, element) if LONG else by_kin()[str(case), element]


def elements(case: Case) -> list[str]:
    """The element types in which this case is tried: the first, those with layouts, and all for
    one case of each op."""
    first, *others = case.elements
    every = case is cases_of(case.op)[0]
    return [first, *(e for e in others if every or tried(case, e))]


# ---- the default form: kin share the layouts ----


@cache
def by_kin() -> dict[Run, list[Tried]]:
    """The layouts of each run. The rows of kin are dealt to their cases and element types in turn.
    Each case gets its aligned ones, each op one on each mesh and one with empty shards, and each
    element type of an op, or of the elementwise ones, at least one."""
    dealt: dict[Run, list[Tried]] = {(str(c), e): [] for c in CASES for e in c.elements}
    for key, cases in kin().items():
        draw = random.Random(str(key))
        runs = turn(cases, draw)
        for some in rows(*signature(cases[0], BY_NAME[cases[0]].elements[0]), draw):
            dealt[next(runs)].append((MESH, some))
    for op in {c.op: None for c in CASES}:
        first, *_ = cases = cases_of(op)
        split = ((c, some) for c in cases for some in aligned(str(c), c.elements[0]))
        for i, (case, some) in enumerate(split):
            dealt[str(case), case.elements[i % len(case.elements)]].append((WIDE_MESH, some))
        tried_on = [mesh for c in cases for e in c.elements for mesh, _ in dealt[str(c), e]]
        for mesh in (MESH, WIDE_MESH):
            if not any(mesh is m for m in tried_on):
                some = anything(str(first), first.elements[0], mesh)
                dealt[str(first), first.elements[0]].append((mesh, some))
        crowded = ((c, some) for c in cases if (some := over_all(c, c.elements[0])))
        for case, some in islice(crowded, 1):
            dealt[str(case), case.elements[0]].append((WIDE_MESH, some))
    groups = groups_of_types()
    reached = {(groups[case], element) for (case, element), found in dealt.items() if found}
    for (case, element), found in dealt.items():
        if (groups[case], element) not in reached:
            reached.add((groups[case], element))
            found.append((MESH, anything(case, element, MESH)))
    return dealt


def turn(cases: Sequence[str], draw: random.Random) -> Iterator[Run]:
    """The runs of these cases without end: first each case with the first of its types."""
    others = [(c, e) for c in cases for e in BY_NAME[c].elements[1:]]
    return cycle([(c, BY_NAME[c].elements[0]) for c in cases] + draw.sample(others, len(others)))


def aligned(case: str, element: str) -> list[tuple[Layout, ...]]:
    """Layouts over 2x3 with which no operand moves. Together they split each factor that can be
    split, two at once where they can."""
    f = factors(case, element)
    names = left = [name for name, size in f.sizes if size > 1 and name not in f.replicate]
    found = []
    while left:
        for number, axes in product((2, 1), permutations(WIDE_MESH.names)):
            names = left[:number]
            splits: list[Axes] = [(axis,) for axis in axes]
            chosen = dict(zip(names, splits, strict=False))
            if (placed := try_op_sharding(f, chosen, WIDE_MESH)) is not None:
                found.append((*placed.operands, *(l.complete for l in placed.results)))
                break
        left = left[len(names) :]
    return found


def over_all(case: Case, element: str) -> tuple[Layout, ...]:
    """Layouts over 2x3 in which the first dimension is split that leaves some of the six devices
    nothing, and no other; none if there is no such dimension."""
    shapes = [s for v in signature(str(case), element) for s in v]
    n = WIDE_MESH.size
    dims = ((i, d, size) for i, s in enumerate(shapes) for d, size in enumerate(s))
    for i, d, size in dims:
        if -(-size // n) * (n - 1) >= size > 1:
            splits = [[WIDE_MESH.names if (i, d) == (j, e) else () for e in range(len(s))]
                      for j, s in enumerate(shapes)]  # fmt: skip
            return tuple(Layout("m", tuple(x)) for x in splits)
    return ()


def anything(case: str, element: str, mesh: Mesh) -> tuple[Layout, ...]:
    """Some layouts of the operands and results."""
    draw = random.Random(f"{case} {element} {mesh}")
    return tuple(draw.choice(layouts(len(s), mesh)) for v in signature(case, element) for s in v)


@cache
def kin() -> dict[tuple[str, str], list[str]]:
    """The cases, by their op (of elementwise ops that word, of composite ones their factors) and
    the ranks of their values."""
    found: dict[tuple[str, str], list[str]] = {}
    for case in CASES:
        op = function(program_of(str(case), case.elements[0]), "f").body.block.first_op
        assert isinstance(op, TensorOp)
        kind = "elementwise" if is_elementwise(op) else op.name
        if isinstance(op, Composite):  # layouts pass through its parts
            kind = f"{op.factors().operands} -> {op.factors().results}"
        ranks = [[len(s) for s in v] for v in signature(str(case), case.elements[0])]
        found.setdefault((kind, str(ranks)), []).append(str(case))
    return found


@cache
def groups_of_types() -> dict[str, str]:
    """Of each case the ops that share the layouts of an element type: the elementwise ones, or the
    case's own."""
    kinds = {case: kind for (kind, _), cases in kin().items() for case in cases}
    return {c: "elementwise" if kinds[c] == "elementwise" else BY_NAME[c].op.name for c in kinds}


def is_elementwise(op: TensorOp) -> bool:
    """Whether each element of the results needs those of the operands at its place alone, so that
    its layouts follow from the ranks."""
    f = op.factors()
    kinds = f.reduced | f.replicate | f.moved | f.sliding | f.sparse
    return not (kinds or decomposes(type(op))) and all(
        v[::-1] == tuple(dim if mine else () for mine, dim in zip(v[::-1], all[::-1], strict=False))
        for all in f.results
        for v in (*f.operands, *f.results)
    )


def rows(
    ins: Sequence[Shape], outs: Sequence[Shape], draw: random.Random
) -> list[tuple[Layout | None, ...]]:
    """Layouts of values over 2x2 that split each dimension of each value over each number of axes;
    results have none, too."""
    columns: list[list[Layout | None]] = [[*splits(len(s), draw)] for s in ins]
    columns += [[None, *splits(len(s), draw)] for s in outs]
    turns = [cycle(draw.sample(c, len(c))) for c in columns]
    return [tuple(map(next, turns)) for _ in range(max(map(len, columns)))]


def splits(rank: int, draw: random.Random) -> list[Layout]:
    """Layouts in which each dimension is split over each number of axes: the axes are equal."""
    missing = {(d, n) for d in range(rank) for n in range(len(MESH.names) + 1)}
    found = [] if missing else [*layouts(rank)]
    while missing:
        some = draw.sample(layouts(rank), len(layouts(rank)))
        found.append(max(some, key=lambda l: len(missing & splits_of(l))))
        missing -= splits_of(found[-1])
    return found


def splits_of(l: Layout) -> set[tuple[int, int]]:
    """Each dimension with the number of axes that split it."""
    return {(d, len(axes)) for d, axes in enumerate(l.dims)}


def cases_of(op: type[TensorOp]) -> list[Case]:
    return [c for c in CASES if c.op is op]


# ---- partial operands ----


def partial_rows(case: Case, draw: random.Random) -> list[tuple[Layout, ...]]:
    """Layouts of the operands: one of them partial, all over the same axes, and some of them."""
    args = case.args(case.elements[0])
    sums = ["max" if a.element == "i1" else "sum" for a in args]
    a, b = MESH.names
    n = len(args)
    wanted: list[list[tuple[Axes, str]]] = [
        [((a,) if j == i else (), sums[j]) for j in range(n)] for i in range(n if n > 1 else 0)
    ]
    over = draw.choice([(a,), (b, a)])
    wanted.append([(over, s) for s in sums])
    wanted.append([((b,), draw.choice(["max", "min"]))] * n)
    choices = [*ordered_subsets(MESH.names)]
    wanted.append([
        (draw.choice(choices), s if s == "max" else draw.choice(["sum", "max", "min"]))
        for s in sums
    ])  # fmt: skip
    return [
        tuple(with_partial(len(x.shape), *w, draw) for x, w in zip(args, row, strict=True))
        for row in wanted
    ]


def with_partial(rank: int, axes: Axes, reduction: str, draw: random.Random) -> Layout:
    """Some layout of a value of this rank that is partial over these axes."""
    free = [l for l in layouts(rank) if not any(x in l.used for x in axes)]
    return draw.choice(free).with_partial(axes, reduction)


def partials(op: type[TensorOp]) -> list[tuple[Case, list[tuple[Layout, ...]]]]:
    """The layouts with partial operands that each case of an op is tried with: the rows of cases
    with as many operands are dealt to them in turn (in the long form each has all, three times)."""
    found: list[tuple[Case, list[tuple[Layout, ...]]]] = []
    by_number: dict[int, list[Case]] = {}
    for case in cases_of(op):
        if case.operands:
            by_number.setdefault(len(case.operands), []).append(case)
    for number, cases in by_number.items():
        draw = random.Random(f"{op.name} {number}")
        each = [[r for _ in range(3 if LONG else 1) for r in partial_rows(c, draw)] for c in cases]
        if not LONG:
            turns = range(len(each[0]))
            each = [[r[t] for t in turns[k :: len(cases)]] for k, r in enumerate(each)]
        found += zip(cases, each, strict=True)
    return found


# ---- the long form: each case on its own ----


def each_case(case: Case, element: str) -> list[Tried]:
    """Of each element type all layouts of the operands over 2x2, up to the exchange of its axes,
    where there are no more than of two matrices, else a SAMPLE; over 2x3 up to WIDE. For a third of
    them layouts of the results too."""
    ins, outs = signature(str(case), element)
    draw = random.Random(f"{case} {element}")
    alone = not any(ins)  # operands that cannot be split: the results' layouts say all
    shapes = outs if alone else ins
    found = [(MESH, some) for some in of_pairs(shapes, draw)]
    found += [(WIDE_MESH, some) for some in sample(shapes, WIDE_MESH, WIDE, draw)]
    if alone:
        return [(m, (*(layouts(0, m)[0] for _ in ins), *some)) for m, some in found]
    return [
        (mesh, (*some, *(draw.choice(layouts(len(s), mesh)) for s in outs)) if i % 3 == 2 else some)
        for i, (mesh, some) in enumerate(found)
    ]
