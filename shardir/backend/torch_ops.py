"""What each tensor op and update is in torch: one entry per op.

An entry gets the scope of the text and the op, and gives an expression, or a value that the
result is already (the same variable), or None when it has written its own lines.
"""

from collections.abc import Callable
from math import isnan, prod

from xdsl.ir import Operation, SSAValue

from shardir.backend.einsum import contraction
from shardir.backend.emit import Scope, number_text
from shardir.backend.names import axes_text, tuple_text
from shardir.dialects import nn, train
from shardir.dialects.nn.base import axis_of, dims_of, float_of
from shardir.dialects.nn.creation import dense_values

Text = str | SSAValue | None


# ---- elementwise ----


def _infix(sign: str) -> Callable[[Scope, Operation], Text]:
    def entry(s: Scope, op: Operation) -> Text:
        x, y = op.operands
        if (number := s.scalar(y)) is not None:
            return f"{s.operand(x)} {sign} {number}"
        if (number := s.scalar(x)) is not None:
            return f"{number} {sign} {s.operand(y)}"
        return f"{s.operand(x)} {sign} {s.operand(y)}"

    return entry


def _mul(s: Scope, op: nn.MulOp) -> Text:
    """A number stands behind the tensor, as people write it."""
    x, y = op.operands
    if s.scalar(x) is not None and s.scalar(y) is None:
        x, y = y, x
    if s.scalar(y) == "1.0" and s.shape_of(x) == s.shape_of(op.out):
        return x
    return f"{s.operand(x)} * {s.scalar(y) or s.operand(y)}"


def _div(s: Scope, op: nn.DivOp) -> Text:
    """torch reads `number / x` as number times the reciprocal, which rounds twice."""
    if s.scalar(op.lhs) == "1.0":
        return f"{s.operand(op.rhs)}.reciprocal()"
    return f"{s.operand(op.lhs)} / {s.scalar(op.rhs) or s.operand(op.rhs)}"


def _max(s: Scope, op: nn.MaxOp) -> Text:
    for x, y in ((op.lhs, op.rhs), (op.rhs, op.lhs)):
        number = s.number(y)
        if s.scalar(y) is not None and not isnan(number or 0):
            return f"{s.operand(x)}.clamp(min={number_text(number or 0, s.element(y))})"
    return f"torch.maximum({s.operand(op.lhs)}, {s.operand(op.rhs)})"


_SIGNS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}


def _compare(s: Scope, op: nn.CompareOp) -> Text:
    return _infix(_SIGNS[op.how.data])(s, op)


def _select(s: Scope, op: nn.SelectOp) -> Text:
    """One of the two may be a plain number: its type is then that of the other."""
    condition = s.operand(op.condition)
    y = s.scalar(op.rhs)
    x = s.scalar(op.lhs) if y is None else None
    return f"torch.where({condition}, {x or s.operand(op.lhs)}, {y or s.operand(op.rhs)})"


def _method(name: str) -> Callable[[Scope, Operation], Text]:
    return lambda s, op: f"{s.operand(op.operands[0])}.{name}()"


def _neg(s: Scope, op: nn.NegOp) -> Text:
    return f"-{s.operand(op.x)}"


def _gelu(s: Scope, op: nn.GeluOp) -> Text:
    s.use("torch.nn.functional as F")
    return f'F.gelu({s.operand(op.x)}, approximate="tanh")'


def _activation_grad(call: str, last: str = "") -> Callable[[Scope, Operation], Text]:
    def entry(s: Scope, op: Operation) -> Text:
        s.use("aten")
        saved, dy = op.operands
        return f"aten.{call}({s.operand(dy)}, {s.operand(saved)}{last})"

    return entry


def _convert(s: Scope, op: nn.ConvertOp) -> Text:
    if s.dtype(op.x) == s.dtype(op.out):
        return op.x
    return f"{s.operand(op.x)}.to({s.dtype(op.out)})"


