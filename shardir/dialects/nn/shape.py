"""Ops that move elements and compute nothing: reshape, transpose, broadcast."""

from collections.abc import Sequence
from math import gcd, prod
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import numpy as np
from xdsl.dialects.builtin import TensorType
from xdsl.ir import SSAValue
from xdsl.irdl import operand_def, prop_def, result_def

from shardir.algebra.factors import Factors
from shardir.algebra.layout import Shape
from shardir.diagnostics import ShardirError, coded
from shardir.dialects.definition import op_definition
from shardir.dialects.dist import tensor
from shardir.dialects.nn.base import STRATEGY, Array, Device, Props, TensorOp, Types, factor_names
from shardir.dialects.nn.properties import DimsAttr, dims_of
from shardir.dialects.nn.types import keep_element, unsharded_type

if TYPE_CHECKING:
    from shardir.dialects.builder import OpBuilder


def reshape_groups(old: Shape, new: Shape) -> list[tuple[list[int], list[int]]]:
    """The finest groups of dimensions of `old` and of `new` with equal products.

    Dimensions of size 1 belong to no group.
    """
    xs = [d for d, n in enumerate(old) if n != 1]
    ys = [d for d, n in enumerate(new) if n != 1]
    groups = []
    while xs or ys:
        a, b = [xs.pop(0)], [ys.pop(0)]
        p, q = old[a[0]], new[b[0]]
        while p != q:
            if p < q:
                a.append(xs.pop(0))
                p *= old[a[-1]]
            else:
                b.append(ys.pop(0))
                q *= new[b[-1]]
        groups.append((a, b))
    return groups


@op_definition
class ReshapeOp(TensorOp):
    """The elements of x in row-major order, in another shape.

    Merged and split dimensions keep their layouts: the major factors of a merged dimension can be
    split.
    """

    name = "nn.reshape"
    FLOPS: ClassVar[int] = 0
    x = operand_def(TensorType)
    out = result_def(TensorType)
    INFERRED: ClassVar[bool] = False
    assembly_format = f"$x {STRATEGY}"

    @classmethod
    def check_results(cls, operands: Types, results: Types, props: Props) -> None:
        old, new = operands[0], results[0]
        keep_element(old, new)
        if prod(old.get_shape()) != prod(new.get_shape()):
            raise ShardirError(
                coded(
                    "T9",
                    f"expected a result of {prod(old.get_shape())} elements, as "
                    f"{list(old.get_shape())} has, got {list(new.get_shape())}, which has "
                    f"{prod(new.get_shape())}",
                )
            )

    @classmethod
    def rule(cls, operands: Types, results: Types, props: Props) -> Factors:
        old, new = operands[0].get_shape(), results[0].get_shape()
        ins, outs = [""] * len(old), [""] * len(new)
        if prod(old) == 0:
            return Factors.of([ins], [outs], [old, new], linear="any")
        sizes: dict[str, int] = {}
        replicated: list[str] = []
        for i, (a, b) in enumerate(reshape_groups(old, new)):
            group = _refine(f"g{i}", [old[d] for d in a], [new[d] for d in b])
            for names, dims, factors_of_dims in ((ins, a, group.old), (outs, b, group.new)):
                for d, factors in zip(dims, factors_of_dims, strict=True):
                    names[d] = " ".join(factors)
            sizes |= group.sizes
            replicated += group.replicated
        factors = Factors.of([ins], [outs], [old, new], linear="any", replicate=replicated)
        return factors.with_sizes(sizes)

    def evaluate(self, device: Device, *arrays: Array) -> Array:
        return arrays[0].reshape(device.shape(self.out))

    def pullback(self, b: "OpBuilder", dy: SSAValue) -> Sequence[SSAValue | None]:
        return (b.reshape(dy, unsharded_type(self.x).get_shape(), like=self.x),)


class _Refined(NamedTuple):
    """The factors of each dimension of a group, their sizes, and the factors to leave unsharded."""

    old: list[list[str]]
    new: list[list[str]]
    sizes: dict[str, int]
    replicated: list[str]


def _refine(name: str, old: list[int], new: list[int]) -> _Refined:
    """The common factors of a group, major to minor: the sizes at which both sides can be cut.

    8 x 6 -> 4 x 12 has the cuts 8 | 48 and 4 | 48: factors 4, 2, 6. If the cuts of the sides do not
    divide each other, their common divisor is a factor, and the minor rest is unsharded:
    6 x 4 -> 4 x 6 is 2 (3 4) -> 2 (2 6).
    """
    refined = _Refined([[] for _ in old], [[] for _ in new], {}, [])
    i = j = 0
    done, p, q = 1, old[0], new[0]
    while True:
        common = gcd(p, q)
        if common > 1:
            factor = f"{name}_{done}"
            refined.old[i].append(factor)
            refined.new[j].append(factor)
            refined.sizes[factor] = common
            done, p, q = done * common, p // common, q // common
        if p > 1 and q > 1:
            unsharded = f"{name}_{done}"
            if refined.sizes:
                refined.sizes[unsharded] = prod(old) // done
                refined.replicated.append(unsharded)
            for dim in (refined.old[i], refined.new[j]):
                if dim:
                    dim.append(unsharded)
            return refined
        if p == 1:
            i += 1
        if q == 1:
            j += 1
        if i == len(old):
            return refined
        p, q = old[i] if p == 1 else p, new[j] if q == 1 else q


