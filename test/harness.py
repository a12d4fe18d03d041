"""What the tests build programs with, run them by, and hold their results against.

A program is built once as a plain single-device module; `laid_out` gives its arguments layouts on
a mesh, `compiled` takes it through the passes, `run` is the interpreters'. The independent answer
is torch on one device, op by op from the table TORCH, in double precision.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch.nn import functional
from xdsl.context import Context
from xdsl.dialects import builtin
from xdsl.dialects.builtin import FunctionType, ModuleOp, StringAttr, SymbolRefAttr
from xdsl.dialects.func import FuncOp, ReturnOp
from xdsl.ir import Attribute, Block, Operation, Region, SSAValue

from shardir.algebra.layout import Layout, Shape
from shardir.algebra.mesh import Axes, Axis, Mesh
from shardir.algebra.notation import mesh_of, parse_layout
from shardir.backend import runtime_random
from shardir.cost.seconds import size_of
from shardir.dialects import dist, nn, train
from shardir.dialects.builder import Builder
from shardir.dialects.nn.base import dims_attr, plain
from shardir.interpret import check_pass, run
from shardir.interpret.values import rounded
from shardir.passes import PASSES
from shardir.passes.functions import set_type, update_signature

Array = np.ndarray[Any, Any]

ELEMENTS: dict[str, Any] = {
    name: getattr(builtin, name) for name in ("f32", "f64", "bf16", "f16", "i32", "i64", "i1")
}
FLOATS = ("f64", "f32", "bf16", "f16")
INTEGERS = ("i32", "i64")
TOLERANCE = {"f64": 1e-12, "f32": 1e-5, "bf16": 2.0**-4, "f16": 2.0**-7}
"""Of the greatest element, or of 1: a few roundings of numbers that are up to 8 on the way."""

MESH = mesh_of("m", "a = 2, b = 2")
PIPELINE = (
    "propagate-strategies", "insert-redistributions", "distributed-autodiff", "recompute",
    "lower-to-spmd", "simplify-communication", "fuse-communication",
)  # fmt: skip

# ---- layouts ----


def layout(text: str, mesh: Mesh = MESH) -> Layout:
    """A layout from the text after the mesh's name."""
    return parse_layout(f"@{mesh.name}, {text}")


@cache
def layouts(rank: int, mesh: Mesh = MESH) -> tuple[Layout, ...]:
    """Every layout of whole axes: each dimension over any axes in any order, none used twice."""

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
    """() , (a), (b), (a, b), (b, a) of (a, b)."""
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
    """A plain module: @f, built by `body(builder, *arguments)`, and a request for its gradient @g
    with respect to the arguments `wrt` (None: no request)."""
    types = [dist.tensor(ELEMENTS[a.element], a.shape) for a in args]
    block = Block(arg_types=types)
    for i, v in enumerate(block.args):
        v.name_hint = args[i].parameter or f"x{i}"
    results = body(Builder(None, block.add_op), *block.args)
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
    """A plain module: @f of this block, which is to return `results`, and a request for @g."""
    block.add_op(ReturnOp(*results))
    signature = FunctionType.from_lists(block.arg_types, [r.type for r in results])
    module = ModuleOp([FuncOp("f", signature, Region(block))])
    if wrt is not None:
        module.body.block.add_op(train.GradientOp.create(properties={
            "sym_name": StringAttr("g"), "function": SymbolRefAttr("f"), "wrt": dims_attr(*wrt),
        }))  # fmt: skip
    return module


def add_step(module: ModuleOp, optimizer: str) -> ModuleOp:
    """The module with a request for a training step @step of @f."""
    module.body.block.add_op(train.StepOp.create(properties={
        "sym_name": StringAttr("step"), "function": SymbolRefAttr("f"),
        "optimizer": train.OptimizerAttr.read(optimizer),
    }))  # fmt: skip
    return module


def function(module: ModuleOp, name: str) -> FuncOp:
    return next(op for op in module.body.ops if isinstance(op, FuncOp) and op.sym_name.data == name)


def defined(module: ModuleOp) -> set[str]:
    """The names of the functions that there are."""
    return {op.sym_name.data for op in module.body.ops if isinstance(op, FuncOp)}


def laid_out(
    module: ModuleOp,
    mesh: Mesh,
    given: Sequence[Layout | None],
    results: Sequence[Layout | None] = (),
) -> ModuleOp:
    """A copy of the module with a mesh, and layouts on the arguments of @f and its results."""
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
    """The module after the passes (in place). `check`: compare its meaning after each of them."""
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


# ---- what was made of a program ----

COMMUNICATION: dict[type[Operation], str] = {
    dist.AllReduceOp: "all_reduce", dist.AllGatherOp: "all_gather",
    dist.ReduceScatterOp: "reduce_scatter", dist.AllToAllOp: "all_to_all",
    dist.BroadcastOp: "broadcast", dist.PermuteOp: "permute",
    dist.GatherOp: "gather", dist.ScatterOp: "scatter",
    dist.UnfoldOp: "unfold", dist.FoldOp: "fold",
}  # fmt: skip


