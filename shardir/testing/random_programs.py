"""Random programs of any ops: chained cases of the laws of ops.

An op is drawn as one of its cases, whose operands are values of the program, reshaped to the case's
shapes, or new arguments. So every op that has a case occurs. Programs are smooth: an op is dropped
where its result changes when the operands change by a billionth (ties, elements about to change
their order).

A program is a function of its seed, so that a failure names the program; a program of fewer ops is
the beginning of one of more. random_layouts.py adds a mesh, layouts and strategies.
"""

import random
from collections.abc import Mapping, Sequence

import numpy as np
from xdsl.dialects.builtin import ModuleOp
from xdsl.ir import Block, Operation, SSAValue

from shardir.diagnostics import ShardirError
from shardir.dialects import dist, nn
from shardir.dialects.nn.base import Array, TensorOp
from shardir.interpret import run
from shardir.rewriting.rewriter import Rewriter
from shardir.testing.arrays import numbers
from shardir.testing.cases import Case
from shardir.testing.nn_cases import NN_CASES
from shardir.testing.programs import ELEMENTS, Arg, elements_of, module_of, shape_of

MAX_ELEMENTS = 512
NOISE, MAX_CHANGE, MAX_VALUE = 1e-9, 1e-5, 1e3
"""Operands change by the fraction NOISE. A result may change by MAX_CHANGE of its largest element
(at least of 1), and no element is above MAX_VALUE. So rounding errors stay below 1e-11."""

Usable = Mapping[type[TensorOp], Sequence[tuple[Case, str]]]
"""The cases of each op, with the element types in which a program can have them."""


def usable_of(cases: Sequence[Case]) -> Usable:
    """Return the cases that a program can have: with f64 as the only float type."""
    out: dict[type[TensorOp], list[tuple[Case, str]]] = {}
    for case in cases:
        for element in case.elements:
            args = case.args(element)
            made = case.result_element or element
            if all(e in ("f64", "i32", "i64", "i1") for e in (made, *(a.element for a in args))):
                out.setdefault(case.op, []).append((case, element))
    return out


class ProgramWriter:
    """Writes one program into a block, and computes its values at the same time.

    Args:
        usable: the ops from which it draws.
        often: ops that are drawn three times as often as others.
    """

    def __init__(self, seed: int, usable: Usable, often: Sequence[type[TensorOp]] = ()):
        self.draw, self.rng = random.Random(seed), np.random.default_rng(seed)
        self.usable = usable
        self.drawn = [op for op in usable for _ in range(3 if op in often else 1)]
        self.block = Block()
        self.added: list[Operation] = []
        self.b = Rewriter(None, self.block)
        self.b.insert = self._add
        self.arguments: list[Array] = []
        self.known: dict[SSAValue, tuple[Array, Array]] = {}
        """The elements of each value, and those after some noise in the operands of every op."""

    def compute(self, op: Operation, inputs: Sequence[Array]) -> Sequence[Array]:
        """Return the results of an op."""
        block = Block(arg_types=[v.type for v in op.operands])
        new = op.clone()
        new.operands = list(block.args)
        block.add_op(new)
        return run(module_of(block, new.results), "f", inputs)

    def is_smooth_at(self, op: Operation, inputs: Sequence[Array], near: Sequence[Array]) -> bool:
        """Whether gradients of an op are about equal at two points."""
        return True

    def _add(self, op: Operation) -> None:
        self.block.add_op(op)
        self.added.append(op)
        x, near = ([self.known[v][i] for v in op.operands] for i in (0, 1))
        exact = self.compute(op, x)
        for i, v in enumerate(op.results):
            self.known[v] = exact[i], self.compute(op, [self.noisy(n) for n in near])[i]

    def noisy(self, x: Array) -> Array:
        """Return an array with some noise in its floats."""
        if x.dtype.kind != "f":
            return x
        return x * (1 + NOISE * self.rng.standard_normal(x.shape))

    def argument(self, arg: Arg, kind: str) -> SSAValue:
        """Return a new argument."""
        array = numbers(self.rng, arg.element, arg.shape, kind)
        type = dist.tensor(ELEMENTS[arg.element], arg.shape)
        v = self.block.insert_arg(type, len(self.block.args))
        v.name_hint = f"x{len(self.arguments)}"
        self.arguments.append(array)
        self.known[v] = array, self.noisy(array)
        return v

    def values(self, element: str) -> list[SSAValue]:
        """Return the values of an element type."""
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
        if kind in ("positive", "share") or (np.abs(self.known[v][0]) > 8).any():
            v = self.b.value(nn.TanhOp, v)
        if kind == "positive":
            v = self.b.value(nn.ExpOp, v)
        elif kind == "share":
            v = self.b.value(nn.SigmoidOp, v)
        return v

    def shaped(self, v: SSAValue, shape: tuple[int, ...]) -> SSAValue:
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
            or case.regions is not None
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
        case, element = self.draw.choice(self.usable[op or self.draw.choice(self.drawn)])
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
            if self.known[v][0].size > MAX_ELEMENTS:
                return False
            if element_of(v) not in ("f64", "i32", "i64", "i1") or not steady(*self.known[v]):
                return False
        if not isinstance(op, TensorOp) or all(
            not c.gradient for c, _ in self.usable.get(type(op), ())
        ):
            return True
        x, near = ([self.known[v][i] for v in op.operands] for i in (0, 1))
        return self.is_smooth_at(op, x, near)

    def finish(self) -> tuple[ModuleOp, list[int]] | None:
        """Return the program, whose results are its unused values, and the arguments to
        differentiate by; None if it has no result or no such argument."""
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
        return module_of(self.block, results, wrt), wrt


def steady(x: Array, near: Array) -> bool:
    """Whether two arrays are about equal, finite and not large."""
    if x.dtype.kind != "f":
        return np.array_equal(x, near)
    if not x.size:
        return True
    top = float(np.abs(x).max())
    return top < MAX_VALUE and float(np.abs(x - near).max()) <= MAX_CHANGE * max(1.0, top)


def element_of(v: SSAValue) -> str:
    """Return the element type of a value."""
    return elements_of([v.type])[0]


def random_program(seed: int, ops: int | None = None, cases: Sequence[Case] = ()) -> ModuleOp:
    """Return the program of a seed: @f of arguments and results in f64, and a request for its
    gradient @g. It draws from some ops of nn, and from those of `cases` as often.

    Args:
        ops: about how many it has, by default five to twenty. A program of fewer is the beginning
            of one of more.
        cases: of ops of an extension.
    """
    usable = usable_of([*NN_CASES, *cases])
    often = tuple({case.op for case in cases})
    for attempt in range(100):
        w = ProgramWriter(seed * 100 + attempt, usable, often)
        size = w.draw.randint(5, 20) if ops is None else ops
        while len(w.block.ops) < size:
            w.grow()
        found = w.finish()
        if found is not None:
            return found[0]
    raise AssertionError(f"no smooth program of seed {seed}")