@op_definition
class TransposeOp(TensorOp):
    """Dimension i of the result is dimension perm[i] of the operand."""

    name = "nn.transpose"
    FLOPS: ClassVar[int] = 0
    x = operand_def(TensorType)
    perm = prop_def(DimsAttr)
    out = result_def(TensorType)
    assembly_format = f"$x `perm` $perm {STRATEGY}"

    @classmethod
    def infer(cls, operands: Types, props: Props) -> list[TensorType]:
        shape = operands[0].get_shape()
        perm = dims_of(props, "perm", len(shape))
        if len(perm) != len(shape):
            raise ShardirError(
                coded("T4", f"expected perm with each of {len(shape)} dimensions, got {list(perm)}")
            )
        return [tensor(operands[0].element_type, tuple(shape[d] for d in perm))]

    @classmethod
    def rule(cls, operands: Types, results: Types, props: Props) -> Factors:
        names = factor_names(len(operands[0].get_shape()))
        perm = dims_of(props, "perm", len(names))
        return Factors.of(
            [names], [[names[d] for d in perm]],
            [operands[0].get_shape(), results[0].get_shape()], linear="any",
        )  # fmt: skip

    def evaluate(self, device: Device, *arrays: Array) -> Array:
        return np.transpose(arrays[0], dims_of(self.properties, "perm", arrays[0].ndim))

    def pullback(self, b: "OpBuilder", dy: SSAValue) -> Sequence[SSAValue | None]:
        perm = dims_of(self.properties, "perm", len(unsharded_type(self.x).get_shape()))
        return (b.transpose(dy, [perm.index(d) for d in range(len(perm))]),)


@op_definition
class BroadcastOp(TensorOp):
    """Dimension i of the operand is dimension `dims[i]` of the result; it repeats along the other
    dimensions of the result.

    A dimension of size 1 repeats too.
    """

    name = "nn.broadcast"
    FLOPS: ClassVar[int] = 0
    x = operand_def(TensorType)
    dims = prop_def(DimsAttr)
    out = result_def(TensorType)
    INFERRED: ClassVar[bool] = False
    assembly_format = f"$x `dims` $dims {STRATEGY}"

    @classmethod
    def check_results(cls, operands: Types, results: Types, props: Props) -> None:
        old, new = operands[0], results[0]
        keep_element(old, new)
        dims = dims_of(props, "dims", len(new.get_shape()))
        if len(dims) != len(old.get_shape()):
            raise ShardirError(
                coded(
                    "T4",
                    f"expected dims with one entry for each of {len(old.get_shape())} dimensions "
                    f"of the operand, got {list(dims)}",
                    use="write one for each",
                )
            )
        for i, d in enumerate(dims):
            n, m = old.get_shape()[i], new.get_shape()[d]
            if n not in (1, m):
                raise ShardirError(coded("T6", f"expected dimension {i} of size 1 or {m}, got {n}"))

    @classmethod
    def rule(cls, operands: Types, results: Types, props: Props) -> Factors:
        old, new = operands[0].get_shape(), results[0].get_shape()
        names = factor_names(len(new))
        dims = dims_of(props, "dims", len(new))
        ins = [names[d] if n == new[d] else "" for n, d in zip(old, dims, strict=True)]
        return Factors.of([ins], [names], [old, new], linear="any")

    def evaluate(self, device: Device, *arrays: Array) -> Array:
        shape = device.shape(self.out)
        dims = dims_of(self.properties, "dims", len(shape))
        order = sorted(range(len(dims)), key=lambda i: dims[i])
        x = np.transpose(arrays[0], order)
        view = [1] * len(shape)
        for i in order:
            view[dims[i]] = arrays[0].shape[i]
        return np.broadcast_to(x.reshape(view), shape)

    def pullback(self, b: "OpBuilder", dy: SSAValue) -> Sequence[SSAValue | None]:
        old, new = unsharded_type(self.x).get_shape(), unsharded_type(self.out).get_shape()
        dims = dims_of(self.properties, "dims", len(new))
        kept = [d for i, d in enumerate(dims) if old[i] == new[d]]
        repeated = [d for d in range(len(new)) if d not in kept]
        summed = b.reduce(dy, "sum", repeated) if repeated else dy
        order = sorted(kept)
        perm = [order.index(d) for d in kept]
        if perm != sorted(perm):
            summed = b.transpose(summed, perm)
        return (b.reshape(summed, old),)
