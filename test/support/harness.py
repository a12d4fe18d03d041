"""Programs of the tests: their construction, compilation, execution and expected results.

A program is built once as a single-device module without layouts; `laid_out` adds a mesh and
layouts of arguments, `compiled` runs passes, `run` is that of the interpreter. Expected results are
torch's (reference.py).
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from xdsl.context import Context
from xdsl.dialects import builtin
from xdsl.dialects.builtin import FunctionType, ModuleOp, StringAttr, SymbolRefAttr
from xdsl.dialects.func import FuncOp, ReturnOp
from xdsl.ir import Attribute, Block, Operation, Region, SSAValue

from shardir.algebra.layout import Layout, Shape
from shardir.algebra.mesh import Axes, Axis, Mesh
from shardir.algebra.notation import mesh_of, parse_layout
from shardir.compat.xdsl import set_type
from shardir.dialects import dist, train
from shardir.dialects.nn.properties import dims_attr
from shardir.dialects.nn.types import size_of
from shardir.interpret import check_pass, run
from shardir.interpret.values import round_to_element
from shardir.passes import PASSES
from shardir.rewriting.functions import update_signature
from shardir.rewriting.rewriter import Rewriter
from support.reference import to_torch, torch_forward

Array = np.ndarray[Any, Any]

ELEMENTS: dict[str, Any] = {
    name: getattr(builtin, name) for name in ("f32", "f64", "bf16", "f16", "i32", "i64", "i1")
}
FLOATS = ("f64", "f32", "bf16", "f16")
INTEGERS = ("i32", "i64")
TOLERANCE = {"f64": 1e-12, "f32": 1e-5, "bf16": 2.0**-4, "f16": 2.0**-7}
"""The tolerance relative to the largest element, or to 1: some rounding errors of intermediate
values up to 8."""

MESH = mesh_of("m", "a = 2, b = 2")
PIPELINE = (
    "propagate-strategies", "insert-redistributions", "distributed-autodiff", "recompute",
    "lower-to-spmd", "simplify-communication", "fuse-communication",
)  # fmt: skip

# ---- layouts ----


def layout(text: str, mesh: Mesh = MESH) -> Layout:
    """Return the layout of a text without the mesh's name."""
    return parse_layout(f"@{mesh.name}, {text}")


@cache
def layouts(rank: int, mesh: Mesh = MESH) -> tuple[Layout, ...]:
    """Return every layout over full axes: each dimension over any axes in any order."""

    def fill(dims: int, left: Axes) -> Iterator[tuple[Axes, ...]]:
        if not dims:
            yield ()
            return
        for mine in ordered_subsets(left):
            rest = tuple(a for a in left if a not in mine)
            for others in fill(dims - 1, rest):
                yield (mine, *others)

    return tuple(Layout(mesh.name, dims) for dims in fill(rank, mesh.names))


def ordered_subsets(axes: Sequence[Axis]) -> Iterator[Axes]:
    """Yield (), (a), (b), (a, b), (b, a) for (a, b)."""
    yield ()
    for i, a in enumerate(axes):
        for rest in ordered_subsets([*axes[:i], *axes[i + 1 :]]):
            yield (a, *rest)


# ---- programs ----


@dataclass(frozen=True)
class Arg:
    """An argument: its type, and for a parameter its name."""

    element: str
    shape: Shape
    parameter: str = ""


Body = Callable[..., SSAValue | Sequence[SSAValue]]


def program(args: Sequence[Arg], body: Body, wrt: Sequence[int] | None = None) -> ModuleOp:
    """Return a module with @f, built by `body(builder, *arguments)`, and a request for its gradient
    @g with respect to the arguments `wrt` (None: no request)."""
    types = [dist.tensor(ELEMENTS[a.element], a.shape) for a in args]
    block = Block(arg_types=types)
    for i, v in enumerate(block.args):
        v.name_hint = args[i].parameter or f"x{i}"
    results = body(Rewriter(None, block), *block.args)
    module = module_of(block, [results] if isinstance(results, SSAValue) else list(results), wrt)
    if any(a.parameter for a in args):
        init = train.InitAttr.read("normal")
        train.set_arg_attrs(function(module, "f"), [
            {"train.parameter": StringAttr(a.parameter), "train.init": init} if a.parameter
            else {"train.input": init} if a.element in FLOATS
            else {"train.input": train.InitAttr.read("integers, low = 0, high = 2")}
            for a in args
        ])  # fmt: skip
    return module


def module_of(
    block: Block, results: Sequence[SSAValue], wrt: Sequence[int] | None = None
) -> ModuleOp:
    """Return a module with @f of a block, with the results `results`, and a request for @g."""
    block.add_op(ReturnOp(*results))
    signature = FunctionType.from_lists(block.arg_types, [r.type for r in results])
    module = ModuleOp([FuncOp("f", signature, Region(block))])
    if wrt is not None:
        module.body.block.add_op(train.GradientOp.create(properties={
            "sym_name": StringAttr("g"), "function": SymbolRefAttr("f"), "wrt": dims_attr(*wrt),
        }))  # fmt: skip
    return module


