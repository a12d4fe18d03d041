"""shardir in miniature: a compiler for distributed tensor programs, in one file.

    python docs/miniature.py

A training step is written for one device. The compiler gets a mesh of four ranks, and layouts of
some arguments. It finds the layout of every other value, the communication between them and the
gradients, and writes a program that each rank runs on its shards. Four threads run it at the end,
and numpy on one device agrees with them.

All of this exists in shardir under the same names, with the same rules, and larger: the last
section says what is left out here, and where it is. Nothing but numpy is imported.
"""

import heapq
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import count, product, takewhile
from math import prod

import numpy as np

# ## 1. A mesh, and layouts on it
# A mesh gives the ranks coordinates. On `<dp = 2, tp = 2>` rank 2 is at dp = 1, tp = 0: its number
# is the row-major index. Collectives run in *groups*: ranks that differ along some axes alone.

Axes = tuple[str, ...]
Shape = tuple[int, ...]
Arrays = list[np.ndarray]


@dataclass(frozen=True)
class Mesh:
    """Named axes with their sizes, major to minor."""

    axes: tuple[tuple[str, int], ...]

    def extent(self, axes: Axes) -> int:
        return prod(n for name, n in self.axes if name in axes)

    def index(self, rank: int, axes: Axes) -> int:
        """The position of a rank in its group: row-major over `axes`, in their order."""
        sizes = dict(self.axes)
        at = dict(zip(sizes, np.unravel_index(rank, [*sizes.values()]), strict=True))
        picked = [at[a] for a in axes], [sizes[a] for a in axes]
        return int(np.ravel_multi_index(*picked)) if axes else 0

    def group(self, rank: int, axes: Axes) -> tuple[int, ...]:
        """The ranks of the group along `axes`, by position."""
        others = tuple(a for a, _ in self.axes if a not in axes)
        ranks = range(prod(n for _, n in self.axes))
        group = [r for r in ranks if self.index(r, others) == self.index(rank, others)]
        return tuple(sorted(group, key=lambda r: self.index(r, axes)))


# A layout says who holds what. Each dimension has the axes that split it. Along an axis that does
# not occur, ranks hold replicas. Along a *partial* axis each rank holds a summand. So a product
# over a split dimension needs no communication; its result is partial until a user needs it whole.


