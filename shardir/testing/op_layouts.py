"""The layouts with which the laws of ops are checked: `CaseLayouts(cases).tried(case, element)`.

By default each op is tried over the 2x3 mesh with each factor of its cases split and no value
redistributed. Over the 2x2 mesh *kin* share layouts, which together split each dimension of each
value over no axis and over one: the elementwise ops on values of the same ranks, the composite ops
of the same factors on them, or the cases of another op on them, by their factors. The kin with the
largest values, of those of the same op, split each dimension over both axes too.
Each op is tried, and each element type of each op, or of the elementwise ones together. The long
form takes each case with each element type on its own.
"""

import random
from collections.abc import Sequence
from functools import cache, cached_property
from itertools import cycle, islice, permutations, product
from math import prod

from xdsl.dialects.builtin import ModuleOp, TensorType

from shardir.algebra.factors import Factors, try_op_sharding
from shardir.algebra.layout import Layout, Shape
from shardir.algebra.mesh import Axes, Axis, Mesh, SizedAxes
from shardir.algebra.notation import mesh_of
from shardir.dialects.nn.base import Composite, TensorOp, decomposes, is_in_parts
from shardir.testing.cases import Case
from shardir.testing.programs import MESH, function, layouts, ordered_subsets

WIDE_MESH = mesh_of("m", "a = 2, b = 3")
PAIRS, SAMPLE, WIDE = 121, 60, 24
"""The bounds of the long form (`_each_case`). PAIRS: all layouts of two matrices, together."""
FEW = 4

CaseRun = tuple[str, str]
"""A case, by its name, and an element type."""
TriedLayouts = tuple[Mesh, tuple[Layout | None, ...]]
"""A mesh, and layouts of the operands and perhaps of the results (None: not annotated)."""


