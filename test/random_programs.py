"""Random programs: five to twenty ops on a few arguments, with layouts and strategies at random.

Everything follows from the seed, so that a failure names the program that shows it.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass

from harness import (
    ELEMENTS,
    Arg,
    Problem,
    function,
    laid_out,
    problem,
    shape_of,
)
from xdsl.dialects.builtin import ModuleOp, TensorType
from xdsl.dialects.func import ReturnOp
from xdsl.ir import SSAValue

from shardir.algebra.factors import FactorAxes, placed
from shardir.algebra.layout import Layout, Shape
from shardir.algebra.mesh import Axes, Axis, Mesh
from shardir.algebra.notation import mesh_of
from shardir.algebra.strategy import Strategy
from shardir.dialects import dist, nn
from shardir.dialects.builder import Builder
from shardir.dialects.nn.base import TensorOp, float_attr, int_attr
from shardir.passes.functions import set_type

MESHES = [mesh_of("m", t) for t in ("a = 2, b = 2", "a = 4", "a = 2, b = 3", "a = 2, b = 4")]
SIZES = (2, 3, 4, 4, 6, 8)


@dataclass
class Plan:
    """What a program is built from: the same draws give the same arguments and the same ops."""

    seed: int
    args: list[Arg]
    kinds: list[str]


class Writer:
    """Writes one program; `new` adds an argument."""

    def __init__(self, seed: int):
        self.draw = random.Random(seed)
        self.args: list[Arg] = []
        self.kinds: list[str] = []
        self.steps: list[Callable[[Builder, list[SSAValue], list[SSAValue]], SSAValue]] = []
        self.shapes: list[Shape] = []

    def arg(self, element: str, shape: Shape, kind: str = "normal") -> int:
        self.args.append(Arg(element, shape))
        self.kinds.append(kind)
        return len(self.args) - 1

    def value(self, rank: int | None = None) -> int | None:
        """A value that there is, of this rank; rather a late one."""
        found = [i for i, s in enumerate(self.shapes) if rank is None or len(s) == rank]
        return max(self.draw.choice(found), self.draw.choice(found)) if found else None

    def add(
        self, shape: Shape, step: Callable[[Builder, list[SSAValue], list[SSAValue]], SSAValue]
    ) -> None:
        self.shapes.append(shape)
        self.steps.append(step)

    def start(self) -> None:
        for _ in range(self.draw.randint(1, 3)):
            shape = tuple(self.draw.choice(SIZES) for _ in range(self.draw.choice((1, 2, 2, 3))))
            i = self.arg("f64", shape)
            self.add(shape, lambda b, a, v, i=i: a[i])

    def grow(self) -> None:
        """One more value."""
        kinds = [
            self.unary, self.unary, self.binary, self.binary, self.matmul, self.matmul,
            self.reduce, self.transpose, self.reshape, self.broadcast, self.row, self.gather,
            self.select, self.norm, self.loss, self.constant,
        ]  # fmt: skip
        before = len(self.steps)
        while len(self.steps) == before:
            self.draw.choice(kinds)()

    def unary(self) -> None:
        x = self.value()
        kind = self.draw.choice([nn.ReluOp, nn.TanhOp, nn.SigmoidOp, nn.GeluOp, nn.NegOp])
        assert x is not None
        self.add(self.shapes[x], lambda b, a, v: b.value(kind, v[x]))

    def binary(self) -> None:
        x, y = self.value(), self.value()
        assert x is not None and y is not None
        small, large = self.shapes[x], self.shapes[y]
        if len(small) > len(large):
            small, large, x, y = large, small, y, x
        tail = large[len(large) - len(small) :]
        if any(n not in (1, m) for n, m in zip(small, tail, strict=True)):
            y_new = self.arg("f64", tuple(self.draw.choice((n, n, 1)) for n in self.shapes[x]))
            large = self.shapes[x]
            kind = self.draw.choice([nn.AddOp, nn.SubOp, nn.MulOp, nn.MaxOp])
            self.add(large, lambda b, a, v: b.value(kind, v[x], a[y_new]))
            return
        if self.draw.random() < 0.2:  # x / (y y + 1)
            self.add(large, lambda b, a, v: b.div(
                v[x], b.add(b.mul(v[y], v[y]), b.constant(1.0, ELEMENTS["f64"]))
            ))  # fmt: skip
            return
        kind = self.draw.choice([nn.AddOp, nn.SubOp, nn.MulOp, nn.MaxOp])
        self.add(large, lambda b, a, v: b.value(kind, v[x], v[y]))

    def matmul(self) -> None:
        x = self.value(2)
        if x is None:
            return
        rows, inner = self.shapes[x]
        with_value = [i for i, s in enumerate(self.shapes) if len(s) == 2 and s[0] == inner]
        if with_value and self.draw.random() < 0.4:
            y = self.draw.choice(with_value)
            self.add(
                (rows, self.shapes[y][1]),
                lambda b, a, v: b.value(nn.TanhOp, b.value(nn.MatmulOp, v[x], v[y])),
            )
            return
        n = self.draw.choice(SIZES)
        w = self.arg("f64", (inner, n))
        self.add((rows, n), lambda b, a, v: b.value(nn.MatmulOp, v[x], a[w]))

    def reduce(self) -> None:
        x = self.value()
        assert x is not None
        shape = self.shapes[x]
        dims = sorted(self.draw.sample(range(len(shape)), self.draw.randint(1, len(shape))))
        kind = self.draw.choice(["sum", "mean", "max", "min"])
        keep = len(dims) == len(shape) or self.draw.random() < 0.5
        out = tuple(1 if d in dims else n for d, n in enumerate(shape) if keep or d not in dims)
        self.add(out, lambda b, a, v: b.reduce(v[x], kind, dims, keep))

    def transpose(self) -> None:
        x = self.value()
        assert x is not None
        shape = self.shapes[x]
        perm = self.draw.sample(range(len(shape)), len(shape))
        self.add(tuple(shape[d] for d in perm), lambda b, a, v: b.transpose(v[x], perm))

    def reshape(self) -> None:
        x = self.value()
        assert x is not None
        shape = self.shapes[x]
        if len(shape) > 1 and self.draw.random() < 0.5:
            d = self.draw.randrange(len(shape) - 1)
            new = (*shape[:d], shape[d] * shape[d + 1], *shape[d + 2 :])
        else:
            d = self.draw.randrange(len(shape))
            cut = self.draw.choice([n for n in range(1, shape[d] + 1) if shape[d] % n == 0])
            new = (*shape[:d], cut, shape[d] // cut, *shape[d + 1 :])
        if len(new) <= 3 and max(new) <= 24:
            self.add(new, lambda b, a, v: b.reshape(v[x], new))

    def broadcast(self) -> None:
        x = self.value()
        assert x is not None
        if len(self.shapes[x]) > 2:
            return
        n, shape = self.draw.choice(SIZES), self.shapes[x]
        d = self.draw.randint(0, len(shape))
        new = (*shape[:d], n, *shape[d:])
        dims = [i for i in range(len(new)) if i != d]
        self.add(new, lambda b, a, v: b.broadcast(v[x], dims, new))

    def row(self) -> None:
        x = self.value()
        assert x is not None
        kind = self.draw.choice([nn.SoftmaxOp, nn.LogSoftmaxOp])
        axis = int_attr(self.draw.randrange(len(self.shapes[x])))
        self.add(self.shapes[x], lambda b, a, v: b.value(kind, v[x], props={"axis": axis}))

    def norm(self) -> None:
        x = self.value()
        assert x is not None
        shape = self.shapes[x]
        tail = shape[-self.draw.randint(1, len(shape)) :]
        w, c = self.arg("f64", tail), self.arg("f64", tail)
        self.add(shape, lambda b, a, v: b.value(
            nn.LayerNormOp, v[x], a[w], a[c], props={"eps": float_attr(0.1)}
        ))  # fmt: skip

    def gather(self) -> None:
        x = self.value()
        assert x is not None
        shape = self.shapes[x]
        axis = self.draw.randrange(len(shape))
        ids = tuple(self.draw.choice(SIZES) for _ in range(self.draw.randint(1, 4 - len(shape))))
        if shape[axis] < 2:
            return
        i = self.arg(self.draw.choice(["i32", "i64"]), ids, f"below:{shape[axis]}")
        self.add((*shape[:axis], *ids, *shape[axis + 1 :]), lambda b, a, v: b.value(
            nn.GatherOp, v[x], a[i], props={"axis": int_attr(axis)}
        ))  # fmt: skip

    def loss(self) -> None:
        x = self.value(2)
        if x is None or self.shapes[x][1] < 2:
            return
        rows, classes = self.shapes[x]
        labels = self.arg("i64", (rows,), f"below:{classes}")
        kind = self.draw.choice([nn.CrossEntropyOp, nn.PickOp])
        self.add((rows,), lambda b, a, v: b.value(kind, v[x], a[labels]))

    def select(self) -> None:
        x = self.value()
        assert x is not None
        self.add(self.shapes[x], lambda b, a, v: b.value(
            nn.SelectOp, b.compare("gt", v[x], b.constant(0.25, ELEMENTS["f64"])), v[x],
            b.neg(v[x]),
        ))  # fmt: skip

    def constant(self) -> None:
        x = self.value()
        assert x is not None
        number = self.draw.choice([0.5, -2.0])
        self.add(self.shapes[x], lambda b, a, v: b.scale(v[x], number))


def random_problem(seed: int, loss: bool | None = None) -> Problem:
    """The program of this seed; `loss`: whether it returns one scalar, else it is drawn."""
    w = Writer(seed)
    w.start()
    for _ in range(w.draw.randint(3, 12)):
        w.grow()
    scalar = w.draw.random() < 0.5 if loss is None else loss

    def body(b: Builder, *arguments: SSAValue) -> list[SSAValue]:
        values: list[SSAValue] = []
        for step in w.steps:
            values.append(step(b, list(arguments), values))
        used = [v for v in values[-3:]]
        if not scalar:
            return used
        total: SSAValue | None = None
        for v in used:
            one = b.reduce(v, "mean", range(len(shape_of(v))))
            total = one if total is None else b.add(total, one)
        assert total is not None
        return [total]

    wrt = [i for i, a in enumerate(w.args) if a.element == "f64"]
    return problem(w.args, body, wrt, w.kinds, seed)


def pieces(draw: random.Random, mesh: Mesh) -> list[Axis]:
    """The mesh's axes, some of them cut in two, shuffled."""
    out = []
    for a in mesh.names:
        n = mesh.extent((a,))
        if n == 4 and draw.random() < 0.3:
            out += mesh.split(a, 2)
        else:
            out.append(a)
    draw.shuffle(out)
    return out


