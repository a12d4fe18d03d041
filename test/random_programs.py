"""Random programs of any ops: cases of the laws of ops, chained, with layouts and strategies at
random.

An op is drawn as one of its cases (`op_cases`), whose operands are values that the program has,
brought to the case's shapes, or new arguments. So an op that has a case occurs. What is kept is
smooth: an op is left out where torch itself gives another answer, or slope, when the operands
change by a billionth (kinks, ties, an order about to change).

Everything follows from the seed, so that a failure names the program that shows it; a program of
fewer ops is the beginning of one of more.
"""

import random
from collections.abc import Sequence
from functools import cache

import numpy as np
import torch
from harness import (
    ELEMENTS,
    Arg,
    Array,
    Problem,
    function,
    laid_out,
    module_of,
    numbers,
    posed,
    torch_gradient,
)
from op_cases import CASES, REFERENCES, Case
from reference import shape_of, to_torch
from xdsl.dialects.builtin import IntegerAttr, ModuleOp, TensorType, i64
from xdsl.dialects.func import FuncOp, ReturnOp
from xdsl.ir import Block, Operation, SSAValue

from shardir.algebra.factors import FactorAxes, try_op_sharding
from shardir.algebra.layout import Layout, Shape
from shardir.algebra.mesh import Axes, Axis, Mesh
from shardir.algebra.notation import mesh_of
from shardir.algebra.sharding import Sharding
from shardir.algebra.strategy import Strategy
from shardir.diagnostics import ShardirError
from shardir.dialects import dist, nn
from shardir.dialects.nn.base import TensorOp
from shardir.dialects.text import word
from shardir.rewriting.functions import update_signature
from shardir.rewriting.rewriter import Rewriter, set_type

MESHES = [
    mesh_of("m", t)
    for t in ("a = 2, b = 2", "a = 4", "a = 2, b = 3", "a = 2, b = 4", "a = 2, b = 2, c = 2")
]
ELEMENTS_AT_MOST = 512
NOISE, STEADY, GREATEST = 1e-9, 1e-5, 1e3
"""Operands change by NOISE of themselves; of a result's greatest element (or of 1) its change is to
be below STEADY; no element is to be above GREATEST. So rounding stays below 1e-11."""


@cache
def usable() -> dict[type[Operation], list[tuple[Case, str]]]:
    """Per op its cases and the element types in which a program can have them: its floats are f64,
    as torch's answer is."""
    out: dict[type[Operation], list[tuple[Case, str]]] = {}
    for case in CASES:
        for element in case.elements:
            args = case.args(element)
            made = case.result_element or element
            if all(e in ("f64", "i32", "i64", "i1") for e in (made, *(a.element for a in args))):
                out.setdefault(case.op, []).append((case, element))
    return out


