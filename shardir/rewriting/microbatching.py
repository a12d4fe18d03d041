"""Microbatches of a step: its function runs several times, on a part of the batch each.

    %x: tensor<8x4xf32>                        %x: tensor<2x4xf32>
    train.step @step of @loss <sgd, ...>   ->  train.step @step of @loss <sgd, ...>
                                                   accumulate <mean, microbatches = 4>

The step stays equal up to rounding if samples are mixed only by a mean over the batch in which the
loss is linear:

1. Each input has the batch as its dimension 0. The factors of ops tell which dimension of a value
   is the batch (analysis/dimensions.py); a value has at most one.
2. An op that reduces the batch is a mean, and the ops after it are linear. A mean over the labels
   that count needs `accumulate <tokens, ...>`.
3. No op needs all samples, as normalisation over a batch does. The function has no states, and no
   results besides the loss.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import gcd

from xdsl.dialects.builtin import TensorType
from xdsl.dialects.func import FuncOp
from xdsl.ir import Operation, SSAValue
from xdsl.utils.exceptions import VerifyException

from shardir.analysis.dimensions import DimensionClasses
from shardir.analysis.functions import values
from shardir.compat.xdsl import set_type
from shardir.diagnostics import ShardirError
from shardir.dialects import train
from shardir.dialects.dist import tensor
from shardir.dialects.nn import ReduceOp
from shardir.dialects.nn.base import TensorOp
from shardir.dialects.nn.losses import Loss
from shardir.dialects.nn.types import unsharded_type
from shardir.rewriting.functions import update_signature

MEAN, TOKENS = "mean", "tokens"


@dataclass(frozen=True)
class BatchDimensions:
    """The batch dimension of each value, and the greatest common divisor of their sizes."""

    dims: dict[SSAValue, int]
    divisor: int
    kind: str
    """How microbatches are accumulated."""

    @staticmethod
    def of(request: train.StepOp) -> "BatchDimensions":
        """Return the batch of a step.

        Raises:
            ShardirError: the step would change with the number of microbatches.
        """
        f = request.find()
        kind = _accumulation_kind(request, f)
        _check_roles(f)
        ops = [op for op in f.body.block.ops if isinstance(op, TensorOp)]
        classes = DimensionClasses(ops)
        inputs = [
            v for v, a in zip(f.body.block.args, train.arguments(f), strict=True)
            if a.role is train.Role.INPUT
        ]  # fmt: skip
        if not inputs or not all(unsharded_type(v).get_shape() for v in inputs):
            raise ShardirError("expected inputs with the batch as dimension 0, got one without")
        batches = {classes.of((v, 0)) for v in inputs}
        dims, divisor = dict[SSAValue, int](), 0
        for v in values(f.body.block):
            if not isinstance(v.type, TensorType):
                continue
            shape = unsharded_type(v).get_shape()
            batch_dims = [d for d in range(len(shape)) if classes.of((v, d)) in batches]
            if len(batch_dims) > 1:
                name = v.name_hint or "a value"
                raise ShardirError(f"expected one dimension of %{name} with the batch, got two")
            if batch_dims:
                dims[v], divisor = batch_dims[0], gcd(divisor, shape[batch_dims[0]])
        reduced = set[SSAValue]()
        for op in ops:
            batch_factors = {f for f, c in classes.of_factors(op).items() if c in batches}
            _check_mixing(op, batch_factors, reduced, kind == TOKENS)
        return BatchDimensions(dims, divisor, kind)

    def divide(self, f: FuncOp, parts: int) -> None:
        """Make the batch of a function smaller.

        Raises:
            ShardirError: an op has the size of the batch as a number.
        """
        for v, d in self.dims.items():
            t = unsharded_type(v)
            shape = list(t.get_shape())
            shape[d] //= parts
            set_type(v, tensor(t.element_type, tuple(shape)))
        update_signature(f)
        for op in f.body.block.ops:
            try:
                op.verify(verify_nested_ops=False)
            except VerifyException as e:
                raise ShardirError(f"expected ops for any batch, got {op.name}: {e}") from None


def _accumulation_kind(request: train.StepOp, f: FuncOp) -> str:
    """Return how microbatches are accumulated: as requested, or by the kind of losses.

    Raises:
        ShardirError: the step does not average over microbatches.
    """
    if request.accumulate is None:
        losses = [op for op in f.body.block.ops if isinstance(op, Loss)]
        return TOKENS if any(map(_ignores_labels, losses)) else MEAN
    if not request.accumulate.averages:
        kind = request.accumulate.kind
        raise ShardirError(f"expected the mean over microbatches, got the {kind}")
    return request.accumulate.kind


def _check_roles(f: FuncOp) -> None:
    """Check that a function has only inputs, parameters and a loss.

    Raises:
        ShardirError: it has further arguments or results.
    """
    roles = {a.role for a in train.arguments(f)} - {train.Role.INPUT, train.Role.PARAMETER}
    if roles:
        raise ShardirError(f"expected inputs and parameters, got {min(roles)}s")
    if len(f.function_type.outputs) > 1:
        raise ShardirError("expected one result, the loss, got several")


def _check_mixing(
    op: TensorOp, batch: Iterable[str], reduced: set[SSAValue], over_tokens: bool
) -> None:  # fmt: skip
    """Check that an op mixes samples only by a mean in which the loss is linear.

    Args:
        batch: the factors of the batch.
        reduced: the means so far, and values computed from them; updated.
        over_tokens: whether means may be over the labels that count.

    Raises:
        ShardirError: it mixes samples in a different way.
    """
    factors, batch = op.factors(), {*batch}
    kept = {f for dims in factors.results for dim in dims for f in dim}
    undivided = batch & (factors.replicate | factors.moved | factors.sliding)
    if undivided or (batch - kept and not _is_mean(op, over_tokens)):
        name = op.results[0].name_hint if op.results else None
        message = f"expected a mean over the batch, got {op.name} of %{name}, which mixes samples"
        raise ShardirError(message)
    if not reduced.isdisjoint(op.operands):
        if not factors.linear:
            raise ShardirError(f"expected a loss that is linear in its mean, got {op.name}")
        reduced.update(op.results)
    if batch - kept:
        reduced.update(op.results)


def _is_mean(op: Operation, over_tokens: bool) -> bool:
    match op:
        case ReduceOp():
            return op.kind.data == MEAN
        case Loss():
            return op.reduction.data == MEAN and (over_tokens or not _ignores_labels(op))
        case _:
            return False


def _ignores_labels(op: Loss) -> bool:
    return op.reduction.data == MEAN and "ignore" in op.properties


def divide_batch(step: train.StepOp, microbatches: int) -> None:
    """Divide the batch of a step into microbatches, a multiple of its own number.

    Raises:
        ShardirError: the step would change with the number of microbatches, or the batch is no
            multiple of it.
    """
    if microbatches == step.microbatches:
        return
    parts, rest = divmod(microbatches, step.microbatches)
    batch = BatchDimensions.of(step)
    if rest or batch.divisor % parts:
        samples = batch.divisor * step.microbatches
        raise ShardirError(
            f"expected a number of microbatches that divides {samples} samples, got {microbatches}"
        )
    batch.divide(step.find(), parts)
    step.properties["accumulate"] = train.AccumulateAttr.read(
        f"{batch.kind}, microbatches = {microbatches}"
    )


def divisors(n: int) -> Iterator[int]:
    """Yield the divisors of a number, from 1 on."""
    yield from (k for k in range(1, n + 1) if n % k == 0)