def _stop_gradient(s: Scope, op: nn.StopGradientOp) -> Text:
    return op.x


# ---- contractions and reductions ----


def _contraction(s: Scope, op: nn.Contraction) -> Text:
    x, y, z = op.letters
    sizes = {c: s.size(op.out, d) for d, c in enumerate(z)}
    made = s.operand(op.lhs), s.operand(op.rhs)
    return contraction((x, y, z), made, sizes)


def _reduce(s: Scope, op: nn.ReduceOp) -> Text:
    """A mean over a split dimension: this rank's contribution to the sum of all over their
    number."""
    dims = dims_of(op.properties, "dims", len(s.shape_of(op.x)))
    if not dims:
        return op.x
    x, keep = s.operand(op.x), op.keep is not None
    at = _dims(dims, len(s.shape_of(op.x)), keep)
    tail = [", keepdim=True"] if keep else []
    kind = op.kind.data
    if kind in ("max", "min"):
        if any(_may_be_empty(s, op.x, d) for d in dims):
            s.use("ops_runtime as ops")
            helper = "greatest" if kind == "max" else "least"
            return f"ops.{helper}({x}, {tuple_text(list(map(str, dims)))}{', keep=True' * keep})"
        return f"{x}.a{kind}({at}{''.join(tail)})"
    if kind == "sum":
        typed = [] if s.is_float(op.x) else [f"dtype={s.dtype(op.x)}"]
        return f"{x}.sum({', '.join([*([at] if at else []), *(t[2:] for t in tail), *typed])})"
    split = [d for d in dims if s.parts(op.x, d) > 1]
    if not split:
        return f"{x}.mean({at}{''.join(tail)})"
    if all(s.is_even(op.x, d) for d in split):
        return f"{x}.mean({at}{''.join(tail)}) / {prod(s.parts(op.x, d) for d in split)}"
    total = prod(s.whole(op.x)[d] for d in dims)
    if s.element(op.x) in ("f16", "bf16"):  # the sum may be beyond the type's range
        summed = ", ".join([*([at] if at else []), *(t[2:] for t in tail), "dtype=torch.float32"])
        return f"({x}.sum({summed}) / {total}).to({s.dtype(op.x)})"
    return f"{x}.sum({at}{''.join(tail)}) / {total}"


def _dims(dims: tuple[int, ...], rank: int, keep: bool) -> str:
    """The dimensions of a reduction; nothing where it is over all of them."""
    if len(dims) == rank and not keep:
        return ""
    return str(dims[0]) if len(dims) == 1 else tuple_text(list(map(str, dims)))


def _may_be_empty(s: Scope, v: SSAValue, dim: int) -> bool:
    """Whether some rank has no row of a dimension."""
    n = s.parts(v, dim)
    return s.shape_of(v)[dim] * (n - 1) >= s.whole(v)[dim]


# ---- shapes ----


def _reshape(s: Scope, op: nn.ReshapeOp) -> Text:
    if s.shape_of(op.x) == s.shape_of(op.out) and s.whole(op.x) == s.whole(op.out):
        return op.x
    x = s.operand(op.x)
    uneven = [d for d in range(len(s.shape_of(op.out))) if not s.is_even(op.out, d)]
    sizes = s.sizes(op.out)
    if len(uneven) == 1 and all(t.isdecimal() and t != "0" for i, t in enumerate(sizes)
                                if i != uneven[0]):  # fmt: skip
        sizes[uneven[0]] = "-1"
    return f"{x}.reshape({tuple_text(sizes)})" if sizes else f"{x}.reshape(())"


def _transpose(s: Scope, op: nn.TransposeOp) -> Text:
    rank = len(s.shape_of(op.x))
    perm = dims_of(op.properties, "perm", rank)
    moved = [d for d in range(rank) if perm[d] != d]
    x = s.operand(op.x)
    if not moved:
        return op.x
    if moved == [rank - 2, rank - 1]:
        return f"{x}.mT"
    if len(moved) == 2:
        return f"{x}.transpose({moved[0]}, {moved[1]})"
    return f"{x}.permute({tuple_text(list(map(str, perm)))})"