def add_step(module: ModuleOp, optimizer: str) -> ModuleOp:
    """Add a request for a training step @step of @f, in place."""
    module.body.block.add_op(train.StepOp.create(properties={
        "sym_name": StringAttr("step"), "function": SymbolRefAttr("f"),
        "optimizer": train.OptimizerAttr.read(optimizer),
    }))  # fmt: skip
    return module


def function(module: ModuleOp, name: str) -> FuncOp:
    return next(op for op in module.body.ops if isinstance(op, FuncOp) and op.sym_name.data == name)


def defined(module: ModuleOp) -> set[str]:
    """Return the names of the functions of a module."""
    return {op.sym_name.data for op in module.body.ops if isinstance(op, FuncOp)}


def laid_out(
    module: ModuleOp,
    mesh: Mesh,
    given: Sequence[Layout | None],
    results: Sequence[Layout | None] = (),
) -> ModuleOp:
    """Return a copy of the module with a mesh, and layouts on arguments and results of @f."""
    module = module.clone()
    declaration = dist.MeshOp.create(properties={
        "sym_name": StringAttr(mesh.name), "axes": dist.MeshAttr(mesh.axes),
    })  # fmt: skip
    first = module.body.block.first_op
    assert first is not None
    module.body.block.insert_op_before(declaration, first)
    f = function(module, "f")
    end = f.body.block.last_op
    assert end is not None
    for v, l in [
        *zip(f.body.block.args, given, strict=False),
        *zip(end.operands, results, strict=False),
    ]:
        if l is not None:
            assert isinstance(v.type, builtin.TensorType)
            set_type(v, dist.with_layout(v.type, l))
    update_signature(f)
    return module


def compiled(
    module: ModuleOp, passes: Sequence[str] = PIPELINE, check: bool = False, verify: bool = True
) -> ModuleOp:
    """Run the passes, in place. `check`: compare the module with that before, after each pass."""
    for name in passes:
        before = module.clone() if check else None
        PASSES[name]()().apply(Context(), module)
        if before is not None:
            module.verify()
            check_pass(before, module, name)
    if verify:
        module.verify()
    return module


def apply(module: ModuleOp, *passes: str) -> ModuleOp:
    return compiled(module, passes)


# ---- properties of a compiled program ----

COMMUNICATION: dict[type[Operation], str] = {
    kind: name for name, kind in dist.OPS.items() if kind not in dist.LOCAL
}
"""The collectives that move data, with their records' names."""


def parts(module: ModuleOp, name: str) -> tuple[list[Operation], list[Operation]]:
    """Return the ops of a function's forward and backward parts."""
    ops = list(function(module, name).body.block.ops)
    at = next((i for i, op in enumerate(ops) if isinstance(op, train.BackwardOp)), len(ops))
    return ops[:at], ops[at:]


def collectives(ops: Iterable[Operation]) -> dict[str, int]:
    """Return the number of collectives that move data, by kind."""
    return dict(Counter(COMMUNICATION[type(op)] for op in ops if type(op) in COMMUNICATION))


def names(ops: Sequence[Operation]) -> list[str]:
    return [op.name for op in ops]


def traffic(module: ModuleOp, name: str, mesh: Mesh) -> tuple[int, float]:
    """Return the number of collectives and the bytes that a device receives, by rings."""
    count, total = 0, 0.0
    for op in function(module, name).body.block.ops:
        kind = COMMUNICATION.get(type(op))
        if kind is None:
            continue
        assert isinstance(op, dist.CollectiveOp)
        n = mesh.extent(op.axes.data)
        for value, out in zip(op.values, op.outs, strict=True):
            size = size_of(out if kind == "all_gather" else value)
            total += size * (n - 1) / n * (2 if kind == "all_reduce" else 1)
        count += 1
    return count, total


# ---- arrays ----


def numbers(rng: np.random.Generator, element: str, shape: Shape, kind: str = "normal") -> Array:
    """Return a random array of a type: `normal`, `positive` (0.5 to 2), `share` (0.1 to 0.9),
    `small` (-0.5 to 0.5), `ties` (few different values), `halves` (-2.5 to 2.5), or indices:
    `below:n`, or `slices:d:m,n`, those of the fields along dimension d within slices of m and n."""
    if kind.startswith("below:"):
        values: Any = rng.integers(0, int(kind[6:]), shape)
    elif kind.startswith("slices:"):
        dim, sizes = int(kind.split(":")[1]), [int(n) for n in kind.split(":")[2].split(",")]
        starts = np.cumsum([0, *sizes])
        of_fields = np.arange(shape[dim]) * len(sizes) // shape[dim]
        low, high = (e[of_fields] for e in (starts[:-1], starts[1:]))
        values = np.moveaxis(
            rng.integers(low, high, np.moveaxis(np.empty(shape), dim, -1).shape), -1, dim
        )
    elif element == "i1":
        values = rng.integers(0, 2, shape)
    elif element in INTEGERS:
        values = rng.integers(1 if kind == "positive" else -4, 5, shape)
    elif kind == "positive":
        values = rng.uniform(0.5, 2.0, shape)
    elif kind == "halves":
        values = rng.integers(-5, 6, shape) / 2
    elif kind == "share":
        values = rng.uniform(0.1, 0.9, shape)
    elif kind == "small":
        values = rng.uniform(-0.5, 0.5, shape)
    elif kind == "ties":
        values = rng.integers(-1, 2, shape)
    else:
        values = rng.standard_normal(shape)
    return round_to_element(values, ELEMENTS[element])