@dataclass(frozen=True)
class Layout:
    """`[{dp}, {}], partial sum {tp}`: rows over dp, and a summand on each rank along tp."""

    dims: tuple[Axes, ...]
    partial: Axes = ()

    def __str__(self) -> str:
        dims = ", ".join("{" + ", ".join(d) + "}" for d in self.dims)
        return f"[{dims}]" + (f", partial sum {{{', '.join(self.partial)}}}" * bool(self.partial))

    @property
    def used(self) -> Axes:
        return tuple(a for d in self.dims for a in d) + self.partial

    def legal(self, mesh: Mesh, shape: Shape) -> bool:
        once = len(set(self.used)) == len(self.used)
        return once and all(n % mesh.extent(d) == 0 for n, d in zip(shape, self.dims, strict=True))

    def slices(self, mesh: Mesh, shape: Shape, rank: int) -> tuple[slice, ...]:
        """The part of the global array that a rank holds."""
        cuts = zip(shape, self.dims, strict=True)
        shards = [(n // mesh.extent(axes), mesh.index(rank, axes)) for n, axes in cuts]
        return tuple(slice(k * length, (k + 1) * length) for length, k in shards)


# ## 2. Ops, and their factors
# A *factor* is an index of the computation. A product of matrices has i, k and j: `ik,kj->ij`. To
# split the computation along a factor is to split every dimension that has it. A result that lacks
# the factor, as this one lacks k, is then partial over the factor's axes. This string is all that
# propagation and placement know about an op. A new op is a line in the table: its factors, its
# numpy, and a gradient for each operand (`d` is the cotangent of the result).


@dataclass(frozen=True)
class Op:
    """One op. A `linear` op passes partial operands on: a sum of sums is a sum."""

    factors: str
    code: str
    gradients: tuple[str, ...] = ()
    linear: bool = False

    @property
    def letters(self) -> list[str]:
        return self.factors.replace("->", ",").split(",")


OPS = {
    "matmul": Op("ik,kj->ij", "{0} @ {1}", ("matmul_nt d 1", "matmul_tn 0 d")),
    "matmul_nt": Op("ij,kj->ik", "{0} @ {1}.T"),
    "matmul_tn": Op("ik,ij->kj", "{0}.T @ {1}"),
    "relu": Op("ij->ij", "np.maximum({0}, 0)", ("relu_grad 0 d",)),
    "relu_grad": Op("ij,ij->ij", "np.where({0} > 0, {1}, 0)"),
    "add": Op("ij,ij->ij", "{0} + {1}", ("d", "d"), linear=True),
    "mul": Op("ij,ij->ij", "{0} * {1}", ("mul d 1", "mul 0 d")),
    "sum": Op("ij->", "{0}.sum()", ("spread d 0",), linear=True),
    "spread": Op(",ij->ij", "np.full_like({1}, {0})"),
    "one": Op("->", "1.0"),
    "sgd": Op("ij,ij->ij", "{0} - 0.01 * {1}"),
}


@dataclass(frozen=True, eq=False)
class Value:
    """An argument, or the result of an op. `layout` is an annotation, or None."""

    name: str
    shape: Shape
    op: str = ""
    operands: tuple["Value", ...] = ()
    layout: Layout | None = None
    parameter: bool = False


Layouts = dict[Value, Layout]


@dataclass
class Program:
    """Values in the order in which they are computed; the results that the program returns."""

    values: list[Value] = field(default_factory=list)
    results: list[Value] = field(default_factory=list)

    def apply(self, op: str, *operands: Value, name: str) -> Value:
        """Add an op. The shape of its result follows from its factors."""
        *words, result = OPS[op].letters
        sizes = {}
        for v, word in zip(operands, words, strict=True):
            sizes.update(zip(word, v.shape, strict=True))
        name = unique(name, [v.name for v in self.values])
        self.values.append(Value(name, tuple(sizes[f] for f in result), op, operands))
        return self.values[-1]


def unique(name: str, taken: list[str]) -> str:
    return next(n for i in count() if (n := f"{name}_{i}" if i else name) not in taken)


# ## 3. Gradients
# Walk the program backwards. The table has the cotangent of each operand; those of one value are
# added. Nothing here speaks of communication: the ops of the backward part have factors as all ops
# do, and the all-reduce of data parallel training will follow from these, in section 6.


def differentiate(program: Program, loss: Value) -> None:
    """Append the backward part and an SGD update of each parameter."""
    forward = list(program.values)
    trained = {v for v in forward if v.parameter}
    for v in forward:
        if trained & set(v.operands):
            trained.add(v)
    cotangents = {loss: program.apply("one", loss, name=f"d_{loss.name}")}
    for v in reversed(forward):
        for rule, operand in zip(OPS[v.op].gradients if v.op else (), v.operands, strict=False):
            if v not in cotangents or operand not in trained:
                continue
            op, *words = rule.split()
            name, new = f"d_{operand.name}", cotangents[v]
            if op != "d":
                read = [cotangents[v] if w == "d" else v.operands[int(w)] for w in words]
                new = program.apply(op, *read, name=name)
            if operand in cotangents:
                new = program.apply("add", cotangents[operand], new, name=name)
            cotangents[operand] = new
    updated = [program.apply("sgd", p, cotangents[p], name=p.name) for p in forward if p.parameter]
    program.results = [loss, *updated]


# ## 4. Propagation
# Annotations spread along factors, forwards and backwards, until nothing changes. A dimension
# proposes its axes for its factor, and dimensions with that factor take them if they have none.
# Activations propose before parameters: a split weight does not displace the batch from its axis.


def propagate(program: Program, mesh: Mesh) -> Layouts:
    """Return a complete layout for every value of the forward part."""
    forward = list(takewhile(lambda v: v.op != "one", program.values))
    layouts = {v: v.layout or Layout(((),) * len(v.shape)) for v in forward}
    for parameters_too in (False, True):
        before = None
        while before != (before := dict(layouts)):
            for v in forward:
                _propagate_op(v, layouts, mesh, parameters_too)
    return layouts


def _propagate_op(v: Value, layouts: Layouts, mesh: Mesh, parameters: bool) -> None:
    ends = list(zip((*v.operands, v), OPS[v.op].letters, strict=True)) if v.op else []
    granted: dict[str, Axes] = {}
    for end, letters in ends:
        if parameters or not end.parameter:
            for f, axes in zip(letters, layouts[end].dims, strict=True):
                if axes and not any(a in other for other in granted.values() for a in axes):
                    granted.setdefault(f, axes)
    for end, letters in ends:
        for d, f in enumerate(letters):
            dims = layouts[end].dims
            refined = Layout((*dims[:d], granted.get(f, ()), *dims[d + 1 :]))
            if not (end.layout or dims[d]) and refined.legal(mesh, end.shape):
                layouts[end] = refined


# ## 5. Redistributions: price, and choice
# A redistribution brings a value from one layout to another. Layouts are nodes, collectives are
# edges, an edge is as long as its collective takes, and the plan is the shortest path. A collective
# takes a latency for each message and the time of its bytes (the alpha-beta model, of rings).

LATENCY, BANDWIDTH, ITEMSIZE = 5e-6, 10e9, 8  # seconds, bytes per second, bytes


@dataclass(frozen=True)
class Move:
    """A collective, or a local slice. `after` is the layout that it leads to."""

    kind: str
    axes: Axes
    after: Layout
    dims: tuple[int, ...] = ()

    def seconds(self, mesh: Mesh, shape: Shape, before: Layout) -> float:
        """The price of this move of a tensor of global `shape`."""
        n, total = mesh.extent(self.axes), prod(shape) * ITEMSIZE
        held = total / mesh.extent(tuple(a for d in before.dims for a in d))
        result = total / mesh.extent(tuple(a for d in self.after.dims for a in d))
        return {
            "all_gather": (n - 1) * (LATENCY + result / n / BANDWIDTH),
            "reduce_scatter": (n - 1) * (LATENCY + held / n / BANDWIDTH),
            "all_reduce": 2 * (n - 1) * (LATENCY + held / n / BANDWIDTH),
            "all_to_all": (n - 1).bit_length() * LATENCY + (n - 1) / n * held / BANDWIDTH,
            "all_slice": 0.0,
        }[self.kind]


def moves(now: Layout, mesh: Mesh) -> Iterator[Move]:
    """Yield every move from a layout. Axes join and leave a dimension at its minor end."""

    def changed(dims: dict[int, Axes], partial: Axes = now.partial) -> Layout:
        return Layout(tuple(dims.get(d, axes) for d, axes in enumerate(now.dims)), partial)

    for a, _ in mesh.axes:
        rest = tuple(p for p in now.partial if p != a)
        if a in now.partial:
            yield Move("all_reduce", (a,), changed({}, rest))
        for d, axes in enumerate(now.dims):
            split = changed({d: (*axes, a)}, rest)
            if a not in now.used:
                yield Move("all_slice", (a,), split, (d,))
            elif a in now.partial:
                yield Move("reduce_scatter", (a,), split, (d,))
            elif axes and axes[-1] == a:
                yield Move("all_gather", (a,), changed({d: axes[:-1]}), (d,))
                for e, others in enumerate(now.dims):
                    if e != d:
                        moved = changed({d: axes[:-1], e: (*others, a)})
                        yield Move("all_to_all", (a,), moved, (e, d))
    if len(now.partial) > 1:
        yield Move("all_reduce", now.partial, Layout(now.dims))


def plan(mesh: Mesh, shape: Shape, source: Layout, target: Layout) -> tuple[float, list[Move]]:
    """Return the seconds and the moves of the fastest redistribution (Dijkstra, 1959)."""
    order, done = count(), set()  # the order breaks ties
    heap: list[tuple[float, int, Layout, list[Move]]] = [(0.0, next(order), source, [])]
    while heap:
        seconds, _, layout, steps = heapq.heappop(heap)
        if layout == target:
            return seconds, steps
        if layout not in done:
            done.add(layout)
            for m in moves(layout, mesh):
                if m.after not in done and m.after.legal(mesh, shape):
                    more = seconds + m.seconds(mesh, shape, layout)
                    heapq.heappush(heap, (more, next(order), m.after, [*steps, m]))
    raise ValueError(f"expected layouts that {shape} can have, got {source} -> {target}")


# An op is *placed* by the same prices. The layouts of its operands, and the wanted layout of its
# result, propose axes for its factors. A factor on which all agree is split so. For the others
# every combination of proposals, or of none, is priced: what it takes to bring the operands to the
# layouts that the op then needs, and the result to the wanted one.


def place(
    v: Value, have: list[Layout], wanted: Layout | None, mesh: Mesh
) -> tuple[list[Layout], Layout]:
    """Return the layouts in which an op takes its operands, and that of its result."""
    op, shapes = OPS[v.op], [*(o.shape for o in v.operands), v.shape]
    *letters, result = op.letters
    keeps = have[0].partial if op.linear and len({l.partial for l in have}) == 1 else ()
    proposals: dict[str, set[Axes]] = {}
    for word, layout in zip(op.letters, [*have, wanted], strict=True):
        for f, axes in zip(word, layout.dims if layout else (), strict=False):
            proposals.setdefault(f, set()).add(axes)
    agreed = [sorted(p if len(p) == 1 else p | {()}) for p in proposals.values()]
    wider = [sorted(p | {()}) for p in proposals.values()]  # if an axis would be used twice
    for options in (agreed, wider):
        found: list[tuple[float, int, list[Layout], Layout]] = []
        for choice in product(*options):
            axes = dict(zip(proposals, choice, strict=True))
            lacking = [a for f, own in axes.items() if f not in result for a in own]
            needs = [Layout(tuple(axes[f] for f in word), keeps) for word in letters]
            makes = Layout(tuple(axes[f] for f in result), tuple(sorted({*lacking, *keeps})))
            split = [a for own in axes.values() for a in own] + list(keeps)
            legal = all(l.legal(mesh, s) for l, s in zip([*needs, makes], shapes, strict=True))
            if legal and len(set(split)) == len(split):
                edges = [*zip(shapes, have, needs, strict=False), (v.shape, makes, wanted or makes)]
                seconds = sum(plan(mesh, *edge)[0] for edge in edges)
                found.append((seconds, -mesh.extent(tuple(split)), needs, makes))
        if found:
            return min(found, key=lambda f: f[:2])[2:]
    raise AssertionError("every op can be computed unsharded")


# ## 6. The program of a rank
# Each op is placed, the redistributions of its operands are written, then the op. A value with a
# propagated layout is brought to it at once. A cotangent has none, so it stays as its op made it,
# often partial, until a user needs another layout. The output is Python that people can read.


def lower(program: Program, mesh: Mesh) -> tuple[str, Layouts]:
    """Return the text of one rank's program, and the layouts of its arguments and results."""
    arguments = [v for v in program.values if not v.op]
    layouts = propagate(program, mesh)
    now = {v: layouts[v] for v in arguments}
    names = {(v, layouts[v]): v.name for v in arguments}
    text = [f"def step(ranks, {', '.join(v.name for v in arguments)}):"]
    text += [f"    # {v.name}: {list(v.shape)}, {now[v]}" for v in arguments]

    def bring(v: Value, target: Layout, user: str) -> str:
        """Return the name of `v` in a layout; write a redistribution if there is none yet."""
        name, layout = names[v, now[v]], now[v]
        for m in () if (v, target) in names else plan(mesh, v.shape, layout, target)[1]:
            text.append(f"    # {v.name}: {layout} -> {m.after}, for {user}, "
                        f"{m.seconds(mesh, v.shape, layout) * 1e6:.1f} us")  # fmt: skip
            words = ", ".join(map(str, (name, *m.dims, m.axes)))
            name = unique(v.name, [*names.values(), *(o.name for o in program.values)])
            text.append(f"    {name} = ranks.{m.kind}({words})")
            names[v, m.after], layout = name, m.after
        return names[v, target]

    for v in program.values[len(arguments) :]:
        # The new value of a parameter has the layout of the old one.
        wanted = layouts[v.operands[0]] if v.op == "sgd" else layouts.get(v)
        needs, now[v] = place(v, [now[o] for o in v.operands], wanted, mesh)
        read = [bring(o, layout, v.op) for o, layout in zip(v.operands, needs, strict=True)]
        text.append(f"    {v.name} = {OPS[v.op].code.format(*read)}")
        names[v, now[v]] = v.name
        if wanted is not None:
            bring(v, wanted, "its users")
            now[v] = wanted
    layouts.update({v: Layout(now[v].dims) for v in program.results})
    returned = [bring(v, layouts[v], "the caller") for v in program.results]
    return "\n".join([*text, f"    return {', '.join(returned)}", ""]), layouts


# ## 7. Ranks
# Four threads are four ranks. One primitive is enough: each rank of a group sees the values of all
# the others. The collectives are then a line each. On a cluster they are calls of NCCL or Gloo.


@dataclass
class Ranks:
    """The collectives of one rank. All ranks share `slots` and `barriers`."""

    mesh: Mesh
    rank: int
    slots: dict[int, np.ndarray]
    barriers: dict[tuple[int, ...], threading.Barrier]

    def values(self, x: np.ndarray, axes: Axes) -> Arrays:
        """Return the values of a group, by position."""
        group = self.mesh.group(self.rank, axes)
        barrier = self.barriers.setdefault(group, threading.Barrier(len(group)))
        self.slots[self.rank] = x
        barrier.wait(timeout=10)
        values = [self.slots[r] for r in group]
        barrier.wait(timeout=10)
        return values

    def all_slice(self, x: np.ndarray, dim: int, axes: Axes) -> np.ndarray:
        return np.split(x, self.mesh.extent(axes), dim)[self.mesh.index(self.rank, axes)]

    def all_gather(self, x: np.ndarray, dim: int, axes: Axes) -> np.ndarray:
        return np.concatenate(self.values(x, axes), dim)

    def all_reduce(self, x: np.ndarray, axes: Axes) -> np.ndarray:
        return np.sum(self.values(x, axes), axis=0)

    def reduce_scatter(self, x: np.ndarray, dim: int, axes: Axes) -> np.ndarray:
        return self.all_slice(self.all_reduce(x, axes), dim, axes)

    def all_to_all(self, x: np.ndarray, split: int, concat: int, axes: Axes) -> np.ndarray:
        parts = [self.all_slice(v, split, axes) for v in self.values(x, axes)]
        return np.concatenate(parts, concat)


def run(text: str, program: Program, layouts: Layouts, mesh: Mesh, data: Arrays) -> Arrays:
    """Run the program on all ranks; return its results as global arrays."""
    scope: dict = {"np": np}
    exec(text, scope)
    slots, barriers = {}, {}
    arguments = [v for v in program.values if not v.op]

    def step(rank: int) -> Arrays:
        cuts = [layouts[v].slices(mesh, v.shape, rank) for v in arguments]
        shards = [x[cut] for x, cut in zip(data, cuts, strict=True)]
        return scope["step"](Ranks(mesh, rank, slots, barriers), *shards)

    ranks = range(prod(n for _, n in mesh.axes))
    with ThreadPoolExecutor(len(ranks)) as pool:
        results = [np.empty(v.shape) for v in program.results]
        for rank, shards in zip(ranks, pool.map(step, ranks), strict=True):
            for v, whole, shard in zip(program.results, results, shards, strict=True):
                whole[layouts[v].slices(mesh, v.shape, rank)] = shard
    return results


# ## 8. All of it
# Two products with a residual, as in a transformer. The rows of `x` are split over dp, the columns
# of `w` over tp. So propagation splits the rows of `v`: Megatron's pair, found and not requested.


def block(annotations: dict[str, Layout]) -> Program:
    """Return a training step of `sum((relu(x w) v + x)^2)`."""
    x = Value("x", (8, 4), layout=annotations.get("x"))
    w = Value("w", (4, 16), layout=annotations.get("w"), parameter=True)
    v = Value("v", (16, 4), layout=annotations.get("v"), parameter=True)
    p = Program([x, w, v])
    r = p.apply("relu", p.apply("matmul", x, w, name="h"), name="r")
    z = p.apply("add", p.apply("matmul", r, v, name="y"), x, name="z")
    differentiate(p, p.apply("sum", p.apply("mul", z, z, name="q"), name="loss"))
    return p


def on_one_device(x: np.ndarray, w: np.ndarray, v: np.ndarray) -> Arrays:
    """The same step, by hand, in numpy."""
    r = np.maximum(x @ w, 0)
    z = r @ v + x
    d_w, d_v = x.T @ (2 * z @ v.T * (r > 0)), r.T @ (2 * z)
    return [(z * z).sum(), w - 0.01 * d_w, v - 0.01 * d_v]


def main() -> None:
    """Print layouts, the prices of a redistribution, and the program of a rank; run it."""
    mesh = Mesh((("dp", 2), ("tp", 2)))
    program = block({"x": Layout((("dp",), ())), "w": Layout(((), ("tp",)))})
    print("Layouts by propagation\n")
    for v, layout in propagate(program, mesh).items():
        print(f"  {v.name:5} {list(v.shape)!s:8} {layout}")
    shape, source, target = (4096, 4096), Layout((("dp",), ()), ("tp",)), Layout((("tp",), ("dp",)))
    print(f"\nFrom {source} to {target}, {shape}, by the first move\n")
    for m in moves(source, mesh):
        rest, steps = plan(mesh, shape, m.after, target)
        ms = (m.seconds(mesh, shape, source) + rest) * 1e3
        print(f"  {ms:5.2f} ms  {', '.join(s.kind for s in (m, *steps))}")
    text, layouts = lower(program, mesh)
    print(f"\nThe program of each rank\n\n{text}")
    rng = np.random.default_rng(0)
    data = [rng.standard_normal(v.shape) for v in program.values if not v.op]
    pairs = zip(run(text, program, layouts, mesh, data), on_one_device(*data), strict=True)
    print(f"Largest difference from one device: {max(np.abs(a - b).max() for a, b in pairs):.0e}")


# ## 9. What is left out
# - Ops beyond the table, windows, loops, random numbers: shardir/dialects/nn
# - Uneven shards, sub-axes, maxima that are partial: shardir/algebra/layout.py, mesh.py
# - Conflicts between proposals, priced; sharding groups: shardir/algebra/propagation
# - Other exchanges, levels of links, a lower bound: shardir/algebra/redistribution.py
# - The search for all layouts at once, within memory: shardir/search, docs/understand/search.md
# - Recompute, offload, pipelines: shardir/search, docs/guides/stages.md
# - Collectives fused, and hidden behind computation: passes/fuse_communication.py
# - A text form, a verifier, errors with places and codes: shardir/syntax
# - Programs in torch, and modules of torch as their source: shardir/backend, shardir/frontends
# - Memory, and times that are fitted to measurements: shardir/cost, docs/understand/cost.md

if __name__ == "__main__":
    main()