def _broadcast(s: Scope, op: nn.BroadcastOp) -> Text:
    rank = len(s.shape_of(op.out))
    dims = dims_of(op.properties, "dims", rank)
    sizes = s.sizes(op.out)
    if s.number(op.x) is not None:
        return s.full(sizes, op.x)
    if dims == tuple(range(rank)) and s.whole(op.x) == s.whole(op.out):
        return op.x
    x, order = s.operand(op.x), sorted(range(len(dims)), key=lambda i: dims[i])
    if order != list(range(len(dims))):
        x = f"{x}.permute({tuple_text(list(map(str, order)))})"
    first = rank - len(dims)
    if sorted(dims) != list(range(first, rank)):  # not numpy's rule: say where it stands
        where = [":" if d in dims else "None" for d in range(min(dims, default=0), rank)]
        x = f"{x}[{', '.join(where)}]" if dims else x
    return f"{x}.expand({tuple_text(sizes)})"


# ---- by index ----


def _gather(s: Scope, op: nn.GatherOp) -> Text:
    axis = axis_of(op.properties, "axis", len(s.shape_of(op.table)))
    table, ids = s.operand(op.table), s.operand(op.ids)
    total = s.whole(op.table)[axis]
    if axis == 0 and len(s.shape_of(op.table)) == 2 and s.parts(op.table, 0) == 1 and total:
        s.use("torch.nn.functional as F")
        return f"F.embedding({ids}, {table})"
    s.use("ops_runtime as ops")
    return f"ops.take({table}, {ids}, {axis}, {s.start(op.table, axis)}, {total})"


def _gather_grad(s: Scope, op: nn.GatherGradOp) -> Text:
    s.use("ops_runtime as ops")
    axis = axis_of(op.properties, "axis", len(s.shape_of(op.out)))
    shape = tuple_text(s.sizes(op.out))
    return (
        f"ops.take_grad({s.operand(op.ids)}, {s.operand(op.dy)}, {shape}, {axis}, "
        f"{s.start(op.out, axis)}, {s.whole(op.out)[axis]})"
    )


def _pick(s: Scope, op: nn.PickOp) -> Text:
    s.use("ops_runtime as ops")
    last = len(s.shape_of(op.x)) - 1
    where = f"{s.start(op.x, last)}, {s.whole(op.x)[last]}"
    return f"ops.pick({s.operand(op.x)}, {s.operand(op.ids)}, {where})"


def _pick_grad(s: Scope, op: nn.PickGradOp) -> Text:
    s.use("ops_runtime as ops")
    last = len(s.shape_of(op.out)) - 1
    where = f"{s.size(op.out, last)}, {s.start(op.out, last)}, {s.whole(op.out)[last]}"
    return f"ops.pick_grad({s.operand(op.ids)}, {s.operand(op.dy)}, {where})"


# ---- rows ----


def _row(call: str) -> Callable[[Scope, Operation], Text]:
    def entry(s: Scope, op: Operation) -> Text:
        (x,) = op.operands
        return f"{s.operand(x)}.{call}({axis_of(op.properties, 'axis', len(s.shape_of(x)))})"

    return entry


def _row_grad(call: str) -> Callable[[Scope, Operation], Text]:
    def entry(s: Scope, op: Operation) -> Text:
        s.use("aten")
        y, dy = op.operands
        axis = axis_of(op.properties, "axis", len(s.shape_of(y)))
        return f"aten.{call}({s.operand(dy)}, {s.operand(y)}, {axis}, {s.dtype(y)})"

    return entry