def random_layout(draw: random.Random, mesh: Mesh, rank: int, partial: bool = False) -> Layout:
    """A layout at random; where `partial`, perhaps a partial sum."""
    hands: list[Axes] = [()] * rank
    left = []
    for a in pieces(draw, mesh):
        d = draw.randint(0, rank)
        if d < rank:
            hands[d] += (a,)
        else:
            left.append(a)
    kept = tuple(a for a in left if partial and draw.random() < 0.3)
    dims = tuple(map(mesh.simplify, hands))
    return Layout(mesh.name, dims).with_partial(mesh.simplify(tuple(sorted(kept, key=mesh.order))))


def random_strategy(draw: random.Random, mesh: Mesh, op: TensorOp) -> Strategy | None:
    """Axes for some factors of an op, as its strategy; None where they make none."""
    factors = op.factors()
    chosen: FactorAxes = {}
    names = [f for f, _ in factors.sizes]
    for a in pieces(draw, mesh):
        f = draw.choice([*names, ""]) if names else ""
        whole = type(op).decompose is TensorOp.decompose and f in factors.replicate
        if f and not whole:
            chosen[f] = (*chosen.get(f, ()), a)
    found = [[factors.compose(d, chosen, mesh) for d in dims] for dims in factors.operands]
    if (
        any(axes is None for dims in found for axes in dims)
        or placed(factors, chosen, mesh) is None
    ):
        return None
    operands = tuple(tuple(axes or () for axes in dims) for dims in found)
    return Strategy(None, operands)