def differs(found: Array, wanted: Array, element: str, factor: float = 1.0) -> str:
    """Return the difference of two arrays beyond the tolerance of the type, or ""."""
    if found.shape != wanted.shape:
        return f"shape {found.shape}, not {wanted.shape}"
    if element not in FLOATS:
        return "" if np.array_equal(found, wanted) else f"{found} is not {wanted}"
    finite = np.isfinite(wanted)
    scale = max(1.0, float(np.max(np.abs(wanted), initial=0.0, where=finite)))
    wrong = ~np.isclose(
        found, wanted, rtol=0, atol=factor * TOLERANCE[element] * scale, equal_nan=True
    )
    if not wrong.any():
        return ""
    at = tuple(int(i) for i in np.argwhere(wrong)[0])
    return f"at {list(at)}: {found[at]!r} is not {wanted[at]!r} ({wrong.sum()} of {wrong.size})"


# ---- problems ----


def torch_gradient(
    module: ModuleOp, arguments: Sequence[Array], wrt: Sequence[int], cotangents: Sequence[Array]
) -> list[Array]:
    """Return torch's results of @f and its gradients with respect to `wrt`. `cotangents` are those
    of the float results, except of scalars, whose cotangent is 1."""
    leaves = [to_torch(a) for a in arguments]
    for i in wrt:
        leaves[i].requires_grad_()
    results = torch_forward(function(module, "f"), leaves)
    given = iter(cotangents)
    total = torch.zeros((), dtype=torch.float64)
    for y in results if wrt else ():
        if y.dtype.is_floating_point:
            dy = to_torch(next(given)) if y.ndim else torch.ones((), dtype=torch.float64)
            total = total + (y * dy).sum()
    if total.requires_grad:
        found = torch.autograd.grad(total, [leaves[i] for i in wrt], allow_unused=True)
    else:
        found = [None] * len(wrt)
    gradients = [
        torch.zeros_like(leaves[i]) if d is None else d for i, d in zip(wrt, found, strict=True)
    ]
    return [t.detach().numpy() for t in (*results, *gradients)]


def tensors(types: Iterable[Attribute]) -> list[builtin.TensorType]:
    return [t for t in types if isinstance(t, builtin.TensorType)]


def elements_of(types: Iterable[Attribute]) -> list[str]:
    """Return the names of the element types of tensor types."""
    return [str(t.element_type) for t in tensors(types)]


@dataclass
class Problem:
    """A program @f with arguments and, for its gradient @g, random cotangents; and torch's results
    of both."""

    module: ModuleOp
    wrt: tuple[int, ...]
    arguments: list[Array]
    wanted: list[Array]
    elements: list[str]

    @property
    def name(self) -> str:
        return "g" if self.wrt else "f"

    def errors(self, module: ModuleOp, factor: float = 1.0) -> str:
        """Return the difference of the results of a compiled form from torch's, or "".

        Before differentiation the results are those of @f alone."""
        name = self.name if self.name in defined(module) else "f"
        inputs = function(module, name).function_type.inputs.data
        found = run(module, name, self.arguments[: len(inputs)])
        for i, (x, y, e) in enumerate(
            zip(found, self.wanted, self.elements, strict=name == self.name)
        ):
            if message := differs(x, y, e, factor):
                return f"result {i} {message}"
        return ""


def problem(
    args: Sequence[Arg],
    body: Body,
    wrt: Sequence[int] = (),
    kinds: Sequence[str] = (),
    seed: int = 0,
) -> Problem:
    """Return a program with random arguments, of the `kinds` of `numbers`."""
    rng = np.random.default_rng(seed)
    module = program(args, body, wrt if wrt else None)
    kinds = [*kinds, *["normal"] * (len(args) - len(kinds))]
    arguments = [numbers(rng, a.element, a.shape, k) for a, k in zip(args, kinds, strict=True)]
    return posed(module, wrt, arguments, rng)


def posed(
    module: ModuleOp, wrt: Sequence[int], arguments: list[Array], rng: np.random.Generator
) -> Problem:
    """Return a program with these arguments and random cotangents."""
    outs = tensors(function(module, "f").function_type.outputs)
    elements = elements_of(outs)
    cotangents = []
    if wrt:
        cotangents = [
            numbers(rng, e, t.get_shape())
            for e, t in zip(elements, outs, strict=True)
            if e in FLOATS and t.get_shape()
        ]
    wanted = torch_gradient(module, arguments, wrt, cotangents)
    inputs = elements_of(function(module, "f").function_type.inputs.data)
    return Problem(
        module, tuple(wrt), [*arguments, *cotangents], wanted,
        [*elements, *(inputs[i] for i in wrt)],
    )  # fmt: skip