def _cross_entropy(s: Scope, op: nn.CrossEntropyOp) -> Text:
    s.use("torch.nn.functional as F")
    s.use("ops_runtime as ops")
    logits, labels = s.operand(op.logits), s.operand(op.labels)
    rank = len(s.shape_of(op.logits))
    checked = f"ops.in_range({labels}, {s.whole(op.logits)[-1]})"
    if rank <= 2:
        return f'F.cross_entropy({logits}, {checked}, reduction="none")'
    flat = f"{logits}.flatten(0, {rank - 2}), {checked}.flatten()"
    return f'F.cross_entropy({flat}, reduction="none").view({labels}.shape)'


def _cross_entropy_grad(s: Scope, op: nn.CrossEntropyGradOp) -> Text:
    s.use("ops_runtime as ops")
    given = ", ".join(s.operand(v) for v in op.operands)
    return f"ops.cross_entropy_grad({given})"


def _layer_norm(s: Scope, op: nn.LayerNormOp) -> Text:
    s.use("torch.nn.functional as F")
    shape = tuple_text(s.sizes(op.weight))
    x, weight, bias = (s.operand(v) for v in op.operands)
    return f"F.layer_norm({x}, {shape}, {weight}, {bias}, {float_of(op, 'eps')!r})"


def _layer_norm_grad(s: Scope, op: nn.LayerNormGradOp) -> Text:
    s.use("ops_runtime as ops")
    given = ", ".join(s.operand(v) for v in op.operands)
    return f"ops.layer_norm_grad({given}, {float_of(op, 'eps')!r})"


# ---- constants ----


def _constant(s: Scope, op: nn.ConstantOp) -> Text:
    values = dense_values(op.value)
    element, flat = s.element(op.out), values.reshape(-1)
    if not flat.size:
        shape = tuple_text(s.sizes(op.out))
        return f"torch.empty({shape}, dtype={s.dtype(op.out)}, device=mesh.device)"
    if op.value.is_splat() or len(set(flat.tolist())) == 1:
        text = number_text(flat[0].item(), element)
        shape = tuple_text(s.sizes(op.out))
        return f"torch.full({shape}, {text}, dtype={s.dtype(op.out)}, device=mesh.device)"
    s.use("ops_runtime as ops")
    numbers = [number_text(n, element) for n in flat.tolist()]
    name = s.program.constant(numbers)
    shape = tuple_text(list(map(str, values.shape)))
    given = f"mesh, {name}, {shape}, {s.dtype(op.out)}"
    s.storages.pin(op.out)
    if all(s.parts(op.out, d) == 1 for d in range(values.ndim)):
        return f"ops.constant({given})"
    return f"ops.constant({given}, {_part(s, op.out)})"


def _iota(s: Scope, op: nn.IotaOp) -> Text:
    """Counted in one dimension; the others only repeat it."""
    sizes = s.sizes(op.out)
    dim = axis_of(op.properties, "dim", len(sizes))
    start = s.start(op.out, dim)
    stop = sizes[dim] if start == "0" else f"{start} + {sizes[dim]}"
    given = stop if start == "0" else f"{start}, {stop}"
    text = f"torch.arange({given}, dtype={s.dtype(op.out)}, device=mesh.device)"
    if len(sizes) == 1:
        return text
    column = ["1"] * len(sizes)
    column[dim] = sizes[dim]
    s.storages.pin(op.out)
    return f"{text}.view({tuple_text(column)}).expand({tuple_text(sizes)})"


def _part(s: Scope, v: SSAValue) -> str:
    """The rows [start, stop) of each dimension of a constant that this rank holds."""
    bounds = []
    for d, n in enumerate(s.whole(v)):
        if s.parts(v, d) == 1:
            bounds.append(f"(0, {n})")
        elif s.rank is not None:
            bounds.append(str(s.bounds(v, d)))
        else:
            bounds.append(f"mesh.bounds({n}, {axes_text(s.axes(v, d))})")
    return tuple_text(bounds)


# ---- training ----


def _backward(s: Scope, op: train.BackwardOp) -> Text:
    s.head("backward")
    return None