class Writer:
    """Writes one program into a block, and calculates it as it does."""

    def __init__(self, seed: int):
        self.draw, self.rng = random.Random(seed), np.random.default_rng(seed)
        self.block = Block()
        self.added: list[Operation] = []
        self.b = Rewriter(None, self.block)
        self.b.insert = self._add
        self.arguments: list[Array] = []
        self.known: dict[SSAValue, tuple[torch.Tensor, torch.Tensor]] = {}
        """Of each value the numbers, and those after some noise in the operands of every op."""

    def _add(self, op: Operation) -> None:
        self.block.add_op(op)
        self.added.append(op)
        x, near = ([self.known[v][i] for v in op.operands] for i in (0, 1))
        for i, v in enumerate(op.results):
            self.known[v] = self.of(op, x)[i], self.of(op, [self.noisy(n) for n in near])[i]

    @staticmethod
    def of(op: Operation, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        out = REFERENCES[type(op)](op, *inputs)
        return out if isinstance(out, tuple) else (out,)

    def noisy(self, x: torch.Tensor) -> torch.Tensor:
        if not x.dtype.is_floating_point:
            return x
        return x * (1 + NOISE * torch.tensor(self.rng.standard_normal(x.shape)))

    def argument(self, arg: Arg, kind: str) -> SSAValue:
        array = numbers(self.rng, arg.element, arg.shape, kind)
        type = dist.tensor(ELEMENTS[arg.element], arg.shape)
        v = self.block.insert_arg(type, len(self.block.args))
        v.name_hint = f"x{len(self.arguments)}"
        self.arguments.append(array)
        self.known[v] = to_torch(array), self.noisy(to_torch(array))
        return v

    def values(self, element: str) -> list[SSAValue]:
        return [v for v in self.known if element_of(v) == element]

    def operand(self, arg: Arg, kind: str, first: SSAValue | None = None) -> SSAValue:
        """A value for an operand: one that there is, rather of its shape and rather a late one,
        or a new argument. `first` is to be it if possible."""
        if arg.element != "f64":
            same = [v for v in self.values(arg.element) if shape_of(v) == arg.shape]
            if kind not in ("normal", "ties") or not same or self.draw.random() < 0.2:
                return self.argument(arg, kind)
            return self.draw.choice(same)
        found = self.values("f64")
        if kind not in ("normal", "positive", "share", "ties", "halves"):
            return self.argument(arg, kind)
        if first is None and (not found or self.draw.random() < 0.2):
            first = self.argument(arg, "normal")
        same = [v for v in found if shape_of(v) == arg.shape]
        if same and self.draw.random() < 0.6:
            found = same
        v = first if first is not None else found[max(self.draw.choices(range(len(found)), k=2))]
        v = self.shaped(v, arg.shape)
        if kind in ("positive", "share") or (self.known[v][0].abs() > 8).any():
            v = self.b.value(nn.TanhOp, v)
        if kind == "positive":
            v = self.b.value(nn.ExpOp, v)
        elif kind == "share":
            v = self.b.value(nn.SigmoidOp, v)
        return v

    def shaped(self, v: SSAValue, shape: Shape) -> SSAValue:
        """The numbers of a value as another shape; sums of them where there are more or fewer."""
        have, want = int(np.prod(shape_of(v))), int(np.prod(shape))
        if shape_of(v) == shape:
            return v
        if have != want:
            v = v if shape_of(v) == (1, have) else self.b.reshape(v, (1, have))
            w = self.argument(Arg("f64", (have, want)), "normal")
            v = self.b.value(nn.MatmulOp, v, w)
        return v if shape_of(v) == shape else self.b.reshape(v, shape)

    def resized(self, case: Case, args: list[Arg], like: SSAValue) -> list[Arg]:
        """The operands with other sizes: the first is `like`, the others follow it where they had
        the same sizes. Those of the case where that is no operand of the op."""
        old, new = args[0].shape, shape_of(like)
        sizes = dict(zip(old, new, strict=False))
        if (
            not case.op.INFERRED
            or 0 in new
            or len(old) != len(new)
            or tuple(sizes[n] for n in old) != new
            or any(k.startswith("below:") for k in case.kinds)
        ):
            return args
        out = [Arg(a.element, tuple(sizes.get(n, n) for n in a.shape)) for a in args]
        try:
            case.op.infer([dist.tensor(ELEMENTS[a.element], a.shape) for a in out], case.props)
        except ShardirError:
            return args
        return out

    def grow(self, op: type[TensorOp] | None = None) -> bool:
        """One more op (this one, or any), if it is smooth where it stands."""
        self.added = []
        args_before = len(self.block.args)
        case, element = self.draw.choice(usable()[op or self.draw.choice(list(usable()))])
        args = case.args(element)
        kinds = [*case.kinds, *["normal"] * (len(args) - len(case.kinds))]
        first = None
        if args and args[0].element == "f64" and self.values("f64"):
            first = self.draw.choice(self.values("f64"))
            args = self.resized(case, args, first)
        operands = []
        for i, (a, k) in enumerate(zip(args, kinds, strict=True)):
            operands.append(self.operand(a, k, first if i == 0 else None))
        if not case.gradient:
            operands = [
                self.b.value(nn.StopGradientOp, v) if element_of(v) == "f64" else v
                for v in operands
            ]
        case.body(element)(self.b, *operands)
        if all(self.smooth(op) for op in self.added):
            return True
        for new in reversed(self.added):
            for v in new.results:
                del self.known[v]
            new.detach()
            new.erase()
        for v in reversed(self.block.args[args_before:]):
            del self.known[v]
            self.block.erase_arg(v)
            self.arguments.pop()
        return False

    def smooth(self, op: Operation) -> bool:
        """Whether neither what torch gives for an op nor its slope changes with a little noise; and
        is not too large."""
        for v in op.results:
            if self.known[v][0].numel() > ELEMENTS_AT_MOST:
                return False
            if element_of(v) not in ("f64", "i32", "i64", "i1") or not steady(*self.known[v]):
                return False
        if not any(case.gradient for case, _ in usable().get(type(op), [])):
            return True
        return steady_slope(op, *([self.known[v][i] for v in op.operands] for i in (0, 1)))

    def finish(self) -> Problem | None:
        """The program, which returns what it has not used; None if its gradient is not smooth."""
        ends = [v for v in self.known if not list(v.uses) and v not in self.block.args]
        floats = [v for v in ends if element_of(v) == "f64"]
        scalar = self.draw.random() < 0.5
        kept = [v for v in ends if v not in floats] + ([] if scalar else floats[-2:])
        total: SSAValue | None = None
        for v in floats if scalar else floats[:-2]:
            shape = shape_of(v)
            one = self.b.reduce(v, "mean" if 0 not in shape else "sum", range(len(shape)))
            total = one if total is None else self.b.add(total, one)
        wrt = [i for i, v in enumerate(self.block.args) if element_of(v) == "f64"]
        results = kept if total is None else [*kept, total]
        if not results or not wrt:
            return None
        p = posed(module_of(self.block, results, wrt), wrt, self.arguments, self.rng)
        n = len(self.arguments)
        near = [self.noisy(torch.tensor(a)).numpy() if a.dtype.kind == "f" else a
                for a in self.arguments]  # fmt: skip
        other = torch_gradient(p.module, near, wrt, p.arguments[n:])
        pairs = zip(p.wanted, other, strict=True)
        return p if all(steady(torch.tensor(x), torch.tensor(y)) for x, y in pairs) else None


def steady(x: torch.Tensor, near: torch.Tensor) -> bool:
    """Whether numbers have stayed about the same, finite and not large."""
    x, near = x.detach(), near.detach()
    if not x.dtype.is_floating_point:
        return torch.equal(x, near)
    if not x.numel():
        return True
    top = float(x.abs().max())
    return top < GREATEST and float((x - near).abs().max()) <= STEADY * max(1.0, top)


def steady_slope(op: Operation, x: list[torch.Tensor], near: list[torch.Tensor]) -> bool:
    """Whether the cotangents of an op's float operands are about the same at two places."""

    def slopes(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        leaves = [t.detach().clone().requires_grad_(t.dtype.is_floating_point) for t in inputs]
        total = torch.zeros((), dtype=torch.float64)
        for y in Writer.of(op, leaves):
            if y.dtype.is_floating_point and y.requires_grad:
                dy = torch.linspace(-1.0, 2.0, y.numel(), dtype=y.dtype).reshape(y.shape)
                total = total + (y * dy).sum()
        floats = [t for t in leaves if t.requires_grad]
        if not total.requires_grad:
            return []
        found = torch.autograd.grad(total, floats, allow_unused=True)
        return [d for d in found if d is not None]

    return all(steady(d, e) for d, e in zip(slopes(x), slopes(near), strict=True))


def element_of(v: SSAValue) -> str:
    assert isinstance(v.type, TensorType)
    return str(v.type.element_type)


def random_problem(seed: int, ops: int | None = None) -> Problem:
    """The program of this seed: of about so many ops, or five to twenty."""
    for attempt in range(100):
        w = Writer(seed * 100 + attempt)
        size = w.draw.randint(5, 20) if ops is None else ops
        while len(w.block.ops) < size:
            w.grow()
        p = w.finish()
        if p is not None:
            return p
    raise AssertionError(f"no smooth program of seed {seed}")


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
        or try_op_sharding(factors, chosen, mesh) is None
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
    say(function(module, "f"), mesh, random.Random(-seed - 1))
    return module, mesh


def say(f: FuncOp, mesh: Mesh, draw: random.Random) -> None:
    """Puts in what is said about propagation: layouts that may be added to, barriers, and groups of
    values, of which one at most has a layout or a strategy."""
    block = f.body.block
    free: dict[Shape, list[SSAValue]] = {}
    for v in [*block.args, *(v for op in block.ops for v in op.results)]:
        if not isinstance(v.type, TensorType):
            continue
        if not is_stated(v) and draw.random() < 0.15:
            t = v.type
            set_type(v, TensorType(t.element_type, t.get_shape(), sharding(draw, mesh, v)))
        members = free.setdefault(shape_of(v), [])
        if draw.random() < 0.3 and not (is_stated(v) and any(map(is_stated, members))):
            members.append(v)
        if draw.random() < 0.1 and not isinstance(v.owner, Block):
            allowed = word(dist.DirectionAttr, draw.choice(dist.DirectionAttr.words()))
            barrier = dist.PropagationBarrierOp.create(
                operands=[v], result_types=[dist.with_layout(v.type, None)],
                properties={"allowed": allowed},
            )  # fmt: skip
            v.replace_uses_with_if(barrier.out, lambda use: not isinstance(use.operation, ReturnOp))
            barrier.operands[0] = v
            block.insert_op_after(barrier, v.owner)
    end = block.last_op
    assert end is not None
    for i, members in enumerate(m for m in free.values() if len(m) > 1):
        for v in members:
            group = dist.ShardingGroupOp.create(
                operands=[v], properties={"group": IntegerAttr(i, i64)}
            )
            block.insert_op_before(group, end)
    update_signature(f)


def is_stated(v: SSAValue) -> bool:
    """Whether something says how a value lies."""
    strategy = isinstance(v.owner, TensorOp) and v.owner.strategy is not None
    return strategy or dist.sharding_of(v) is not None


def sharding(draw: random.Random, mesh: Mesh, v: SSAValue) -> dist.ShardingAttr:
    """What may be added to: some axes in some dimensions, some of these open, of two priorities;
    what splits nothing perhaps to stay replicated."""
    rank = len(shape_of(v))
    layout = random_layout(draw, mesh, rank)
    unused = tuple(a for a in mesh.names if not any(mesh.overlap(a, b) for b in layout.used))
    found = Sharding(
        layout,
        frozenset(d for d in range(rank) if draw.random() < 0.7),
        tuple(draw.randint(0, 1) for _ in range(rank)),
        tuple(a for a in unused if draw.random() < 0.3),
    )
    return dist.ShardingAttr(found.simplified(mesh))


def is_sum(v: SSAValue) -> bool:
    """Whether a value can be a partial sum."""
    return isinstance(v.type, TensorType) and v.type.element_type == ELEMENTS["f64"]