def parts(module: ModuleOp, name: str) -> tuple[list[Operation], list[Operation]]:
    """The ops of a function's forward and backward parts."""
    ops = list(function(module, name).body.block.ops)
    at = next((i for i, op in enumerate(ops) if isinstance(op, train.BackwardOp)), len(ops))
    return ops[:at], ops[at:]


def collectives(ops: Iterable[Operation]) -> dict[str, int]:
    """How many collectives of each kind move data."""
    return dict(Counter(COMMUNICATION[type(op)] for op in ops if type(op) in COMMUNICATION))


def names(ops: Sequence[Operation]) -> list[str]:
    return [op.name for op in ops]


def traffic(module: ModuleOp, name: str, mesh: Mesh) -> tuple[int, float]:
    """The collectives of a function and the bytes that a device receives, by ring algorithms."""
    count, total = 0, 0.0
    for op in function(module, name).body.block.ops:
        kind = COMMUNICATION.get(type(op))
        if kind is None:
            continue
        assert isinstance(op, dist.Collective)
        n = mesh.extent(op.axes.data)
        for value, out in zip(op.values, op.outs, strict=True):
            size = size_of(out if kind == "all_gather" else value)
            total += size * (n - 1) / n * (2 if kind == "all_reduce" else 1)
        count += 1
    return count, total


# ---- numbers ----


def numbers(rng: np.random.Generator, element: str, shape: Shape, kind: str = "normal") -> Array:
    """Random numbers of a type: `normal`, `positive` (0.5 to 2), `share` (0.1 to 0.9), `ties` (few
    different ones), `halves` (-2.5 to 2.5), or `below:n`, indices."""
    if kind.startswith("below:"):
        values: Any = rng.integers(0, int(kind[6:]), shape)
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
    elif kind == "ties":
        values = rng.integers(-1, 2, shape)
    else:
        values = rng.standard_normal(shape)
    return rounded(values, ELEMENTS[element])


def differs(found: Array, wanted: Array, element: str, factor: float = 1.0) -> str:
    """What is different in two arrays beyond the precision of the type; empty when nothing is."""
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


# ---- torch, the independent answer ----

Reference = Callable[..., Any]


def to_torch(array: Array) -> torch.Tensor:
    """The array in double precision."""
    return torch.tensor(array.astype(np.float64) if array.dtype.kind == "f" else array)


def by_autograd(f: Reference, inputs: Sequence[torch.Tensor], dy: torch.Tensor) -> Any:
    """The cotangents of the inputs."""
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in inputs]
        return torch.autograd.grad(f(*leaves), leaves, dy)


def _reduce(op: nn.ReduceOp, x: torch.Tensor) -> torch.Tensor:
    dims, keep = op.dims.data, op.keep is not None
    match op.kind.data:
        case "sum":
            return x.sum(dims, keepdim=keep, dtype=x.dtype) if dims else x
        case "mean":
            return x.mean(dims, keepdim=keep) if dims else x
        case "prod":
            for d in sorted((d % x.ndim for d in dims), reverse=True):
                x = x.prod(d, keepdim=keep, dtype=x.dtype)
            return x
        case "any":
            return x.any(dims, keepdim=keep) if dims else x
        case "all":
            return x.all(dims, keepdim=keep) if dims else x
        case "max":
            return x.amax(dims, keepdim=keep) if dims else x
        case _:
            return x.amin(dims, keepdim=keep) if dims else x


