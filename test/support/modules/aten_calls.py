"""Calls of the ops of ATen that the importer has entries for, from their schemas: each argument
takes values other than in the base call, one after the other.

Values follow from the types of a schema; `GIVEN` has those that do not.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from math import inf, nan
from typing import Any

import torch
from torch._ops import OpOverload

from shardir.frontends.torch.aten import TABLE

Values = list[Any]

UNVARIED = {
    "device", "layout", "pin_memory", "memory_format", "generator", "non_blocking",
}  # fmt: skip
"""Arguments of devices, strides and generators, which an example on one CPU cannot vary."""

WITHOUT_EFFECT = {
    "stable", "sorted", "sparse", "sparse_grad", "cudnn_enable", "cudnn_enabled", "path", "copy",
    "implicit", "requires_grad", "half_to_float", "output_size", "size", "has_biases", "dtype",
    "scales_h", "scales_w",
    "momentum",
}  # fmt: skip
"""Arguments whose other values may give an equal result."""


@dataclass(frozen=True)
class T:
    """A tensor of a shape, of elements of a kind."""

    shape: tuple[int, ...] = (3, 4)
    kind: str = "normal"

    def make(self, kind: str, seed: int) -> torch.Tensor:
        """The tensor; `kind` takes the place of "normal"."""
        g = torch.Generator().manual_seed(seed)
        shape, kind = self.shape, kind if self.kind == "normal" else self.kind
        match kind:
            case "integers":
                x = torch.randint(-5, 6, shape, generator=g)
                return torch.where(x == 0, 3, x)
            case "bools":
                return torch.rand(shape, generator=g) < 0.5
            case "bytes":
                return torch.randint(1, 256, shape, generator=g).to(torch.uint8)
            case "special":  # zeros, ties and bounds
                points = torch.tensor([0.0, 1.0, 0.0, -1.0, 1.0, 2.0, 6.0, -3.0, 3.0, 0.5, -2.0])
                at = torch.randint(len(points), shape, generator=g)
                return points.double()[at]
            case "zeros" | "equal":
                return torch.full(shape, float(kind == "equal"), dtype=torch.float64)
            case "positive":
                return torch.rand(shape, generator=g, dtype=torch.float64) + 0.1
            case "unit":
                return torch.rand(shape, generator=g, dtype=torch.float64) * 0.8 + 0.1
            case "normal":
                return torch.randn(shape, generator=g, dtype=torch.float64)
        return torch.randint(int(kind), shape, generator=g)  # indices below a number


@dataclass(frozen=True)
class Call:
    """A call of an op. `argument` is the one whose value is not the base call's; `kind` is that of
    its tensors."""

    op: OpOverload
    given: dict[str, Any]
    argument: str = ""
    kind: str = "normal"

    def __str__(self) -> str:
        value = f"-{self.argument}={self.given.get(self.argument)}" if self.argument else ""
        return f"{name_of(self.op)}-{self.kind}{value}"

    def tensors(self) -> dict[str, Any]:
        """The arguments, with tensors in place of their descriptions."""

        def made(x: Any, seed: int) -> Any:
            if isinstance(x, list):
                return [made(y, 10 * seed + i) for i, y in enumerate(x)]
            return x.make(self.kind, seed) if isinstance(x, T) else x

        return {name: made(x, i + 1) for i, (name, x) in enumerate(self.given.items())}


def name_of(op: OpOverload) -> str:
    return str(op).removeprefix("aten.").removesuffix(".default")


def ops() -> Iterator[OpOverload]:
    """Yield every overload on tensors that an entry of the table serves."""
    for entry in TABLE:
        name, _, overload = entry.partition(".")
        packet = getattr(torch.ops.aten, name, None)
        for found in [] if packet is None else packet.overloads():
            op = getattr(packet, found)
            schema = op._schema
            if overload not in ("", found) or (not overload and f"{name}.{found}" in TABLE):
                continue
            arguments = [str(a.type) for a in schema.arguments]
            results = [str(r.type) for r in schema.returns]
            if (
                any(a.is_out for a in schema.arguments)
                or any(a.alias_info is not None and a.alias_info.is_write for a in schema.arguments)
                or not results
                or not any("Tensor" in r for r in results)
                or any("Dict" in t or "str]" in t or t == "t" for t in arguments)
                or "Dimname" in str(schema)
                or "generator" in found
                or str(op) in NOT_CALLED
            ):
                continue
            yield op


NOT_CALLED = {
    "aten.einsum.sublist", "aten.copy.Dict_Tensor", "aten.eq.Tensor_list", "aten.ne.Tensor_list",
    "aten.pin_memory.default", "aten.to.prim_Device", "aten.to.prim_dtype", "aten.to.prim_other",
    "aten.lift_fresh.default", "aten.narrow.Tensor", "aten._conj.default", "aten.numpy_T.a",
    "aten.mT.a", "aten._grouped_mm.default",
    "aten._native_batch_norm_legit_functional.default",
    "aten._native_batch_norm_legit_no_training.default", "aten._native_batch_norm_legit.no_stats",
    "aten.mm.dtype", "aten.bmm.dtype", "aten.addmm.dtype", "aten.baddbmm.dtype",
}  # fmt: skip
"""Overloads of TorchScript, of a GPU alone, those whose shapes follow from values, and the forms of
batch_norm in a functional graph, whose statistics of the batch no module reads."""


@cache
def calls_of(op: OpOverload) -> list[Call]:
    """The base call of an op, those with one argument of another value, and those of tensors of
    other kinds."""
    given = GIVEN.get(name_of(op), {})
    values = {a.name: values_of(op, a) for a in op._schema.arguments
              if a.name not in UNVARIED or a.name in given}  # fmt: skip
    base = {name: v[0] for name, v in values.items() if v}
    found = [Call(op, base)]
    for name, some in values.items():
        found += [Call(op, base | {name: x}, name) for x in some[1:]]
    for argument, changes in LINKED.get(name_of(op), LINKED.get(op._schema.name[6:], [])):
        known = {name: x for name, x in changes.items() if name in values}
        found.append(Call(op, base | known, argument))
    kinds = ("integers", "bools", "special", "zeros", "equal")
    normal = any("normal" in str(x) for x in base.values()) and "backward" not in str(op)
    return [*found, *(Call(op, base, "", kind) for kind in kinds if normal)]


def values_of(op: OpOverload, argument: Any) -> Values:
    """The values of an argument, that of the base call first."""
    name, kind = argument.name, str(argument.type).replace("SymInt", "int")
    packet = op._schema.name.partition("::")[2]
    for key in (name_of(op), packet):
        if name in GIVEN.get(key, {}):
            return GIVEN[key][name]
    default = [argument.default_value] if argument.has_default_value() else []
    if name in BY_NAME:
        return unique([*default, *BY_NAME[name]])
    optional = kind.startswith("Optional")
    inner = kind.removeprefix("Optional[").removesuffix("]") if optional else kind
    match inner:
        case "Tensor":
            return [T(), *([None] if optional else [])]
        case "List[Tensor]" | "List[Optional[Tensor]]":
            return [[T(), T()]]
        case "bool":
            return unique([*default, False, True])
        case "number":
            return unique([*default, *([None] if optional else []), 2, 0.5, -1.5])
        case "float":
            return unique([*default, *([None] if optional else []), 0.3, 2.0])
        case "int":
            return unique([*default, *([None] if optional else []), 1, 0, -1, 2])
        case "List[int]":
            return unique([*default, *([None] if optional else []), [1], [0], [-1], [0, 1]])
    raise AssertionError(f"expected values of {name}: {kind} of {op}; add them to GIVEN")


def unique(values: Values) -> Values:
    found: Values = []
    for x in values:
        if not any(type(x) is type(y) and x == y for y in found):
            found.append(x)
    return found


BY_NAME: dict[str, Values] = {
    "dtype": [None, torch.float32, torch.int64],
    "reduction": [1, 0, 2],
    "keepdim": [False, True],
    "index": [T((3, 4), "3")],
    "indices": [T((3, 4), "3")],
    "mask": [T((3, 4), "bools")],
    "condition": [T((3, 4), "bools")],
    "alpha": [2, -1],
    "beta": [2, -1, 0],
    "ord": [2, 1, 3, 0.5, 0, inf, -inf],
    "p": [2, 1, 3, 0.5, 0, inf, -inf],
    "rounding_mode": [None, "floor", "trunc"],
    "label_smoothing": [0.2],
    "correction": [None, 0, 1, 2, 0.5],
    "approximate": ["none", "tanh"],
    "eps": [0.1],
}

M, V, B = T((4, 5)), T((4,)), T((2, 3, 4))
MAPS = {1: T((2, 4, 10)), 2: T((2, 4, 9, 8)), 3: T((1, 4, 6, 5, 7))}
AFFINE = {"weight": [T((4,)), None], "bias": [T((4,)), None]}


def per_dim(n: int, *values: int) -> Values:
    return [[v] * n for v in values] + ([[values[0], *[values[-1]] * (n - 1)]] if n > 1 else [])


def conv(n: int, transposed: bool = False) -> dict[str, Values]:
    weight = T((4, 2, *(3,) * n)) if transposed else T((6, 4, *(3,) * n))
    grouped = {"groups": [1]}
    return {
        "input": [MAPS[n]], "weight": [weight],
        "bias": [T((2,) if transposed else (6,)), None], "stride": per_dim(n, 2, 1, 3),
        "padding": per_dim(n, 0, 1), "dilation": per_dim(n, 1, 2),
        "output_padding": per_dim(n, 0, 1), **grouped,
    }  # fmt: skip


def pool(n: int) -> dict[str, Values]:
    return {
        "self": [MAPS[n], T(MAPS[n].shape[1:])], "kernel_size": per_dim(n, 3, 2),
        "stride": [[2] * n, [], [3] * n], "padding": per_dim(n, 0, 1),
        "dilation": per_dim(n, 1, 2), "divisor_override": [None, 5],
        "ceil_mode": [False, True], "count_include_pad": [True, False],
    }  # fmt: skip


def adaptive(n: int) -> dict[str, Values]:
    return {"self": [MAPS[n]], "output_size": per_dim(n, 3, 1, 4)}


def upsample(n: int) -> dict[str, Values]:
    have = MAPS[n].shape[2:]
    return {
        "self": [MAPS[n]], "input": [MAPS[n]],
        "output_size": [[2 * k for k in have], [k + 2 for k in have], [2] * n],
        "align_corners": [False, True],
        **{s: [None, 2.0, 2.5] for s in ("scales", "scales_d", "scales_h", "scales_w")},
    }  # fmt: skip


def upsample_vec(n: int) -> dict[str, Values]:
    return {
        **upsample(n), "output_size": [None],
        "scale_factors": [[2.0] * n, [1.7] * n, [0.5] * n],
    }  # fmt: skip


def rnn(gates: int, state: Any) -> dict[str, Values]:
    return {
        "input": [T((3, 2, 5))], "hx": [state(1)],
        "params": [[T((gates * 4, 5)), T((gates * 4, 4)), T((gates * 4,)), T((gates * 4,))]],
        "has_biases": [True], "num_layers": [1], "dropout": [0.0], "train": [False],
        "bidirectional": [False], "batch_first": [False],
    }  # fmt: skip


def cell(gates: int, state: Any) -> dict[str, Values]:
    bias = [T((gates * 4,)), None]
    return {
        "input": [T((2, 5))], "hx": [state], "w_ih": [T((gates * 4, 5))],
        "w_hh": [T((gates * 4, 4))], "b_ih": bias, "b_hh": bias,
    }  # fmt: skip


LABELS = {
    "self": [T((5, 4)), T((2, 4, 3))], "target": [T((5,), "4")],
    "weight": [None, T((4,), "positive")], "ignore_index": [-100, 1],
    "reduction": [1, 0, 2], "label_smoothing": [0.0, 0.2],
}  # fmt: skip
PROBABILITIES = {**LABELS, "target": [T((5, 4), "unit")], "ignore_index": [-100]}
UNIT = {"self": [T((3, 4), "unit")], "target": [T((3, 4), "unit")],
        "weight": [None, T((3, 4), "positive")],
        "pos_weight": [None, T((4,), "positive")]}  # fmt: skip
BAG = {
    "weight": [T((6, 3))], "indices": [T((7,), "6")], "offsets": [torch.tensor([0, 2, 5])],
    "scale_grad_by_freq": [False, True], "mode": [0, 1, 2], "sparse": [False],
    "per_sample_weights": [None, T((7,))], "include_last_offset": [False],
    "padding_idx": [-1, 2],
}  # fmt: skip

GIVEN: dict[str, dict[str, Values]] = {
    "linear": {"input": [B], "weight": [T((5, 4))], "bias": [T((5,)), None]},
    "matmul": {"self": [B, V, T((2, 1, 3, 4))], "other": [M, V, T((1, 2, 4, 5))]},
    "mm": {"self": [T()], "mat2": [M]},
    "bmm": {"self": [B], "mat2": [T((2, 4, 5))]},
    "mv": {"self": [T()], "vec": [V]},
    "dot": {"self": [V], "tensor": [V]},
    "outer": {"self": [T((3,))], "vec2": [V]},
    "einsum": {"equation": ["ij,jk->ik", "ij,jk->ki", "ij,jk"], "tensors": [[T(), M]],
               "path": [None, [0, 1]]},
    "addmm": {"self": [T((3, 5)), T((5,))], "mat1": [T()], "mat2": [M]},
    "baddbmm": {"self": [T((2, 3, 5)), T((5,))], "batch1": [B], "batch2": [T((2, 4, 5))]},
    "addbmm": {"self": [T((3, 5)), T((5,))], "batch1": [B], "batch2": [T((2, 4, 5))]},
    "addmv": {"self": [T((3,)), T((1,))], "mat": [T()], "vec": [V]},
    "_grouped_mm": {},
    "scaled_dot_product_attention": {
        "query": [T((2, 2, 3, 4))], "key": [T((2, 2, 5, 4))], "value": [T((2, 2, 5, 4))],
        "attn_mask": [None, T((3, 5), "bools"), T((3, 5))], "dropout_p": [0.0],
        "is_causal": [False, True], "scale": [None, 0.3], "enable_gqa": [False],
    },
    **{f"conv{n}d": conv(n) for n in (1, 2, 3)},
    **{f"conv{n}d.padding": {**conv(n), "stride": [[1] * n], "padding": ["same", "valid"]}
       for n in (1, 2, 3)},
    **{f"conv_transpose{n}d{'.input' * (n > 1)}": conv(n, True) for n in (1, 2, 3)},
    "convolution": {**conv(2), "weight": [T((4, 4, 3, 3))], "transposed": [False, True],
                    "bias": [V, None], "output_padding": [[0, 0]]},
    "convolution_backward": {
        "grad_output": [T((2, 6, 7, 6))], "input": [MAPS[2]], "weight": [T((6, 4, 3, 3))],
        "bias_sizes": [[6]], "stride": [[1, 1]], "padding": [[0, 0]],
        "dilation": [[1, 1]], "transposed": [False], "output_padding": [[0, 0]], "groups": [1],
        "output_mask": [[True, True, True]],
    },
    **{f"max_pool{n}d": pool(n) for n in (1, 2, 3)},
    **{f"avg_pool{n}d": pool(n) for n in (1, 2, 3)},
    **{f"adaptive_avg_pool{n}d": adaptive(n) for n in (1, 2, 3)},
    **{f"upsample_{mode}{n}d{v}": (upsample_vec if v else upsample)(n)
       for n, modes in ((1, ("nearest", "linear")), (2, ("nearest", "bilinear")),
                        (3, ("nearest", "trilinear"))) for mode in modes for v in ("", ".vec")},
    "avg_pool2d_backward": {**pool(2), "grad_output": [T((2, 4, 4, 3))], "self": [MAPS[2]]},
    "avg_pool3d_backward": {**pool(3), "grad_output": [T((1, 4, 2, 2, 3))], "self": [MAPS[3]]},
    **{f"max_pool{n}d_with_indices_backward": {
        "grad_output": [g], "self": [MAPS[n]], "kernel_size": [[3] * n], "stride": [[2] * n],
        "padding": [[0] * n], "dilation": [[1] * n], "ceil_mode": [False],
        "indices": [getattr(torch.nn.functional, f"max_pool{n}d")(
            T(MAPS[n].shape).make("normal", 2), 3, 2, return_indices=True)[1]],
    } for n, g in ((2, T((2, 4, 4, 3))), (3, T((1, 4, 2, 2, 3))))},
    "lstm.input": rnn(4, lambda n: [T((n, 2, 4)), T((n, 2, 4))]),
    "gru.input": rnn(3, lambda n: T((n, 2, 4))),
    "rnn_tanh.input": rnn(1, lambda n: T((n, 2, 4))),
    "rnn_relu.input": rnn(1, lambda n: T((n, 2, 4))),
    "lstm_cell": cell(4, [T((2, 4)), T((2, 4))]),
    "gru_cell": cell(3, T((2, 4))),
    "rnn_tanh_cell": cell(1, T((2, 4))),
    "rnn_relu_cell": cell(1, T((2, 4))),
    "zeros": {"size": [[2, 3], []]}, "ones": {"size": [[2, 3], []]},
    "cross_entropy_loss": LABELS, "nll_loss": {**LABELS, "self": [T((5, 4))]},
    "nll_loss_nd": {**LABELS, "self": [T((5, 4))]},
    "nll_loss2d": {**LABELS, "self": [T((2, 4, 3, 2))], "target": [T((2, 3, 2), "4")]},
    "binary_cross_entropy": UNIT, "binary_cross_entropy_with_logits": {**UNIT, "self": [T()]},
    "kl_div": {"target": [T((3, 4), "unit")]},
    "layer_norm": {"normalized_shape": [[4], [3, 4]], **AFFINE},
    "rms_norm": {"normalized_shape": [[4]], "weight": AFFINE["weight"]},
    "embedding": {"weight": [T((6, 3))], "indices": [T((2, 7), "6")], "padding_idx": [-1, 2]},
    "embedding_bag": BAG, "_embedding_bag": BAG,
    "index.Tensor": {"indices": [[T((2, 3), "3")], [None, T((2,), "4")],
                                 [T((2,), "3"), T((2,), "4")]]},
    "index_put": {"indices": [[T((2,), "3")], [None, T((2,), "4")]], "values": [T((1,)), T(())],
                  "accumulate": [False, True]},
    "index_put.hacked_twin": {"indices": [[T((2,), "3")]], "values": [T((2, 4))]},
    "index_select": {"index": [T((5,), "3")], "dim": [0, 1, -1]},
    "index_add": {"index": [T((4,), "3")], "source": [T((4, 4))], "dim": [0, 1, -1],
                  "alpha": [1, 2, -0.5]},
    "index_copy": {"index": [torch.tensor([2, 0, 1])], "source": [T((3, 4))], "dim": [0]},
    **{name: {"index": [T((2, 4), "3")], "dim": [0, -2, 1], "reduce": ["add", "multiply"]}
       for name in ("scatter_add", "gather")},
    "scatter": {"index": [torch.tensor([[0, 1, 2], [2, 0, 1]])], "dim": [0, -2, 1],
                "reduce": ["add", "multiply"]},
    "take_along_dim": {"indices": [T((1, 4), "3")], "dim": [0, None, -2]},
    "one_hot": {"self": [T((3, 4), "5")], "num_classes": [5, 7]},
    "masked_scatter": {"source": [T((12,))]},
    "fill": {"value": [2, T(()), -1.5]}, "fill.Tensor": {"value": [T(())]},
    "masked_fill.Tensor": {"value": [T(())]},
    "linspace": {"start": [1, -0.5], "end": [3, 0.7], "steps": [4, 1, 7]},
    "arange": {"start": [1, 0.5], "end": [6, 3.3], "step": [1, 2, 0.7]},
    "randint": {"high": [2], "low": [1], "size": [[2, 3]]},
    "randint_like": {"high": [2], "low": [1]}, "randint_like.Tensor": {"high": [torch.tensor(2)]},
    "bernoulli": {"self": [torch.tensor([0.0, 1.0])], "p": [1.0, 0.0]},
    "bernoulli.Tensor": {"p": [torch.tensor([0.0, 1.0])]},
    **{f"rand{n}{like}": {"size": [[2, 3]]} for n in ("", "n") for like in ("", "_like")},
    "dropout": {"p": [0.0, 1.0], "train": [False, True]},
    "feature_dropout": {"input": [T((3, 4, 2))], "p": [0.0, 1.0], "train": [False, True]},
    "clamp": {"min": [-0.5, None, 0, T()], "max": [0.5, None, 1]},
    "clip": {"min": [-0.5, None, 0], "max": [0.5, None, 1]},
    "clamp.Tensor": {"min": [T(), None, T((4,))], "max": [T(), None]},
    "clip.Tensor": {"min": [T(), None, T((4,))], "max": [T(), None]},
    "pow.Tensor_Scalar": {"exponent": [2, 3, 0, 1, 4, -1, 0.5, -0.5, 1.5, -2]},
    "float_power.Tensor_Scalar": {"exponent": [2, 3, 0, 1, 4, -1, 0.5]},
    "logit": {"self": [T((3, 4), "unit")], "eps": [None, 0.3]},
    "prelu": {"weight": [V, T((1,))]},
    "softplus": {"beta": [1, 2, -0.5], "threshold": [20, 0.5]},
    "nan_to_num": {"self": [torch.tensor([1.0, nan, inf, -inf])],
                   "nan": [None, 2.0], "posinf": [None, 3.0], "neginf": [None, -3.0]},
    **{f"bitwise_{how}": {"self": [T((3, 4), "integers"), T((3, 4), "bools")],
                          "other": [T((3, 4), "integers"), T((4,), "bools")]}
       for how in ("and", "or", "xor")},
    "bitwise_not": {"self": [T((3, 4), "integers"), T((3, 4), "bools")]},
    **{f"bitwise_{how}.Scalar": {"self": [T((3, 4), "integers")], "other": [3, -2]}
       for how in ("and", "or", "xor")},
    **{f"bitwise_{how}.Scalar_Tensor": {"self": [3, -2], "other": [T((3, 4), "integers")]}
       for how in ("and", "or", "xor")},
    **{f"__{how}__.{o}": {"self": [T((3, 4), "integers")], "other": [x]}
       for how in ("and", "or") for o, x in (("Tensor", T((3, 4), "integers")), ("Scalar", 3))},
    "to.device": {"device": ["cpu"], "dtype": [torch.float32, torch.int64]},
    **{name: {"dtype": [torch.float32, torch.int64]}
       for name in ("to.dtype", "_to_copy", "to.dtype_layout")},
    **{name: {"dtype": [torch.float64, torch.float32]}
       for name in ("norm.ScalarOpt_dim_dtype", "norm.ScalarOpt_dtype")},
    "norm.ScalarOpt_dim_dtype": {"dtype": [torch.float64, torch.float32]},
    "view.dtype": {"dtype": [torch.float64, torch.int64]},
    "batch_norm": {"input": [T((5, 4)), T((2, 4, 3))], **AFFINE, "training": [False, True],
                   "running_mean": [V], "running_var": [T((4,), "positive")],
                   "momentum": [0.1], "eps": [0.1, 0.01]},
    "instance_norm": {"input": [T((2, 4, 3))], **AFFINE, "use_input_stats": [True, False],
                      "running_mean": [None, V], "running_var": [None, T((4,), "positive")],
                      "momentum": [0.1], "eps": [0.1, 0.01]},
    "group_norm": {"input": [T((2, 4, 3))], "num_groups": [2, 1, 4], **AFFINE},
    "_is_all_true": {"self": [T((3, 4), "bools")]}, "_is_any_true": {"self": [T((3, 4), "bools")]},
    "any.dims": {"dim": [None, [0], [0, 1], []]}, "all.dims": {"dim": [None, [0], [0, 1], []]},
    **{name: {"size": [[4, 3], [2, -1]], "shape": [[4, 3], [2, -1]]}
       for name in ("view", "_unsafe_view", "reshape")},
    **{name: {"other": [T((4, 3))]} for name in ("view_as", "reshape_as")},
    "unflatten": {"dim": [1, -1], "sizes": [[2, 2], [4, -1]]},
    "flatten": {"self": [B], "start_dim": [0, 1], "end_dim": [-1, 1]},
    "squeeze": {"self": [T((1, 3, 1, 2))], "dim": [0, 1, -2]},
    "squeeze.dims": {"self": [T((1, 3, 1, 2))], "dim": [[0], [0, 2]]},
    "permute": {"self": [B], "dims": [[0, 2, 1], [-1, 0, 1]]},
    **{name: {"self": [B], **{f"{a}{i}": [i, 2] for a in ("dim", "axis") for i in (0, 1)}}
       for name in ("transpose", "swapaxes", "swapdims")},
    **{f"move{a}.int": {"self": [B], "source": [0, -1], "destination": [1, 2]}
       for a in ("dim", "axis")},
    **{f"move{a}.intlist": {"self": [B], "source": [[0, 1], [0, 2]],
                            "destination": [[1, 2], [2, 0]]}
       for a in ("dim", "axis")},
    "slice": {"dim": [0, 1, -1], "start": [1, None, -2], "end": [None, 2, -1], "step": [1, 2]},
    "slice_scatter": {"src": [T((2, 4))], "dim": [0], "start": [1, 0], "end": [3, 2],
                      "step": [1]},
    "narrow": {"dim": [0, 1, -1], "start": [0, 1, -1], "length": [1, 2]},
    "narrow.Tensor": {"dim": [0, 1], "start": [torch.tensor(1)], "length": [1, 2]},
    "select": {"dim": [0, 1, -1], "index": [0, 1, -1]},
    "select_scatter": {"src": [V], "dim": [0, -2], "index": [0, 1, -1]},
    **{name: {"self": [T((3, 1))], "size": [[2, 3, 4], [-1, 5]]}
       for name in ("expand", "broadcast_to")},
    "expand_as": {"self": [T((3, 1))], "other": [T()]},
    "split.Tensor": {"split_size": [2, 1, 5], "dim": [0, 1, -1]},
    **{name: {"split_size": [[1, 3], [2, 2]], "split_sizes": [[1, 3], [2, 2]], "dim": [1, -1]}
       for name in ("split", "split.sizes", "split_with_sizes")},
    "chunk": {"chunks": [2, 3, 5], "dim": [0, 1, -1]},
    **{name: {"dim": [0, 1, -1]} for name in ("cat", "concat", "stack")},
    "pad": {"pad": [[1, 2], [1, 0, 2, 1], [-1, 1]], "mode": ["constant", "reflect", "replicate",
                                                             "circular"], "value": [None, 2.5]},
    "constant_pad_nd": {"pad": [[1, 2], [1, 0, 2, 1], [-1, 1]], "value": [0, 2.5]},
    "roll": {"shifts": [[1], [2], [-1]], "dims": [[], [0], [1]]},
    "flip": {"dims": [[0], [1], [0, -1]]},
    "repeat": {"repeats": [[2, 1], [2, 1, 3]]}, "tile": {"dims": [[2, 1], [2], [2, 1, 3]]},
    "repeat_interleave": {"repeats": [2, 1], "dim": [None, 0, -1]},
    "unfold": {"dimension": [1, 0, -1], "size": [2, 1], "step": [1, 2]},
    "diagonal": {"self": [B], "offset": [0, 1, -1, 3], "dim1": [0, 2], "dim2": [1, -1]},
    "tril": {"diagonal": [0, 1, -1]}, "triu": {"diagonal": [0, 1, -1]},
    "pixel_shuffle": {"self": [T((1, 8, 2, 3))], "upscale_factor": [2, 1]},
    "broadcast_tensors": {"tensors": [[T((3, 1)), V]]},
    "meshgrid": {"tensors": [[T((3,)), V]], "indexing": ["ij", "xy"]},
    "histc": {"bins": [5, 10], "min": [-1, 0], "max": [1, 2]},
    "topk": {"k": [2, 1, 0]}, "count_nonzero": {"dim": [None, 0, -1]},
    **{f"{k}_indices": {"row": [3, 2], "col": [4, 2], "dtype": [torch.int64, torch.int32]}
       for k in ("tril", "triu")},
    "eye": {"n": [3, 2], "m": [4, 2]},
    "new_zeros": {"size": [[2, 3]]},
    **{name: {"size": [[2, 3], []]}
       for name in ("new_ones", "new_full", "full", "empty", "new_empty")},
    **{f"linspace.{a}_{b}": {
        "start": [torch.tensor(1.0)] if a == "Tensor" else [1.0, 0.5],
        "end": [torch.tensor(2.0)] if b == "Tensor" else [2.0, 3.5], "steps": [4, 3]}
       for a, b in (("Tensor", "Tensor"), ("Tensor", "Scalar"), ("Scalar", "Tensor"))},
    "count_nonzero.dim_IntList": {"dim": [[0], [0, 1], [-1]]},
    "glu": {"self": [T((4, 4))], "dim": [-1, 0]},
    **{f"{how}.Scalar": {"self": [T((3, 4), "integers")], "other": [3, 2]}
       for how in ("eq", "ne", "__and__", "__or__")},
    "as_strided": {"size": [[12]], "stride": [[1]], "storage_offset": [None, 0]},
    "as_strided_scatter": {"src": [T((12,))], "size": [[12]], "stride": [[1]],
                           "storage_offset": [None, 0]},
}  # fmt: skip
"""Values of arguments, by the names of ops, or of overloads."""


def _pools(n: int) -> list[tuple[str, dict[str, Any]]]:
    pad = {"padding": [1] * n}
    return [
        ("count_include_pad", {"count_include_pad": False, **pad}),
        ("ceil_mode", {"ceil_mode": True, **pad}),
        ("ceil_mode", {"ceil_mode": True, "count_include_pad": False, **pad}),
        ("divisor_override", {"divisor_override": 3, **pad}),
    ]


def _maxima(n: int, **changes: Any) -> dict[str, Any]:
    """The indices of the maxima of a pool, and a cotangent of its result."""
    how = {"kernel_size": 3, "stride": 2} | changes
    found = getattr(torch.nn.functional, f"max_pool{n}d")(
        MAPS[n].make("normal", 2), return_indices=True, **how
    )
    return {"grad_output": T(tuple(found[0].shape)), "indices": found[1]}


LINKED: dict[str, list[tuple[str, dict[str, Any]]]] = {
    **{f"conv{n}d{o}": [
        ("groups", {"groups": 2, "weight": T((6, 2, *(3,) * n))}),
        ("stride", {"stride": [2] * n, "padding": "valid" if o else [0] * n}),
    ] for n in (1, 2, 3) for o in ("", ".padding")},
    **{f"conv_transpose{n}d{'.input' * (n > 1)}": [
        ("groups", {"groups": 2, "bias": T((4,))})] for n in (1, 2, 3)},
    "convolution": [
        ("groups", {"groups": 2, "weight": T((4, 2, 3, 3))}),
        ("output_padding", {"transposed": True, "output_padding": [1, 0]}),
    ],
    "convolution_backward": [
        ("bias_sizes", {"bias_sizes": None, "output_mask": [True, True, False]}),
        ("output_mask", {"output_mask": [True, True, False]}),
        ("stride", {"stride": [2, 1], "grad_output": T((2, 6, 4, 6))}),
        ("padding", {"padding": [0, 1], "grad_output": T((2, 6, 7, 8))}),
        ("dilation", {"dilation": [1, 2], "grad_output": T((2, 6, 7, 4))}),
        ("groups", {"groups": 2, "weight": T((6, 2, 3, 3))}),
        ("transposed", {"transposed": True, "weight": T((4, 6, 3, 3)),
                        "grad_output": T((2, 6, 11, 10))}),
        ("output_padding", {"transposed": True, "weight": T((4, 6, 3, 3)), "stride": [2, 2],
                            "output_padding": [1, 0], "grad_output": T((2, 6, 20, 17))}),
    ],
    "avg_pool2d_backward": [
        ("kernel_size", {"kernel_size": [2, 2], "grad_output": T((2, 4, 4, 4))}),
        ("stride", {"stride": [1, 1], "grad_output": T((2, 4, 7, 6))}),
        ("padding", {"padding": [1, 1], "grad_output": T((2, 4, 5, 4))}),
        ("ceil_mode", {"ceil_mode": True, "grad_output": T((2, 4, 4, 4))}),
        ("count_include_pad", {"padding": [1, 1], "count_include_pad": False,
                               "grad_output": T((2, 4, 5, 4))}),
    ],
    "avg_pool3d_backward": [
        ("stride", {"stride": [1, 1, 1], "grad_output": T((1, 4, 4, 3, 5))}),
        ("padding", {"padding": [1, 1, 1], "grad_output": T((1, 4, 3, 3, 4))}),
        ("ceil_mode", {"ceil_mode": True, "grad_output": T((1, 4, 3, 2, 3))}),
        ("count_include_pad", {"padding": [1, 1, 1], "count_include_pad": False,
                               "grad_output": T((1, 4, 3, 3, 4))}),
    ],
    **{f"max_pool{n}d_with_indices_backward": [
        (argument, {argument: x, **_maxima(n, **{argument: x})})
        for argument, x in (("kernel_size", [2] * n), ("stride", [1] * n), ("padding", [1] * n),
                            ("dilation", [2] * n), ("ceil_mode", True))
    ] for n in (2, 3)},
    **{f"{kind}_pool{n}d": _pools(n) for kind in ("max", "avg") for n in (1, 2, 3)},
    "embedding_bag": [("include_last_offset", {"include_last_offset": True,
                                               "offsets": torch.tensor([0, 2, 7])})],
    "_embedding_bag": [("include_last_offset", {"include_last_offset": True,
                                                "offsets": torch.tensor([0, 2, 7])})],
    "index_add": [("dim", {"dim": 1, "source": T((3, 4))})],
    "index_copy": [("dim", {"dim": 1, "index": torch.tensor([3, 0, 1]), "source": T((3, 3))})],
    "layer_norm": [("normalized_shape", {"normalized_shape": [3, 4], "weight": T((3, 4)),
                                         "bias": None})],
    "rms_norm": [("normalized_shape", {"normalized_shape": [3, 4], "weight": None})],
    "instance_norm": [("use_input_stats", {
        "use_input_stats": False, "running_mean": V, "running_var": T((4,), "positive")})],
    "as_strided": [
        ("stride", {"size": [3, 4], "stride": [1, 3]}),
        ("storage_offset", {"size": [4], "storage_offset": 2}),
    ],
    "as_strided_scatter": [
        ("size", {"size": [4], "src": T((4,))}),
        ("stride", {"size": [4], "stride": [3], "src": T((4,))}),
        ("storage_offset", {"size": [4], "storage_offset": 2, "src": T((4,))}),
    ],
    "unflatten": [("dim", {"dim": 0, "sizes": [3, 1]})],
    **{name: [("dim", {"dim": 0, "split_size": [1, 2], "split_sizes": [1, 2]})]
       for name in ("split", "split.sizes", "split_with_sizes")},
    "slice_scatter": [
        ("dim", {"dim": 1, "src": T((3, 2))}), ("start", {"start": 0, "end": 2}),
        ("end", {"end": 2, "src": T((1, 4))}),
        ("step", {"start": 0, "end": 3, "step": 2}),
    ],
    "select_scatter": [("dim", {"dim": 1, "src": T((3,))})],
}  # fmt: skip
"""Arguments whose other values go with other tensors."""