def random_form(p: Problem, seed: int) -> tuple[ModuleOp, Mesh]:
    """The program with a mesh, and layouts and strategies on some of its values and ops."""
    draw = random.Random(seed)
    mesh = draw.choice(MESHES)
    block = function(p.module, "f").body.block
    given = [
        random_layout(draw, mesh, len(shape_of(v)), is_sum(v)) if draw.random() < 0.6 else None
        for v in block.args
    ]
    module = laid_out(p.module, mesh, given)
    for op in function(module, "f").body.block.ops:
        if not isinstance(op, TensorOp) or isinstance(op.next_op, ReturnOp):
            continue
        if draw.random() < 0.25 and op.operands:
            strategy = random_strategy(draw, mesh, op)
            if strategy is not None and any(c for cuts in strategy.operands for c in cuts):
                op.properties["strategy"] = dist.StrategyAttr(strategy)
        elif draw.random() < 0.15:
            t = op.results[0].type
            assert isinstance(t, TensorType)
            pinned = random_layout(draw, mesh, len(t.get_shape()))
            set_type(op.results[0], dist.with_layout(t, pinned))
    return module, mesh


def is_sum(v: SSAValue) -> bool:
    """Whether a value can be a partial sum."""
    return isinstance(v.type, TensorType) and v.type.element_type == ELEMENTS["f64"]
