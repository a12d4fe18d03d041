"""Programs of tests: their construction from ops, their layouts, their passes.

A program is built once as a single-device module without layouts; `laid_out` adds a mesh and
layouts of arguments, `compiled` runs passes.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from xdsl.context import Context
from xdsl.dialects import builtin
from xdsl.dialects.builtin import FunctionType, ModuleOp, StringAttr, SymbolRefAttr
from xdsl.dialects.func import FuncOp, ReturnOp
from xdsl.ir import Attribute, Block, Region, SSAValue

from shardir.algebra.layout import Layout, Shape
from shardir.algebra.mesh import Axes, Axis, Mesh
from shardir.algebra.notation import mesh_of, parse_layout
from shardir.compat.xdsl import set_type
from shardir.dialects import dist, train
from shardir.dialects.nn.properties import dims_attr
from shardir.dialects.nn.types import unsharded_type
from shardir.interpret import check_pass
from shardir.passes import PASSES
from shardir.rewriting.functions import update_signature
from shardir.rewriting.rewriter import Rewriter

ELEMENTS: dict[str, Any] = {
    name: getattr(builtin, name) for name in ("f32", "f64", "bf16", "f16", "i32", "i64", "i1")
}
FLOATS = ("f64", "f32", "bf16", "f16")
INTEGERS = ("i32", "i64")

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


BuildBody = Callable[..., SSAValue | Sequence[SSAValue]]


def program(args: Sequence[Arg], body: BuildBody, wrt: Sequence[int] | None = None) -> ModuleOp:
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


# ---- types ----


def shape_of(v: SSAValue) -> Shape:
    """Return the shape of a value."""
    return unsharded_type(v).get_shape()


def tensors(types: Iterable[Attribute]) -> list[builtin.TensorType]:
    """Return the tensor types among these."""
    return [t for t in types if isinstance(t, builtin.TensorType)]


def elements_of(types: Iterable[Attribute]) -> list[str]:
    """Return the names of the element types of tensor types."""
    return [str(t.element_type) for t in tensors(types)]
