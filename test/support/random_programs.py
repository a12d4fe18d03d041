"""Random programs of any ops: chained cases of the laws of ops.

An op is drawn as one of its cases (`op_cases`), whose operands are values of the program, reshaped
to the case's shapes, or new arguments. So every op that has a case occurs. Programs are smooth: an
op is dropped where torch's result or gradient changes when the operands change by a billionth
(kinks, ties, elements about to change their order).

A program is a function of its seed, so that a failure names the program; a program of fewer ops is
the beginning of one of more. random_layouts.py adds a mesh, layouts and strategies.
"""

import random
from collections.abc import Sequence
from functools import cache

import numpy as np
import torch
from op_cases import CASES, REFERENCES, Case
from xdsl.dialects.builtin import TensorType
from xdsl.ir import Block, Operation, SSAValue

from shardir.algebra.layout import Shape
from shardir.diagnostics import ShardirError
from shardir.dialects import dist, nn
from shardir.dialects.nn.base import TensorOp
from shardir.rewriting.rewriter import Rewriter
from support.harness import (
    ELEMENTS,
    Arg,
    Array,
    Problem,
    module_of,
    numbers,
    posed,
    torch_gradient,
)
from support.reference import shape_of, to_torch

MAX_ELEMENTS = 512
NOISE, MAX_CHANGE, MAX_VALUE = 1e-9, 1e-5, 1e3
"""Operands change by the fraction NOISE. A result may change by MAX_CHANGE of its largest element
(at least of 1), and no element is above MAX_VALUE. So rounding errors stay below 1e-11."""

OFTEN = (
    nn.AdaptiveAvgPoolOp, nn.ArgmaxOp, nn.AttentionOp, nn.ConvOp, nn.LayerNormOp, nn.MaxOp,
    nn.MaxPoolOp, nn.MinOp, nn.PadOp, nn.ReduceOp, nn.ReshapeOp, nn.SliceOp, nn.SortOp, nn.StdOp,
    nn.TopkOp, nn.UnfoldOp,
)  # fmt: skip
"""Ops that were wrong before: they are drawn three times as often as others."""


@cache
def usable() -> dict[type[TensorOp], list[tuple[Case, str]]]:
    """Return the cases of each op with the element types in which a program can have them: floats
    are f64, as torch's results are."""
    out: dict[type[TensorOp], list[tuple[Case, str]]] = {}
    for case in CASES:
        for element in case.elements:
            args = case.args(element)
            made = case.result_element or element
            if all(e in ("f64", "i32", "i64", "i1") for e in (made, *(a.element for a in args))):
                out.setdefault(case.op, []).append((case, element))
    return out


@cache
def drawn() -> list[type[TensorOp]]:
    """Return the ops from which a program draws, each as often as its share."""
    return [op for op in usable() for _ in range(3 if op in OFTEN else 1)]


class Writer:
    """Writes one program into a block, and computes its values at the same time."""

    def __init__(self, seed: int):
        self.draw, self.rng = random.Random(seed), np.random.default_rng(seed)
        self.block = Block()
        self.added: list[Operation] = []
        self.b = Rewriter(None, self.block)
        self.b.insert = self._add
        self.arguments: list[Array] = []
        self.known: dict[SSAValue, tuple[torch.Tensor, torch.Tensor]] = {}
        """The elements of each value, and those after some noise in the operands of every op."""

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
        """Return a value for an operand: `first`, else one of the program, preferably one of its
        shape and a late one, or a new argument."""
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
        """Return a value reshaped, after a matmul where the numbers of elements differ."""
        have, want = int(np.prod(shape_of(v))), int(np.prod(shape))
        if shape_of(v) == shape:
            return v
        if have != want:
            v = v if shape_of(v) == (1, have) else self.b.reshape(v, (1, have))
            w = self.argument(Arg("f64", (have, want)), "normal")
            v = self.b.value(nn.MatmulOp, v, w)
        return v if shape_of(v) == shape else self.b.reshape(v, shape)

    def resized(self, case: Case, args: list[Arg], like: SSAValue) -> list[Arg]:
        """Return the operands in other sizes: the first is `like`, and equal sizes of the others
        change with it. Where the op has no such operands, return those of the case."""
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
        """Add an op (this one, or any) if it is smooth here; return whether it is."""
        self.added = []
        args_before = len(self.block.args)
        case, element = self.draw.choice(usable()[op or self.draw.choice(drawn())])
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
        """Whether the results and gradients of an op change little with a little noise, and are not
        too large."""
        for v in op.results:
            if self.known[v][0].numel() > MAX_ELEMENTS:
                return False
            if element_of(v) not in ("f64", "i32", "i64", "i1") or not steady(*self.known[v]):
                return False
        if not isinstance(op, TensorOp) or all(not c.gradient for c, _ in usable()[type(op)]):
            return True
        return steady_slope(op, *([self.known[v][i] for v in op.operands] for i in (0, 1)))

    def finish(self) -> Problem | None:
        """Return the program, whose results are its unused values; None if it is not smooth."""
        ends = [v for v in self.known if not list(v.uses) and v not in self.block.args]
        floats = [v for v in ends if element_of(v) == "f64"]
        scalar = self.draw.random() < 0.5
        results = [v for v in ends if v not in floats] + ([] if scalar else floats[-2:])
        total: SSAValue | None = None
        for v in floats if scalar else floats[:-2]:
            shape = shape_of(v)
            one = self.b.reduce(v, "mean" if 0 not in shape else "sum", range(len(shape)))
            total = one if total is None else self.b.add(total, one)
        wrt = [i for i, v in enumerate(self.block.args) if element_of(v) == "f64"]
        if total is not None:
            results.append(total)
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
    """Whether two tensors are about equal, finite and not large."""
    x, near = x.detach(), near.detach()
    if not x.dtype.is_floating_point:
        return torch.equal(x, near)
    if not x.numel():
        return True
    top = float(x.abs().max())
    return top < MAX_VALUE and float((x - near).abs().max()) <= MAX_CHANGE * max(1.0, top)


def steady_slope(op: Operation, x: list[torch.Tensor], near: list[torch.Tensor]) -> bool:
    """Whether the cotangents of an op's float operands are about equal at two points."""

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
    """Return the program of a seed: with about `ops` ops, or five to twenty."""
    for attempt in range(100):
        w = Writer(seed * 100 + attempt)
        size = w.draw.randint(5, 20) if ops is None else ops
        while len(w.block.ops) < size:
            w.grow()
        p = w.finish()
        if p is not None:
            return p
    raise AssertionError(f"no smooth program of seed {seed}")