def _sgd(s: Scope, op: train.SgdOp) -> Text:
    rate, decay = float_of(op, "lr"), float_of(op, "weight_decay")
    w, g = s.operand(op.w), s.operand(op.g)
    if decay:
        g = f"{g}.add({w}, alpha={decay!r})"
    if s.may_update(op.w, op):
        s.line(f"{w}.sub_({g}, alpha={rate!r})")
        _in_place(s, op.new_w, op.w)
        return None
    return f"{w}.sub({g}, alpha={rate!r})"


def _momentum(s: Scope, op: train.MomentumOp) -> Text:
    rate, factor = float_of(op, "lr"), float_of(op, "momentum")
    decay = float_of(op, "weight_decay")
    w, g, v = s.operand(op.w), s.operand(op.g), s.operand(op.v)
    ours_w, ours_v = s.may_update(op.w, op), s.may_update(op.v, op)
    tail = f".add_({g})" + (f".add_({w}, alpha={decay!r})" if decay else "")
    if ours_v:
        s.line(f"{v}.mul_({factor!r}){tail}")
        _in_place(s, op.new_v, op.v)
    else:
        made = s.define(op.new_v, op.new_v.name_hint or "velocity").name
        s.line(f"{made} = {v}.mul({factor!r}){tail}")
        v = made
    if ours_w:
        s.line(f"{w}.sub_({v}, alpha={rate!r})")
        _in_place(s, op.new_w, op.w)
    else:
        made = s.define(op.new_w, op.new_w.name_hint or "updated").name
        s.line(f"{made} = {w}.sub({v}, alpha={rate!r})")
    return None


def _in_place(s: Scope, new: SSAValue, old: SSAValue) -> None:
    s.storages.join(new, old)
    s.same(new, old)


TORCH: dict[type[Operation], Callable[..., Text]] = {
    nn.AddOp: _infix("+"),
    nn.SubOp: _infix("-"),
    nn.MulOp: _mul,
    nn.DivOp: _div,
    nn.MaxOp: _max,
    nn.NegOp: _neg,
    nn.ExpOp: _method("exp"),
    nn.LogOp: _method("log"),
    nn.SqrtOp: _method("sqrt"),
    nn.ReluOp: _method("relu"),
    nn.ReluGradOp: _activation_grad("threshold_backward", ", 0"),
    nn.TanhOp: _method("tanh"),
    nn.TanhGradOp: _activation_grad("tanh_backward"),
    nn.SigmoidOp: _method("sigmoid"),
    nn.SigmoidGradOp: _activation_grad("sigmoid_backward"),
    nn.GeluOp: _gelu,
    nn.GeluGradOp: _activation_grad("gelu_backward", ', approximate="tanh"'),
    nn.CompareOp: _compare,
    nn.SelectOp: _select,
    nn.ConvertOp: _convert,
    nn.StopGradientOp: _stop_gradient,
    nn.EinsumOp: _contraction,
    nn.MatmulOp: _contraction,
    nn.ReduceOp: _reduce,
    nn.ReshapeOp: _reshape,
    nn.TransposeOp: _transpose,
    nn.BroadcastOp: _broadcast,
    nn.GatherOp: _gather,
    nn.GatherGradOp: _gather_grad,
    nn.PickOp: _pick,
    nn.PickGradOp: _pick_grad,
    nn.SoftmaxOp: _row("softmax"),
    nn.SoftmaxGradOp: _row_grad("_softmax_backward_data"),
    nn.LogSoftmaxOp: _row("log_softmax"),
    nn.LogSoftmaxGradOp: _row_grad("_log_softmax_backward_data"),
    nn.CrossEntropyOp: _cross_entropy,
    nn.CrossEntropyGradOp: _cross_entropy_grad,
    nn.LayerNormOp: _layer_norm,
    nn.LayerNormGradOp: _layer_norm_grad,
    nn.ConstantOp: _constant,
    nn.IotaOp: _iota,
    train.BackwardOp: _backward,
    train.SgdOp: _sgd,
    train.MomentumOp: _momentum,
}
