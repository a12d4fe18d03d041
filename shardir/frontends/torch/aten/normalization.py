"""Norms of activations."""

from collections.abc import Sequence

from torch.fx import Node

from shardir.build import Value, nn
from shardir.frontends.torch.translation import AtenEntry, Translation


def _affine(
    t: Translation, w: Value | None, b: Value | None, shape: Sequence[int], dtype: str
) -> tuple[Value, Value]:
    """The weight and the bias, with defaults 1 and 0."""
    return (
        t.value(1.0, dtype).broadcast_to(*shape) if w is None else w.to(dtype),
        t.value(0.0, dtype).broadcast_to(*shape) if b is None else b.to(dtype),
    )


def _layer_norm(
    t: Translation, x: Value, normalized_shape: Sequence[int], weight: Value | None = None,
    bias: Value | None = None, eps: float = 1e-5,
) -> Value:  # fmt: skip
    x = t.value(x)
    return nn.layer_norm(x, *_affine(t, weight, bias, normalized_shape, x.dtype), eps=eps)


EPS = {"f64": 2.220446049250313e-16, "f32": 1.1920928955078125e-07, "bf16": 0.0078125,
       "f16": 0.0009765625}  # fmt: skip
"""The distance from 1 to the next number: the default eps of rms_norm."""


def _rms_norm(
    t: Translation, x: Value, normalized_shape: Sequence[int], weight: Value | None = None,
    eps: float | None = None,
) -> Value:  # fmt: skip
    x = t.value(x)
    w, _ = _affine(t, weight, None, normalized_shape, x.dtype)
    return nn.rms_norm(x, w, eps=EPS[x.dtype] if eps is None else eps)


def _batch_norm(
    t: Translation, x: Value, w: Value | None, b: Value | None, mean: Value | None,
    var: Value | None, training: bool, momentum: float, eps: float,
) -> Value:  # fmt: skip
    w, b = _affine(t, w, b, x.shape[1:2], x.dtype)
    if not training:
        assert mean is not None and var is not None
        return nn.batch_norm_inference(x, w, b, mean, var, eps=eps)
    running = _affine(t, var, mean, x.shape[1:2], x.dtype)
    return nn.batch_norm(x, w, b, running[1], running[0], momentum=momentum, eps=eps)[0]


def _batch_norm_with_statistics(
    t: Translation, x: Value, w: Value | None, b: Value | None, mean: Value, var: Value,
    training: bool, momentum: float, eps: float,
) -> tuple[Value | None, ...]:  # fmt: skip
    """The batch norm, None in place of the batch's statistics, and the running statistics, which
    have no gradient in torch."""
    if not training:
        return _batch_norm(t, x, w, b, mean, var, training, momentum, eps), None, None, mean, var
    w, b = _affine(t, w, b, x.shape[1:2], x.dtype)
    mean, var = mean.to(x.dtype), var.to(x.dtype)
    y, new_mean, new_var = nn.batch_norm(x, w, b, mean, var, momentum=momentum, eps=eps)
    if _are_read(t.node, 3, 4):
        new_mean, new_var = nn.stop_gradient(new_mean), nn.stop_gradient(new_var)
    return y, None, None, new_mean, new_var


def _are_read(node: Node, *results: int) -> bool:
    """Whether an op reads one of some results of a call."""
    parts = (part for part in node.users if part.args[1] in results)
    return any(user.op != "output" for part in parts for user in part.users)


def _batch_norm_of_running(
    t: Translation, x: Value, w: Value | None, b: Value | None, mean: Value, var: Value,
    momentum: float, eps: float,
) -> tuple[Value | None, ...]:  # fmt: skip
    return _batch_norm(t, x, w, b, mean, var, False, momentum, eps), None, None


def _batch_norm_of_batch(
    t: Translation, x: Value, w: Value | None, b: Value | None, training: bool, momentum: float,
    eps: float,
) -> tuple[Value | None, ...]:  # fmt: skip
    return _batch_norm(t, x, w, b, None, None, True, momentum, eps), None, None


def _group_norm(
    t: Translation, x: Value, groups: int, weight: Value | None = None, bias: Value | None = None,
    eps: float = 1e-5,
) -> Value:  # fmt: skip
    affine = _affine(t, weight, bias, x.shape[1:2], x.dtype)
    return nn.group_norm(x, *affine, groups=groups, eps=eps)


def _instance_norm(
    t: Translation, x: Value, w: Value | None, b: Value | None, mean: Value | None,
    var: Value | None, use_input_stats: bool, momentum: float, eps: float,
) -> Value:  # fmt: skip
    if not use_input_stats or mean is not None:
        return NotImplemented
    return nn.group_norm(x, *_affine(t, w, b, x.shape[1:2], x.dtype), groups=x.shape[1], eps=eps)


TABLE: dict[str, AtenEntry] = {
    "layer_norm": _layer_norm,
    "rms_norm": _rms_norm,
    "batch_norm": _batch_norm,
    "_native_batch_norm_legit_functional": _batch_norm_with_statistics,
    "_native_batch_norm_legit_no_training": _batch_norm_of_running,
    "_native_batch_norm_legit.no_stats": _batch_norm_of_batch,
    "group_norm": _group_norm,
    "instance_norm": _instance_norm,
}