class CaseLayouts:
    """The layouts of some cases, which share them.

    Args:
        long: whether each case is tried on its own.
    """

    def __init__(self, cases: Sequence[Case], long: bool = False):
        self.cases, self.long = cases, long
        self.by_name = {str(case): case for case in cases}
        self.of_op: dict[type[TensorOp], list[Case]] = {}
        for case in cases:
            self.of_op.setdefault(case.op, []).append(case)
        self._elementwise: dict[type[TensorOp], bool] = {}
        self.program_of = cache(self._program_of)
        self.signature = cache(self._signature)

    def _program_of(self, name: str, element: str) -> ModuleOp:
        """Return the program of the case of this name. Callers clone it before they change it."""
        return self.by_name[name].program(element)

    def op_of(self, case: str, element: str) -> TensorOp:
        """Return the op of a case."""
        op = function(self.program_of(case, element), "f").body.block.first_op
        assert isinstance(op, TensorOp)
        return op

    def factors(self, case: str, element: str) -> Factors:
        """Return the factors of the op of a case."""
        return self.op_of(case, element).factors()

    def _signature(self, case: str, element: str) -> tuple[tuple[Shape, ...], tuple[Shape, ...]]:
        """Return the shapes of the operands and of the results of the case of this name."""
        t = function(self.program_of(case, element), "f").function_type
        ins, outs = (
            tuple(x.get_shape() for x in types if isinstance(x, TensorType))
            for types in (t.inputs.data, t.outputs.data)
        )
        return ins, outs

    def first_signature(self, case: str) -> tuple[tuple[Shape, ...], tuple[Shape, ...]]:
        """Return the signature of a case in its first element type."""
        return self.signature(case, self.by_name[case].elements[0])

    def tried(self, case: Case, element: str) -> list[TriedLayouts]:
        """Return the layouts of a case: of the operands, and of some results too."""
        return self._each_case(case, element) if self.long else self.by_kin[str(case), element]

    def elements(self, case: Case) -> list[str]:
        """Return the element types in which a case is tried: the first, those with layouts, and all
        for one case of each op."""
        first, *others = case.elements
        every = case is self.of_op[case.op][0]
        return [first, *(e for e in others if every or self.tried(case, e))]

    # ---- the default form: kin share the layouts ----

    @cached_property
    def by_kin(self) -> dict[CaseRun, list[TriedLayouts]]:
        """The layouts of each run. The rows of kin are dealt to their cases in turn, in the first
        element type of each, as a type that is tried has a program and a reference of its own; and
        each case that splits what its op needs unsharded gets one. Each op gets the aligned ones of
        its cases, in all types in turn, one on each mesh and one with empty shards, and each
        element type of an op, or of the elementwise ones, at least one."""
        dealt: dict[CaseRun, list[TriedLayouts]] = {
            (str(c), e): [] for c in self.cases for e in c.elements
        }
        for key, cases in self.kin.items():
            draw, first = random.Random(str(key)), [self.by_name[c].elements[0] for c in cases]
            some = rows(*self.first_signature(cases[0]), draw, self.most_axes(key))
            runs = [*zip(cases, first, strict=True)]
            for run, row in zip(cycle(runs), some, strict=False):
                dealt[run].append((MESH, row))
            for run in runs[len(some) :]:
                split = (row for row in some if self._splits_parts(*run, row))
                dealt[run] += [(MESH, row) for row in islice(split, 1)]
        for cases in self.of_op.values():
            first = cases[0]
            split = ((c, some) for c in self.with_aligned(cases)
                     for some in self.aligned(str(c), c.elements[0]))  # fmt: skip
            for i, (case, some) in enumerate(split):
                element = case.elements[i % len(case.elements)]
                dealt[str(case), element].append((WIDE_MESH, some))
            tried_on = [mesh for c in cases for e in c.elements for mesh, _ in dealt[str(c), e]]
            for mesh in (MESH, WIDE_MESH):
                if not any(mesh is m for m in tried_on):
                    some = self._anything(str(first), first.elements[0], mesh)
                    dealt[str(first), first.elements[0]].append((mesh, some))
            crowded = ((c, some) for c in cases if (some := self._over_all(c, c.elements[0])))
            for case, some in islice(crowded, 1):
                dealt[str(case), case.elements[0]].append((WIDE_MESH, some))
        reached = {
            (self.groups_of_types[c], element) for (c, element), some in dealt.items() if some
        }
        for (case, element), some in dealt.items():
            if (self.groups_of_types[case], element) not in reached:
                reached.add((self.groups_of_types[case], element))
                some.append((MESH, self._anything(case, element, MESH)))
        return dealt

    def with_aligned(self, cases: Sequence[Case]) -> list[Case]:
        """Return the cases of an op that are tried with aligned layouts: all, but of an elementwise
        op the one with most sizes that no axis divides, and those that are the first of their
        kin."""

        def uneven(case: Case) -> int:
            sizes = self.factors(str(case), case.elements[0]).sizes
            return sum(n > 1 and n % 2 > 0 and n % 3 > 0 for _, n in sizes)

        if not self.is_elementwise(cases[0].op):
            return [*cases]
        most = max(cases, key=uneven)
        return [case for case in cases if case is most or str(case) in self.first_of_kin]

    def is_elementwise(self, op: type[TensorOp]) -> bool:
        """Whether all cases of an op are elementwise, so that it shares what is tried with all
        other such ops."""
        if op not in self._elementwise:
            ops = (self.op_of(str(c), c.elements[0]) for c in self.of_op[op])
            self._elementwise[op] = all(map(is_elementwise, ops))
        return self._elementwise[op]

    @cached_property
    def with_odd(self) -> list[type[TensorOp]]:
        """The ops that are tried with odd layouts: all, but one in FEW of the elementwise ones."""
        alike = [op for op in self.of_op if self.is_elementwise(op)]
        few = alike if self.long else alike[::FEW]
        return [op for op in self.of_op if op not in alike or op in few]

    def aligned(self, case: str, element: str) -> list[tuple[Layout, ...]]:
        """Return layouts over 2x3 with which no operand moves. Together they split each factor that
        can be split, two at once where they can."""
        f = self.factors(case, element)
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

    def _over_all(self, case: Case, element: str) -> tuple[Layout, ...]:
        """Return layouts over 2x3 in which the first dimension is split that leaves some of the six
        devices nothing, and no other; none if there is no such dimension."""
        shapes = [s for v in self.signature(str(case), element) for s in v]
        n = WIDE_MESH.size
        dims = ((i, d, size) for i, s in enumerate(shapes) for d, size in enumerate(s))
        for i, d, size in dims:
            if -(-size // n) * (n - 1) >= size > 1:
                splits = [[WIDE_MESH.names if (i, d) == (j, e) else () for e in range(len(s))]
                          for j, s in enumerate(shapes)]  # fmt: skip
                return tuple(Layout("m", tuple(x)) for x in splits)
        return ()

    def _anything(self, case: str, element: str, mesh: Mesh) -> tuple[Layout, ...]:
        """Return some layouts of the operands and results."""
        draw = random.Random(f"{case} {element} {mesh}")
        shapes = (s for v in self.signature(case, element) for s in v)
        return tuple(draw.choice(layouts(len(s), mesh)) for s in shapes)

    @cached_property
    def kin(self) -> dict[tuple[str, str], list[str]]:
        """The cases, by their op (of elementwise ops that word, of composite ones their factors)
        and the ranks of their values."""
        found: dict[tuple[str, str], list[str]] = {}
        for case in self.cases:
            op = self.op_of(str(case), case.elements[0])
            kind = "elementwise" if is_elementwise(op) else op.name
            if isinstance(op, Composite):  # layouts pass through its parts
                kind = f"{op.factors().operands} -> {op.factors().results}"
            ranks = [[len(s) for s in v] for v in self.first_signature(str(case))]
            found.setdefault((kind, str(ranks)), []).append(str(case))
        return found

    def _splits_parts(self, case: str, element: str, row: Sequence[Layout | None]) -> bool:
        """Whether layouts split what the op of a case needs unsharded, so that it is in parts."""
        f, op = self.factors(case, element), self.by_name[case].op
        operands = [l for l in row[: len(f.operands)] if l is not None]
        return decomposes(op) and bool(is_in_parts(op, f, operands))

    @cached_property
    def first_of_kin(self) -> set[str]:
        """The first case of each kin."""
        return {cases[0] for cases in self.kin.values()}

    def most_axes(self, key: tuple[str, str]) -> int:
        """Return the number of axes over which kin split a dimension: both of them where no other
        kin of the op have values of higher ranks, else one."""
        return len(MESH.names) if key in self._largest else 1

    @cached_property
    def _largest(self) -> set[tuple[str, str]]:
        """Of the kin of each op those with the values of the highest ranks."""

        def ranks(key: tuple[str, str]) -> list[int]:
            ranks = [len(s) for v in self.first_signature(self.kin[key][0]) for s in v]
            return [max(ranks, default=0), sum(ranks)]

        found: dict[str, tuple[str, str]] = {}
        for key in self.kin:
            found[key[0]] = max(found.get(key[0], key), key, key=ranks)
        return {*found.values()}

    @cached_property
    def groups_of_types(self) -> dict[str, str]:
        """Of each case the ops that share the layouts of an element type: the elementwise ones, or
        the case's own."""
        kinds = {case: kind for (kind, _), cases in self.kin.items() for case in cases}
        shared = "elementwise"
        return {c: shared if kinds[c] == shared else self.by_name[c].op.name for c in kinds}

    # ---- partial operands ----

    def partials(self, op: type[TensorOp]) -> list[tuple[Case, list[tuple[Layout, ...]]]]:
        """Return the layouts with partial operands that each case of an op is tried with: the rows
        of cases with as many operands are dealt to them in turn (in the long form each has all,
        three times). Ops that need complete operands share theirs: each has one."""
        found: list[tuple[Case, list[tuple[Layout, ...]]]] = []
        by_number: dict[int, list[Case]] = {}
        for case in self.of_op[op]:
            if case.operands:
                by_number.setdefault(len(case.operands), []).append(case)
        alike = self._needing_complete
        for number, cases in by_number.items():
            draw = random.Random(f"{op.name} {number}")
            times = range(3 if self.long else 1)
            each = [[r for _ in times for r in partial_rows(c, draw)] for c in cases]
            if not self.long:
                turns = range(len(each[0]))
                if op in alike and len(alike) > 1:
                    turns = [alike.index(op) % len(turns)]
                each = [[r[t] for t in turns[k :: len(cases)]] for k, r in enumerate(each)]
            found += zip(cases, each, strict=True)
        return [(case, given) for case, given in found if given]

    @cached_property
    def _needing_complete(self) -> list[type[TensorOp]]:
        """The ops through which no partial operand passes."""
        return [
            op for op, cases in self.of_op.items()
            if not any(self.factors(str(c), c.elements[0]).linear or op.MULTILINEAR for c in cases)
        ]  # fmt: skip

    # ---- the long form: each case on its own ----

    def _each_case(self, case: Case, element: str) -> list[TriedLayouts]:
        """Return of each element type all layouts of the operands over 2x2, up to the exchange of
        its axes, where there are no more than of two matrices, else a SAMPLE; over 2x3 up to WIDE.
        For a third of them layouts of the results too."""
        ins, outs = self.signature(str(case), element)
        draw = random.Random(f"{case} {element}")
        alone = not any(ins)  # operands that cannot be split: the results' layouts say all
        shapes = outs if alone else ins
        found = [(MESH, some) for some in of_pairs(shapes, draw)]
        found += [(WIDE_MESH, some) for some in sample(shapes, WIDE_MESH, WIDE, draw)]
        if alone:
            return [(m, (*(layouts(0, m)[0] for _ in ins), *some)) for m, some in found]
        return [
            (mesh, (*some, *(draw.choice(layouts(len(s), mesh)) for s in outs)) if i % 3 == 2
             else some)
            for i, (mesh, some) in enumerate(found)
        ]  # fmt: skip


# ---- which layouts ----


def sample(
    shapes: Sequence[Shape], mesh: Mesh, most: int, draw: random.Random
) -> list[tuple[Layout, ...]]:
    """Return layouts of values of these shapes: as many as `most`, and among the first of them each
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
    """Return the layout with a and b of the 2x2 mesh exchanged."""
    other = {"a": Axis("b"), "b": Axis("a")}
    return Layout(l.mesh, tuple(tuple(other[a.name] for a in d) for d in l.dims))


def of_pairs(shapes: Sequence[Shape], draw: random.Random) -> list[tuple[Layout, ...]]:
    """Return layouts over the 2x2 mesh. Its axes are equal, so one of two that differ by their
    names."""
    if prod(len(layouts(len(s))) for s in shapes) > PAIRS:
        return sample(shapes, MESH, SAMPLE, draw)
    seen: set[tuple[Layout, ...]] = set()
    out = []
    for some in product(*(layouts(len(s)) for s in shapes)):
        if some not in seen:
            seen |= {some, tuple(map(exchanged, some))}
            out.append(some)
    return out


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
    ins: Sequence[Shape], outs: Sequence[Shape], draw: random.Random, most: int
) -> list[tuple[Layout | None, ...]]:
    """Return layouts of values over 2x2 that split each dimension of each value over each number of
    axes up to `most`; results have none, too."""
    columns: list[list[Layout | None]] = [[*splits(len(s), draw, most)] for s in ins]
    columns += [[None, *splits(len(s), draw, most)] for s in outs]
    turns = [cycle(draw.sample(c, len(c))) for c in columns]
    return [tuple(map(next, turns)) for _ in range(max(map(len, columns)))]


def splits(rank: int, draw: random.Random, most: int) -> list[Layout]:
    """Return layouts in which each dimension is split over each number of axes up to `most`: the
    axes are equal."""
    missing = {(d, n) for d in range(rank) for n in range(most + 1)}
    found = [] if missing else [*layouts(rank)]
    while missing:
        within = [l for l in layouts(rank) if all(len(axes) <= most for axes in l.dims)]
        some = draw.sample(within, len(within))
        found.append(max(some, key=lambda l: len(missing & splits_of(l))))
        missing -= splits_of(found[-1])
    return found


def splits_of(l: Layout) -> set[tuple[int, int]]:
    """Return each dimension with the number of axes that split it."""
    return {(d, len(axes)) for d, axes in enumerate(l.dims)}


# ---- partial operands ----


def partial_rows(case: Case, draw: random.Random) -> list[tuple[Layout, ...]]:
    """Return layouts of the operands: one of them partial, all over the same axes, and some of
    them."""
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
    """Return some layout of a value of this rank that is partial over these axes."""
    free = [l for l in layouts(rank) if not any(x in l.used for x in axes)]
    return draw.choice(free).with_partial(axes, reduction)


# ---- sub-axes and explicit sizes ----

ODD_MESH = mesh_of("m", "a = 4, b = 2")
PIECES = [(Axis("a", 1, 2), Axis("a", 2, 2), Axis("b")), (Axis("a"), Axis("b"))]


def odd_layout(draw: random.Random, shape: Shape) -> Layout:
    """Return a layout over eight ranks with sub-axes and axes in any order over the dimensions,
    half of them with sizes that are explicit."""
    pieces = [*draw.choice(PIECES)]
    draw.shuffle(pieces)
    places = [draw.randint(0, len(shape)) for _ in pieces]
    dims = [tuple(p for p, at in zip(pieces, places, strict=True) if at == d)
            for d in range(len(shape))]  # fmt: skip
    for d, axes in enumerate(dims):
        if axes and draw.random() < 0.5:
            cuts = sorted(draw.randint(0, shape[d]) for _ in range(ODD_MESH.extent(axes) - 1))
            ends = zip([0, *cuts], [*cuts, shape[d]], strict=True)
            dims[d] = SizedAxes(axes, tuple(b - a for a, b in ends))
    return Layout("m", tuple(dims))