def _gather(op: nn.GatherOp, table: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    axis = op.axis.value.data % table.ndim
    rows = table.index_select(axis, ids.flatten().long())
    if op.padding is not None:
        held = (ids.flatten() == op.padding.value.data).reshape(-1, *[1] * (table.ndim - axis - 1))
        rows = torch.where(held, rows.detach(), rows)
    return rows.reshape(*table.shape[:axis], *ids.shape, *table.shape[axis + 1 :])


def _pad(op: nn.PadOp, x: torch.Tensor) -> torch.Tensor:
    sides = [n for pair in zip(op.low.data, op.high.data, strict=True) for n in reversed(pair)]
    value = op.value.value.data if op.value is not None else 0
    return functional.pad(x, sides[::-1], value=value)


def _gather_grad(op: nn.GatherGradOp, ids: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
    shape = shape_of(op.out)
    axis = op.axis.value.data % len(shape)
    rows = dy.reshape(*shape[:axis], -1, *shape[axis + 1 :])
    return torch.zeros(shape, dtype=dy.dtype).index_add(axis, ids.flatten().long(), rows)


def _one_hot(op: nn.OneHotOp, ids: torch.Tensor) -> torch.Tensor:
    hot = functional.one_hot(ids.long(), shape_of(op.out)[-1])
    return hot.to(_dtype(op.out))


def _broadcast(op: nn.BroadcastOp, x: torch.Tensor) -> torch.Tensor:
    shape, dims = shape_of(op.out), [d % len(shape_of(op.out)) for d in op.dims.data]
    for d in sorted(set(range(len(shape))) - set(dims)):
        x, dims = x.unsqueeze(-1), [*dims, d]
    return x.permute([dims.index(d) for d in range(len(shape))]).expand(shape)


def _dtype(v: SSAValue) -> torch.dtype:
    """What torch calculates with: an integer type, or double precision."""
    element = plain(v).element_type
    if isinstance(element, builtin.IntegerType):
        return {1: torch.bool, 32: torch.int32, 64: torch.int64}[element.width.data]
    return torch.float64


def _convert(op: nn.ConvertOp, x: torch.Tensor) -> torch.Tensor:
    return x.to(_dtype(op.out))


def _constant(op: nn.ConstantOp) -> torch.Tensor:
    values, element = np.array(list(op.value.get_values())), plain(op.out).element_type
    if isinstance(element, builtin.IntegerType):
        values = values.astype({1: bool, 32: np.int32, 64: np.int64}[element.width.data])
    shape = shape_of(op.out)
    return to_torch(np.full(shape, values[0]) if values.size == 1 else values.reshape(shape))


def _iota(op: nn.IotaOp) -> torch.Tensor:
    shape = shape_of(op.out)
    dim = op.dim.value.data % len(shape)
    column = torch.arange(shape[dim]).reshape([-1 if d == dim else 1 for d in range(len(shape))])
    return column.expand(shape).to(_dtype(op.out))


def _cumsum(op: nn.CumsumOp, x: torch.Tensor) -> torch.Tensor:
    axis = op.axis.value.data
    if op.reverse is None:
        return x.cumsum(axis, dtype=x.dtype)
    return x.flip(axis).cumsum(axis, dtype=x.dtype).flip(axis)


def _sort(op: Any, x: torch.Tensor, descending: bool) -> tuple[torch.Tensor, torch.Tensor]:
    values, indices = x.sort(dim=op.axis.value.data, descending=descending, stable=True)
    return values, indices


def _layer_norm(op: Any, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return functional.layer_norm(x, w.shape, w, b, op.eps.value.data)


def _layer_norm_grad(op: Any, x: torch.Tensor, w: torch.Tensor, dy: torch.Tensor) -> Any:
    return by_autograd(lambda x, w, b: _layer_norm(op, x, w, b), [x, w, torch.zeros_like(w)], dy)


def _cross_entropy(op: Any, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    how = op.reduction.data if type(op) is nn.CrossEntropyLossOp else "none"
    ignore, share = op.options()
    options: Any = {} if ignore is None else {"ignore_index": ignore}
    out = functional.cross_entropy(
        x.reshape(-1, x.shape[-1]), labels.flatten().long(), label_smoothing=share, reduction=how,
        **options,
    )  # fmt: skip
    return out.reshape(labels.shape) if how == "none" else out


def _nll(op: nn.NllLossOp, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    how = op.reduction.data
    options: Any = {} if op.ignore is None else {"ignore_index": op.ignore.value.data}
    rows = x.reshape(-1, x.shape[-1])
    out = functional.nll_loss(rows, labels.flatten().long(), reduction=how, **options)
    return out.reshape(labels.shape) if how == "none" else out


def _loss(call: Callable[..., torch.Tensor], *options: str) -> Reference:
    """A loss of torch's, with the numbers of these properties."""

    def reference(op: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        numbers = {n: getattr(op, n).value.data for n in options}
        return call(x, y, reduction=op.reduction.data, **numbers)

    return reference


def _soft_margin(op: nn.SoftMarginLossOp, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """torch's own is not differentiable in y."""
    return _reduced(op, torch.log1p(torch.exp(-x * y)))


def _kl_div(op: nn.KlDivLossOp, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    log = op.log_target is not None
    return _reduced(op, functional.kl_div(x, y, reduction="none", log_target=log))


def _reduced(op: nn.Loss, losses: torch.Tensor) -> torch.Tensor:
    how = op.reduction.data
    return losses if how == "none" else losses.mean() if how == "mean" else losses.sum()


def _attention(
    op: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None
) -> torch.Tensor:
    """By its formula: torch's own call takes no mask beside `is_causal`."""
    if q.ndim > 2 and q.shape[-3] != k.shape[-3]:
        k, v = (x.repeat_interleave(q.shape[-3] // k.shape[-3], -3) for x in (k, v))
    scale = q.shape[-1] ** -0.5 if op.scale is None else op.scale.value.data
    scores = q @ k.mT * scale
    if op.causal is not None:
        scores = scores.masked_fill(torch.ones_like(scores).tril() == 0, -torch.inf)
    if mask is not None:
        boolean = mask.dtype == torch.bool
        scores = scores.masked_fill(~mask, -torch.inf) if boolean else scores + mask
    nothing = scores.isneginf().all(-1, keepdim=True)
    return scores.masked_fill(nothing, 0.0).softmax(-1).masked_fill(nothing, 0.0) @ v


def _attention_grad(op: Any, *given: torch.Tensor) -> Any:
    return by_autograd(lambda *x: _attention(op, *x, *given[4:]), given[:3], given[3])


def _turns(op: Any, positions: torch.Tensor, d: int) -> torch.Tensor:
    """e^(i angle) of each pair, [.., d / 2], in the precision of the interpreter's angles."""
    t = op.out.type.element_type
    dtype = torch.float64 if t == builtin.f64 else torch.float32
    frequencies = op.base.value.data ** (-torch.arange(0, d, 2, dtype=torch.float64) / d)
    angles = positions[..., None].to(dtype) * frequencies.to(dtype)
    return torch.polar(torch.ones_like(angles).double(), angles.double())


def _rotary(op: nn.RotaryOp, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """By multiplication with complex numbers."""
    turns, halves = _turns(op, positions, x.shape[-1]), op.pairing.data == "halves"
    pairs = x.unflatten(-1, (2, -1)).mT if halves else x.unflatten(-1, (-1, 2))
    turned = torch.view_as_complex(pairs.contiguous()) * (turns.conj() if op.reverse else turns)
    out = torch.view_as_real(turned)
    return (out.mT if halves else out).flatten(-2)


def _custom(op: nn.CustomOp, x: torch.Tensor, *more: torch.Tensor) -> torch.Tensor:
    """What op_cases/custom.py registers."""
    given = op.options.data["by"] if op.options is not None else None
    by = given.value.data if isinstance(given, builtin.IntegerAttr) else 1
    match op.callee.data:
        case "test.mirror":
            return x[:, torch.arange(x.shape[1] - 1, -1, -1)] * by
        case "test.mirror_grad":
            return more[1][:, torch.arange(x.shape[1] - 1, -1, -1)] * by
        case "test.square":
            return x**2
        case name:
            assert name == "test.square_grad"
            return more[1] * (x + x)


def _sinusoid(op: nn.SinusoidOp, positions: torch.Tensor) -> torch.Tensor:
    turns = _turns(op, positions, shape_of(op.out)[-1])
    return torch.stack([turns.imag, turns.real], -2 if op.pairing.data == "halves" else -1).flatten(
        -2
    )


def _drawn(
    op: Any, kind: str, params: Any, shape: Shape, key: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """By torch's twin of the generator, whole."""
    seed = runtime_random.seed_at(key, op.stream.value.data)
    return runtime_random.fill(kind, params, shape, [(0, n) for n in shape], seed, dtype)


def _random(op: nn.RandomOp, key: torch.Tensor) -> torch.Tensor:
    how = op.distribution
    return _drawn(op, how.kind, how.values, shape_of(op.out), key, _dtype(op.out))


def _dropout(op: nn.DropoutOp, x: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    p = op.p.value.data
    dropped = _drawn(op, "bernoulli", {"p": p}, shape_of(op.out), key, torch.bool)
    return torch.where(dropped, 0.0, x / (1 - p if p < 1 else 1))


def _unfold(op: nn.UnfoldOp, x: torch.Tensor) -> torch.Tensor:
    rows, windows = shape_of(op.x)[op.at], op.windows()
    fill = 0 if op.least is None else (
        -torch.inf if x.dtype.is_floating_point else torch.iinfo(_dtype(op.x)).min
    )  # fmt: skip
    parts = []
    for p in range(windows.count):
        for r in range(windows.size):
            row = p * windows.step + windows.offset + r
            inside = 0 <= row < rows
            parts.append(x.select(op.at, row) if inside else x.new_full(
                (*x.shape[: op.at], *x.shape[op.at + 1 :]), fill
            ))  # fmt: skip
    shape = shape_of(op.out)
    if not parts:
        return x.new_zeros(shape)
    return torch.stack(parts, op.at).reshape(shape)


def _fold(op: nn.FoldOp, x: torch.Tensor) -> torch.Tensor:
    windows, shape = op.windows(), shape_of(op.out)
    out = [torch.zeros((*shape[: op.at], *shape[op.at + 1 :]), dtype=x.dtype)] * windows.rows
    for p in range(windows.count):
        for r in range(windows.size):
            row = p * windows.step + windows.offset + r
            if 0 <= row < windows.rows:
                out[row] = out[row] + x.select(op.at, p).select(op.at, r)
    return torch.stack(out, op.at) if out else x.new_zeros(shape)


def _conv(op: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    found = op.slides()
    padded = functional.pad(x, [n for s in reversed(found) for n in (s.low, s.high)])
    if not (x.numel() and w.numel()):
        return x.sum() + w.sum() + x.new_zeros(shape_of(op.ends(op.operands, op.results)[2]))
    call = getattr(functional, f"conv{len(found)}d")
    stride, dilation = [s.stride for s in found], [s.dilation for s in found]
    return call(padded, w, None, stride, 0, dilation, padded.shape[1] // w.shape[1])


def _conv_transpose(op: Any, y: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    x = torch.zeros(shape_of(op.out), dtype=y.dtype, requires_grad=True)
    with torch.enable_grad():
        return torch.autograd.grad(_conv(op, x, w), [x], y, create_graph=True)[0]


def _conv_weight(op: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    w = torch.zeros(shape_of(op.out), dtype=y.dtype, requires_grad=True)
    with torch.enable_grad():
        return torch.autograd.grad(_conv(op, x, w), [w], y, create_graph=True)[0]


def _batch_norm(op: Any, x: torch.Tensor, w: Any, b: Any, mean: Any, var: Any) -> Any:
    out = functional.batch_norm(x, None, None, w, b, True, 0.0, op.eps.value.data)
    dims, m = [d for d in range(x.ndim) if d != 1], op.momentum.value.data
    new_mean = (1 - m) * mean + m * x.mean(dims)
    return out, new_mean, (1 - m) * var + m * x.var(dims, correction=1)


def _batch_norm_inference(op: Any, x: torch.Tensor, *channels: torch.Tensor) -> torch.Tensor:
    """torch's own has no gradient for the statistics."""
    w, b, mean, var = (c.reshape(-1, *[1] * (x.ndim - 2)) for c in channels)
    out = (x - mean) / (var + op.eps.value.data).sqrt() * w + b
    w, b, mean, var = (c.detach() for c in channels)
    assert torch.allclose(
        out, functional.batch_norm(x.detach(), mean, var, w, b, eps=op.eps.value.data)
    )
    return out


def _max_pool(op: Any, x: torch.Tensor) -> torch.Tensor:
    found = op.slides()
    padded = functional.pad(
        x, [n for s in reversed(found) for n in (s.low, s.high)], value=-torch.inf
    )
    call = getattr(functional, f"max_pool{len(found)}d")
    return call(padded, [s.kernel for s in found], [s.stride for s in found])


def _max_pool_grad(op: Any, x: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
    leaf = x.detach().requires_grad_()
    with torch.enable_grad():
        y = _max_pool(op, leaf)
    return torch.autograd.grad(y, leaf, dy)[0]


def _avg_pool(op: Any, x: torch.Tensor) -> torch.Tensor:
    found, more = op.slides(), {"count_include_pad": op.exclude is None}
    call = getattr(functional, f"avg_pool{len(found)}d")
    assert all(s.low == s.high for s in found)
    return call(x, *([getattr(s, n) for s in found] for n in ("kernel", "stride", "low")), **more)


def _adaptive_avg_pool(op: Any, x: torch.Tensor) -> torch.Tensor:
    return getattr(functional, f"adaptive_avg_pool{x.ndim - 2}d")(x, op.size.data)


def _given(op: Any, *names: str) -> list[float]:
    return [getattr(op, n).value.data for n in names]


def _by_torch(op: Any, w: torch.Tensor, g: torch.Tensor, lr: torch.Tensor, **more: Any) -> Any:
    """One step of torch.optim.SGD."""
    w = torch.nn.Parameter(w.clone())
    w.grad = g
    velocity = more.pop("velocity", None)
    optimizer = torch.optim.SGD([w], lr.item(), weight_decay=op.weight_decay.value.data, **more)
    if velocity is None:
        optimizer.step()
        return w.detach()
    optimizer.state[w]["momentum_buffer"] = velocity.clone()
    optimizer.step()
    return w.detach(), optimizer.state[w]["momentum_buffer"]


def _momentum(op: Any, w: Any, g: Any, v: Any, lr: Any) -> Any:
    nesterov = isinstance(op, train.NesterovOp)
    (momentum,) = _given(op, "momentum")
    return _by_torch(op, w, g, lr, velocity=v, momentum=momentum, nesterov=nesterov)


def _lars(op: Any, w: Any, g: Any, v: Any, lr: Any) -> Any:
    momentum, decay = _given(op, "momentum", "weight_decay")
    v = momentum * v + lr * (g + decay * w)
    return w - v, v


def _adam(op: Any, w: Any, g: Any, m: Any, v: Any, c1: Any, c2: Any, lr: Any = 0.0) -> Any:
    beta1, beta2, eps, decay = _given(op, "beta1", "beta2", "eps", "weight_decay")
    g = g + decay * w if isinstance(op, train.AdamOp) else g
    m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g**2
    direction = (m / c1) / ((v / c2).sqrt() + eps)
    match op:
        case train.AdamOp():
            return w - lr * direction, m, v
        case train.AdamWOp():
            return w - lr * (direction + decay * w), m, v
        case _:
            return direction + decay * w, m, v


def _learning_rate(op: train.LearningRateOp, done: torch.Tensor) -> torch.Tensor:
    """By torch's schedulers, stepped so often."""
    from torch.optim import lr_scheduler

    n, kind = op.schedule.values, op.schedule.kind
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(()))], lr=n["rate"])
    warmup, end = n["warmup"], n.get("end", 0.0)
    left = n.get("steps", 1) - warmup
    after: Any = {
        "constant": lambda: lr_scheduler.ConstantLR(optimizer, 1.0),
        "cosine": lambda: lr_scheduler.CosineAnnealingLR(optimizer, left, end),
        "polynomial": lambda: lr_scheduler.LambdaLR(  # torch's own ends at 0
            optimizer,
            lambda t: (
                (end + (n["rate"] - end) * (1 - min(t, left) / left) ** n["power"]) / n["rate"]
            ),
        ),
        "step": lambda: lr_scheduler.StepLR(optimizer, n["every"], n["factor"]),
        "inverse_sqrt": lambda: lr_scheduler.LambdaLR(
            optimizer, lambda t: (max(1, warmup) / (t + 1 + warmup)) ** 0.5
        ),
    }[kind]()
    steps = min(done.item(), warmup + left) if kind == "cosine" else done.item()
    if steps < warmup:
        return torch.tensor(n["rate"] * (steps + 1) / warmup, dtype=torch.float64)
    for _ in range(int(steps) - warmup):
        optimizer.step()
        after.step()
    return torch.tensor(optimizer.param_groups[0]["lr"], dtype=torch.float64)


def _trust_ratio(op: Any, w: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    coefficient, decay = _given(op, "coefficient", "weight_decay")
    if w == 0 or u == 0:
        return torch.ones((), dtype=torch.float64)
    return coefficient * w.sqrt() / (u.sqrt() + decay * w.sqrt())


def _next_loss_scale(op: Any, scale: Any, good: Any, finite: Any) -> Any:
    """What torch.amp.GradScaler's update calls."""
    growth, backoff = _given(op, "growth", "backoff")
    scale, tracker = scale.float(), good.int()
    found = (~finite).float()
    amp: Any = torch
    amp._amp_update_scale_(scale, tracker, found, growth, backoff, op.interval.value.data)
    return scale.double(), tracker.long()


def shape_of(v: SSAValue) -> Shape:
    return plain(v).get_shape()


aten = torch.ops.aten

COMPARE = {
    "eq": torch.eq, "ne": torch.ne, "lt": torch.lt, "le": torch.le, "gt": torch.gt, "ge": torch.ge,
}  # fmt: skip

TORCH: dict[type[Operation], Reference] = {
    nn.AddOp: lambda op, x, y: x + y,
    nn.SubOp: lambda op, x, y: x - y,
    nn.MulOp: lambda op, x, y: x * y,
    nn.DivOp: lambda op, x, y: x / y,
    nn.RemainderOp: lambda op, x, y: torch.remainder(x, y),
    nn.PowOp: lambda op, x, y: torch.pow(x, y),
    nn.LerpOp: lambda op, x, y, weight: torch.lerp(x, y, weight),
    nn.MaxOp: lambda op, x, y: torch.maximum(x, y),
    nn.MinOp: lambda op, x, y: torch.minimum(x, y),
    nn.NegOp: lambda op, x: -x,
    nn.AbsOp: lambda op, x: x.abs(),
    nn.SignOp: lambda op, x: x.sign(),
    nn.ReciprocalOp: lambda op, x: x.reciprocal(),
    nn.SquareOp: lambda op, x: x.square(),
    nn.SqrtOp: lambda op, x: x.sqrt(),
    nn.RsqrtOp: lambda op, x: x.rsqrt(),
    nn.ExpOp: lambda op, x: x.exp(),
    nn.Exp2Op: lambda op, x: x.exp2(),
    nn.Expm1Op: lambda op, x: x.expm1(),
    nn.LogOp: lambda op, x: x.log(),
    nn.Log2Op: lambda op, x: x.log2(),
    nn.Log1pOp: lambda op, x: x.log1p(),
    nn.SinOp: lambda op, x: x.sin(),
    nn.CosOp: lambda op, x: x.cos(),
    nn.TanOp: lambda op, x: x.tan(),
    nn.AtanOp: lambda op, x: x.atan(),
    nn.ErfOp: lambda op, x: x.erf(),
    nn.FloorOp: lambda op, x: x.floor(),
    nn.CeilOp: lambda op, x: x.ceil(),
    nn.RoundOp: lambda op, x: x.round(),
    nn.TruncOp: lambda op, x: x.trunc(),
    nn.ClampOp: lambda op, x: x.clamp(*(p and p.value.data for p in (op.min, op.max))),
    nn.NanToNumOp: lambda op, x: x.nan_to_num(
        op.nan.value.data, op.posinf.value.data, op.neginf.value.data
    ),
    nn.TrilOp: lambda op, x: x.tril(op.diagonal.value.data),
    nn.TriuOp: lambda op, x: x.triu(op.diagonal.value.data),
    nn.AndOp: lambda op, x, y: x & y,
    nn.OrOp: lambda op, x, y: x | y,
    nn.XorOp: lambda op, x, y: x ^ y,
    nn.NotOp: lambda op, x: ~x,
    nn.IsnanOp: lambda op, x: x.isnan(),
    nn.IsinfOp: lambda op, x: x.isinf(),
    nn.IsfiniteOp: lambda op, x: x.isfinite(),
    nn.ReluOp: lambda op, x: x.relu(),
    nn.ReluGradOp: lambda op, x, dy: aten.threshold_backward(dy, x, 0),
    nn.TanhOp: lambda op, x: x.tanh(),
    nn.TanhGradOp: lambda op, y, dy: aten.tanh_backward(dy, y),
    nn.SigmoidOp: lambda op, x: x.sigmoid(),
    nn.SigmoidGradOp: lambda op, y, dy: aten.sigmoid_backward(dy, y),
    nn.SiluOp: lambda op, x: functional.silu(x),
    nn.SiluGradOp: lambda op, x, dy: aten.silu_backward(dy, x),
    nn.GeluOp: lambda op, x: functional.gelu(x, approximate="none" if op.exact else "tanh"),
    nn.GeluGradOp: lambda op, x, dy: aten.gelu_backward(
        dy, x, approximate="none" if op.exact else "tanh"
    ),
    nn.SoftplusOp: lambda op, x: functional.softplus(x),
    nn.LeakyReluOp: lambda op, x: functional.leaky_relu(x, op.slope.value.data),
    nn.EluOp: lambda op, x: functional.elu(x, op.alpha.value.data),
    nn.HardtanhOp: lambda op, x: functional.hardtanh(x, op.min.value.data, op.max.value.data),
    nn.CompareOp: lambda op, x, y: COMPARE[op.how.data](x, y),
    nn.SelectOp: lambda op, c, x, y: torch.where(c, x, y),
    nn.ConvertOp: _convert,
    nn.StopGradientOp: lambda op, x: x.detach(),
    nn.EinsumOp: lambda op, x, y: torch.einsum(op.equation.data, x, y),
    nn.MatmulOp: lambda op, x, y: x @ y,
    nn.ReduceOp: _reduce,
    nn.LogsumexpOp: lambda op, x: x.logsumexp(op.dims.data, keepdim=op.keep is not None),
    nn.VarOp: lambda op, x: x.var(
        op.dims.data, correction=op.correction.value.data, keepdim=op.keep is not None
    ),
    nn.StdOp: lambda op, x: x.std(
        op.dims.data, correction=op.correction.value.data, keepdim=op.keep is not None
    ),
    nn.ArgmaxOp: lambda op, x: x.argmax(op.axis.value.data, keepdim=op.keep is not None),
    nn.ArgminOp: lambda op, x: x.argmin(op.axis.value.data, keepdim=op.keep is not None),
    nn.ReshapeOp: lambda op, x: x.reshape(shape_of(op.out)),
    nn.TransposeOp: lambda op, x: x.permute(op.perm.data),
    nn.BroadcastOp: _broadcast,
    nn.SliceOp: lambda op, x: x[
        tuple(
            slice(*bounds)
            for bounds in zip(op.starts.data, op.limits.data, op.strides.data, strict=True)
        )
    ],
    nn.PadOp: _pad,
    nn.FlipOp: lambda op, x: x.flip(op.dims.data),
    nn.RollOp: lambda op, x: x.roll(op.shifts.data, tuple(range(x.ndim))),
    nn.TileOp: lambda op, x: x.tile(op.repeats.data),
    nn.RepeatInterleaveOp: lambda op, x: x.repeat_interleave(
        op.repeats.value.data, op.axis.value.data
    ),
    nn.ConcatOp: lambda op, *xs: torch.cat(xs, op.axis.value.data),
    nn.StackOp: lambda op, *xs: torch.stack(xs, op.axis.value.data),
    nn.SplitOp: lambda op, x: x.split(op.sizes.data, op.axis.value.data),
    nn.GatherOp: _gather,
    nn.GatherGradOp: _gather_grad,
    nn.PickOp: lambda op, x, ids: x.gather(-1, ids.long()[..., None])[..., 0],
    nn.PickGradOp: lambda op, ids, dy: torch.zeros(shape_of(op.out), dtype=dy.dtype).scatter(
        -1, ids.long()[..., None], dy[..., None]
    ),
    nn.TakeAlongAxisOp: lambda op, x, ids: x.gather(op.axis.value.data, ids.long()),
    nn.ScatterAddOp: lambda op, ids, src: torch.zeros(
        shape_of(op.out), dtype=src.dtype
    ).scatter_add(op.axis.value.data, ids.long(), src),
    nn.OneHotOp: _one_hot,
    nn.CumsumOp: _cumsum,
    nn.SortOp: lambda op, x: _sort(op, x, op.descending is not None),
    nn.ArgsortOp: lambda op, x: _sort(op, x, op.descending is not None)[1],
    nn.TopkOp: lambda op, x: tuple(
        v.narrow(op.axis.value.data, 0, op.k.value.data) for v in _sort(op, x, op.smallest is None)
    ),
    nn.SoftmaxOp: lambda op, x: x.softmax(op.axis.value.data),
    nn.SoftmaxGradOp: lambda op, y, dy: aten._softmax_backward_data(
        dy, y, op.axis.value.data, y.dtype
    ),
    nn.LogSoftmaxOp: lambda op, x: x.log_softmax(op.axis.value.data),
    nn.LogSoftmaxGradOp: lambda op, y, dy: aten._log_softmax_backward_data(
        dy, y, op.axis.value.data, y.dtype
    ),
    nn.CrossEntropyOp: _cross_entropy,
    nn.CrossEntropyGradOp: lambda op, x, labels, dy: by_autograd(
        lambda x: _cross_entropy(op, x, labels), [x], dy
    )[0],
    nn.BinaryCrossEntropyOp: lambda op, x, y: functional.binary_cross_entropy(
        x, y.expand_as(x), reduction="none"
    ),
    nn.BinaryCrossEntropyWithLogitsOp: lambda op, x, y: functional.binary_cross_entropy_with_logits(
        x, y.expand_as(x), reduction="none"
    ),
    nn.CrossEntropyLossOp: _cross_entropy,
    nn.NllLossOp: _nll,
    nn.MseLossOp: _loss(functional.mse_loss),
    nn.L1LossOp: _loss(functional.l1_loss),
    nn.HuberLossOp: _loss(functional.huber_loss, "delta"),
    nn.SmoothL1LossOp: _loss(functional.smooth_l1_loss, "beta"),
    nn.BceLossOp: _loss(functional.binary_cross_entropy),
    nn.BceWithLogitsLossOp: _loss(functional.binary_cross_entropy_with_logits),
    nn.SoftMarginLossOp: _soft_margin,
    nn.KlDivLossOp: _kl_div,
    nn.AttentionOp: _attention,
    nn.AttentionGradOp: _attention_grad,
    nn.RotaryOp: _rotary,
    nn.SinusoidOp: _sinusoid,
    nn.CustomOp: _custom,
    nn.RandomOp: _random,
    nn.DropoutOp: _dropout,
    nn.LayerNormOp: _layer_norm,
    nn.LayerNormGradOp: _layer_norm_grad,
    nn.ConstantOp: _constant,
    nn.BatchNormOp: _batch_norm,
    nn.BatchNormInferenceOp: _batch_norm_inference,
    nn.GroupNormOp: lambda op, x, w, b: functional.group_norm(
        x, op.groups.value.data, w, b, op.eps.value.data
    ),
    nn.RmsNormOp: lambda op, x, w: functional.rms_norm(x, w.shape, w, op.eps.value.data),
    nn.UnfoldOp: _unfold,
    nn.MaxPoolOp: _max_pool,
    nn.MaxPoolGradOp: _max_pool_grad,
    nn.AvgPoolOp: _avg_pool,
    nn.AdaptiveAvgPoolOp: _adaptive_avg_pool,
    nn.FoldOp: _fold,
    nn.ConvOp: _conv,
    nn.ConvTransposeOp: _conv_transpose,
    nn.ConvWeightOp: _conv_weight,
    nn.IotaOp: _iota,
    train.SgdOp: _by_torch,
    train.MomentumOp: _momentum,
    train.NesterovOp: _momentum,
    train.LarsOp: _lars,
    train.AdamOp: _adam,
    train.AdamWOp: _adam,
    train.LambDirectionOp: _adam,
    train.LearningRateOp: _learning_rate,
    train.BiasCorrectionOp: lambda op, step: 1 - op.beta.value.data ** step.double(),
    train.TrustRatioOp: _trust_ratio,
    train.NextLossScaleOp: _next_loss_scale,
}


def torch_forward(f: FuncOp, arguments: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The results of a plain function, by torch."""
    env: dict[SSAValue, torch.Tensor] = dict(zip(f.body.block.args, arguments, strict=True))
    for op in f.body.block.ops:
        inputs = [env[v] for v in op.operands]
        if isinstance(op, ReturnOp):
            return inputs
        out = TORCH[type(op)](op, *inputs)
        env.update(zip(op.results, out if isinstance(out, tuple) else (out,), strict=True))
    raise AssertionError("a function returns")


def torch_gradient(
    module: ModuleOp, arguments: Sequence[Array], wrt: Sequence[int], cotangents: Sequence[Array]
) -> list[Array]:
    """The results of a plain @f and its gradients with respect to `wrt`; `cotangents` of the float
    results that are no scalars, whose cotangent is 1."""
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
    """The names of the element types of tensor types."""
    return [str(t.element_type) for t in tensors(types)]


@dataclass
class Problem:
    """A plain program @f with arguments and, for its gradient @g, random cotangents; and torch's
    results of both."""

    module: ModuleOp
    wrt: tuple[int, ...]
    arguments: list[Array]
    wanted: list[Array]
    elements: list[str]

    @property
    def name(self) -> str:
        return "g" if self.wrt else "f"

    def errors(self, module: ModuleOp, factor: float = 1.0) -> str:
        """How the results of a form of the program differ from torch's; empty when they agree.
        Before differentiation those are the results of @f alone."""
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
    """The program, random arguments for it (of the `kinds` of `numbers`), and torch's answer."""
    rng = np.random.default_rng(seed)
    module = program(args, body, wrt if wrt else None)
    kinds = [*kinds, *["normal"] * (len(args) - len(kinds))]
    arguments = [numbers(rng, a.element, a.shape, k) for a, k in zip(args, kinds, strict=True)]
    return posed(module, wrt, arguments, rng)


def posed(
    module: ModuleOp, wrt: Sequence[int], arguments: list[Array], rng: np.random.Generator
) -> Problem:
    """The program with these arguments, random cotangents, and torch's answer."""
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
