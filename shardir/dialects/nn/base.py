"""The bases of tensor ops: TensorOp and Composite.

An op is one class. `infer` (the result types), `rule` (the factors, from which layouts follow),
`evaluate` (numpy, the reference) and `gradient` depend on its types and properties only. An op that
needs a dimension unsharded may also have `decompose`: the ops that compute it when that dimension
is split.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np
from xdsl.dialects.builtin import AnyFloat, TensorType, f32
from xdsl.ir import Attribute, SSAValue
from xdsl.irdl import IRDLOperation, opt_prop_def, traits_def
from xdsl.traits import Pure
from xdsl.utils.exceptions import VerifyException

from shardir.algebra.factors import Factors, try_op_sharding
from shardir.algebra.layout import Layout, Shape, varying_over
from shardir.algebra.mesh import Mesh, axes_text
from shardir.compat.xdsl import operands_of, type_of
from shardir.diagnostics import ShardirError, coded
from shardir.dialects.definition import OpClass, by_signature
from shardir.dialects.dist import (
    CollectiveOp,
    StrategyAttr,
    check_types,
    find_mesh,
    global_shape,
    is_local,
    tensor,
    type_layout,
)
from shardir.dialects.nn.properties import Props
from shardir.dialects.nn.types import Types, unsharded_type
from shardir.dialects.signatures import rules, verified

if TYPE_CHECKING:
    from shardir.dialects.builder import OpBuilder

Array = np.ndarray[Any, Any]

STRATEGY = "(`strategy` $strategy^)? attr-dict `:` functional-type(operands, results)"
"""The end of the assembly format of every tensor op."""


class Device(Protocol):
    """The device on which an op is evaluated: the shard of each value that it holds."""

    run: int
    """The index of the run of the innermost loop around the op; 0 outside of loops."""

    def start(self, value: SSAValue, dim: int) -> int:
        """The global index along `dim` of the first element of the shard."""
        ...

    def shape(self, value: SSAValue) -> Shape:
        """The shape of the shard."""
        ...

    def global_shape(self, value: SSAValue) -> Shape:
        """The global shape of the value."""
        ...


class TensorOp(IRDLOperation, metaclass=OpClass):
    """An op on tensors, in either view: a device computes its shard, or its partial value."""

    strategy = opt_prop_def(StrategyAttr)
    traits = traits_def(Pure())

    INFERRED: ClassVar[bool] = True
    """Whether the result types follow from the operands; otherwise they are explicit."""
    MULTILINEAR: ClassVar[bool] = False
    """Whether one partial operand (a sum) among complete ones gives a partial result."""
    GLOBAL_TYPES: ClassVar[bool] = False
    """Whether `infer` and `check_results` need global shapes, since shards do not fit."""

    PRECISION: ClassVar[str] = "given"
    """The precision of this op under mixed precision: "narrow" (the fastest), "wide" (range or
    precision needed), or "given" (that of its operands)."""

    STATISTICS: ClassVar[tuple[str, ...]] = ()
    """Operands and results that are f32 even if the others are narrower."""

    KEEPS_STRATEGY: ClassVar[bool] = False
    """Whether the strategy is a part of the op, which stays once layouts are decided."""

    FLOPS: ClassVar[int] = 1
    """Floating-point operations per element of the largest operand or result; a function such as
    exp counts as one. An op may have the class variable `TIMED_AS`: the name of another op, whose
    ratio holds on clusters that have none for this one."""

    def __init__(self, *values: SSAValue, **parts: Any):
        if values:
            raise ShardirError(
                f"expected the parts of {self.name} by name, got values; use operands=[...] and "
                "result_types=[...], or shardir.rewriting.rewriter.Rewriter, which infers types"
            )
        super().__init__(**parts)

    @classmethod
    def infer(cls, operands: Types, props: Props) -> list[TensorType]:
        """Return the result types, if they follow from the operands. Raises ShardirError if the
        operands do not fit."""
        raise ShardirError(f"expected explicit result types of {cls.name}, got none")

    @classmethod
    @abstractmethod
    def rule(cls, operands: Types, results: Types, props: Props) -> Factors:
        """The op's factors, for global shapes."""

    @classmethod
    def flops(cls, sizes: Mapping[str, int], shapes: Sequence[Shape]) -> int:
        """Floating-point operations of one device. `sizes` and `shapes` are its local sizes of
        factors, and shapes of operands, then results."""
        return cls.FLOPS * max(map(prod, shapes))

    @classmethod
    def touched(cls, shapes: Sequence[Shape]) -> Sequence[int]:
        """The number of elements read from each operand, then written to each result."""
        return [prod(s) for s in shapes]

    @abstractmethod
    def evaluate(self, device: Device, *arrays: Array) -> Array | tuple[Array, ...]:
        """Compute the results of one device in numpy."""

    def gradient(self, b: "OpBuilder", *cotangents: SSAValue | None) -> Sequence[SSAValue | None]:
        """Return the operands' cotangents from the results' cotangents; None for no cotangent.

        Raises:
            ShardirError: the op has no gradient.
        """
        dy = cotangents[0]
        if len(cotangents) > 1 or dy is None:
            raise self.no_gradient()
        return self.pullback(b, dy)

    def pullback(self, b: "OpBuilder", dy: SSAValue) -> Sequence[SSAValue | None]:
        """Return `gradient` of an op with one result."""
        raise self.no_gradient()

    def no_gradient(self, result: str = "") -> ShardirError:
        """The error that the op, or one of its results, has no gradient."""
        if result:
            message = f"expected a result with a gradient, got the {result} of {self.name}"
            return ShardirError(coded("G8", message, use="put nn.stop_gradient after it"))
        message = f"expected an op with a gradient, got {self.name}"
        return ShardirError(coded("G8", message, use="put nn.stop_gradient before it"))

    def saving(self) -> tuple[Props, dict[str, TensorType]] | None:
        """Return the properties that add the results which the gradient reads, and the types of
        these results by name, with layouts if the op's results have layouts; None if the gradient
        reads operands and results only."""
        return None

    def decompose(self, b: "OpBuilder") -> Sequence[SSAValue] | None:
        """Return the results, computed by ops that allow every split; None without a
        decomposition."""
        return None

    def parts(self, b: "OpBuilder") -> Sequence[SSAValue] | None:
        """Return the results by `decompose`. The parts of a "wide" op are in f32 if an operand is
        narrower: the unsharded op computes its statistics in f32 too."""
        operands = list(self.operands)
        if self.PRECISION == "wide":
            operands = [b.widen(v) for v in operands]
        if operands == list(self.operands):
            return self.decompose(b)
        types = [
            TensorType(f32 if isinstance(t.element_type, AnyFloat) else t.element_type,
                       t.get_shape(), t.encoding)
            for v in self.results if isinstance(t := v.type, TensorType)
        ]  # fmt: skip
        op = type(self).create(
            operands=operands, result_types=types, properties=dict(self.properties)
        )
        results = op.decompose(b)
        op.erase()
        return results and [
            b.convert(new, unsharded_type(v).element_type, partial=True)
            for v, new in zip(self.results, results, strict=True)
        ]

    @classmethod
    def runs_on_host(cls, operands: Sequence[Layout], results: Sequence[Layout | None]) -> bool:
        """Whether hosts compute an op with these layouts: by default if all values are `on host`,
        scalar operands aside. A result may have no layout yet."""
        tensors = [l for l in operands if l.dims]
        return bool(tensors) and all(l is not None and l.host for l in (*tensors, *results))

    def exchange(self, mesh: Mesh) -> tuple[type[CollectiveOp], Props] | None:
        """The collective that computes the op in the local view, and its properties, if devices
        need elements of other devices; else None."""
        return None

    @by_signature
    def verify_(self) -> None:
        types = [v.type for v in (*self.operands, *self.results)]
        names = {l.mesh for t in types if (l := type_layout(t)) is not None}
        meshes = [find_mesh(self, n) for n in sorted(names)]
        parts = (type(self), *meshes, None, *types, len(self.operands))
        verified.get_or(parts, self.properties, self.verify_signature)

    def verify_signature(self) -> None:
        """Verify the op; called once for each signature."""
        check_types(self)
        operands = [unsharded_type(v) for v in self.operands]
        results = [unsharded_type(v) for v in self.results]
        if self.GLOBAL_TYPES:
            layouts = [type_layout(v.type) for v in (*self.operands, *self.results)]
            mesh = next((find_mesh(self, l.mesh) for l in layouts if l is not None), None)
            operands = [_global_type(v.type, mesh) for v in self.operands]
            results = [_global_type(v.type, mesh) for v in self.results]
        try:
            if self.INFERRED:
                expected = self.infer(operands, self.properties)
                if len(expected) != len(results):
                    message = f"expected {len(expected)} results, got {len(results)}"
                    raise ShardirError(coded("T1", message))
                for i, (want, have) in enumerate(zip(expected, results, strict=True)):
                    if want is not have and want != have:
                        raise ShardirError(
                            coded("T1", f"expected result {i} of type {want}, got {have}")
                        )
            else:
                self.check_results(operands, results, self.properties)
        except ShardirError as e:
            raise VerifyException(str(e)) from None
        if self.results and is_local(self.results[0].type):
            self.check_local()

    @classmethod
    def check_results(cls, operands: Types, results: Types, props: Props) -> None:
        """Raises ShardirError if explicit result types do not fit (`INFERRED` is False)."""

    def factors(self, mesh: Mesh | None = None) -> Factors:
        """The op's factors on its global shapes."""
        return rules.of_op(
            self,
            lambda: rule_of(
                type(self),
                tuple(_global_type(type_of(v), mesh) for v in operands_of(self)),
                tuple(_global_type(type_of(v), mesh) for v in self.results),
                self.properties,
            ),
            mesh,
        )

    def shapes(self, mesh: Mesh | None = None) -> tuple[Shape, ...]:
        """Global shapes of the operands, then of the results."""
        return tuple([global_shape(type_of(v), mesh) for v in (*operands_of(self), *self.results)])

    def check_local(self) -> None:
        """Check that each device can compute the op with the layouts of operands and results."""
        values = (*self.operands, *self.results)
        layouts = [l for v in values if (l := type_layout(v.type)) is not None]
        if not layouts:
            return
        if len(layouts) < len(values):
            text = "expected layouts of all values of the op or of none, got some without"
            raise VerifyException(
                coded("T2", text, use="run propagate-strategies, or annotate all of them")
            )
        mesh = find_mesh(self, layouts[0].mesh)
        n = len(self.operands)
        message = layout_mismatch(
            self.factors(mesh), tuple(layouts[:n]), tuple(layouts[n:]), mesh, self.MULTILINEAR
        )
        if message:
            raise VerifyException(coded("T3", message))
        if (exchange := self.exchange(mesh)) is not None:
            text = "expected operands with all elements that a device needs, got some on others"
            raise VerifyException(coded("T3", text, use=f"use {exchange[0].name}"))


class Composite(TensorOp, ABC):
    """An op that is defined by its decomposition.

    Layouts propagate through it by its factors, as through any op. insert-redistributions and
    distributed-autodiff decompose it; otherwise the interpreter and the backend do
    (`shardir/rewriting/composites.py`). So it has no evaluation, gradient or emitted text of its
    own, and does not occur in the local view.
    """

    @abstractmethod
    def decompose(self, b: "OpBuilder") -> Sequence[SSAValue]:
        """Return the results, computed by other ops."""

    def evaluate(self, device: Device, *arrays: Array) -> Array | tuple[Array, ...]:
        raise AssertionError(f"{self.name} is evaluated by its decomposition")

    def check_local(self) -> None:
        message = f"expected ops of the local view, got the composite {self.name}"
        raise VerifyException(
            coded("T3", message, use="run insert-redistributions, which decomposes it")
        )


def decomposes(kind: type[TensorOp]) -> bool:
    """Whether an op has a decomposition."""
    return kind.decompose is not TensorOp.decompose


def strategy_factors(op: TensorOp) -> Factors:
    """The factors that a strategy of the op may split, including `replicate` factors if the op has
    a decomposition."""
    factors = op.factors()
    return factors.unrestricted if decomposes(type(op)) else factors


def is_in_parts(kind: type[TensorOp], factors: Factors, operands: Sequence[Layout]) -> bool:
    """Whether an op is computed by its decomposition: a composite always, other ops with a
    decomposition if the operands' layouts split a dimension that must be unsharded."""
    if issubclass(kind, Composite) or not decomposes(kind):
        return decomposes(kind)
    unsharded = factors.replicate | factors.moved
    return any(
        axes and any(f in unsharded for f in dim)
        for dims, layout in zip(factors.operands, operands, strict=True)
        for dim, axes in zip(dims, layout.dims, strict=True)
    )


def _global_type(type: Attribute, mesh: Mesh | None) -> TensorType:
    assert isinstance(type, TensorType)
    return tensor(type.element_type, global_shape(type, mesh))


@lru_cache(maxsize=65536)
def layout_mismatch(
    factors: Factors,
    operands: tuple[Layout, ...],
    results: tuple[Layout, ...],
    mesh: Mesh,
    multilinear: bool,
) -> str:
    """Return the error message if devices cannot compute an op with these layouts, else ""."""
    if varying := varying_over(operands, mesh):  # the op of each device's own values
        for i, layout in enumerate(results):
            if mesh.union(layout.varying, ()) != varying:
                want = f"result {i} with partial any {axes_text(varying)}, as operands have"
                return f"expected {want}, got [{layout}]"
        sides = (tuple([l.complete if l.varying else l for l in s]) for s in (operands, results))
        return layout_mismatch(factors, *sides, mesh, multilinear)
    on_host = [l for l in (*operands, *results) if l.host]
    if on_host and len(on_host) < len(operands) + len(results):
        return f"expected operands and results in one memory, got some on host, [{on_host[0]}]"
    chosen: dict[str, tuple] = {}
    sides = [
        (f"operand {i}", d, l)
        for i, (d, l) in enumerate(zip(factors.operands, operands, strict=True))
    ]
    sides += [
        (f"result {i}", d, l) for i, (d, l) in enumerate(zip(factors.results, results, strict=True))
    ]
    for what, dims, layout in sides:
        for i, (dim, axes) in enumerate(zip(dims, layout.dims, strict=True)):
            assigned, complete = factors.assign(dim, axes, mesh)
            if not complete:
                return f"expected dimension {i} of {what} split by its factors, got [{layout}]"
            for f in dim:
                axes_of = mesh.simplify(assigned.get(f, ()))
                moved = f in factors.moved and what.startswith("operand")
                if (moved or f in factors.replicate) and axes_of:
                    return f"expected dimension {i} of {what} unsharded, got [{layout}]"
                if moved:
                    continue
                if chosen.setdefault(f, axes_of) != axes_of:
                    return (
                        f"expected dimension {i} of {what} split as the other dimensions of its "
                        f"factor, got [{layout}]"
                    )
    partial = [o for o in operands if o.partial]
    pending: Layout | None = None
    if partial:
        pending = partial[0]
        together = factors.linear and len(partial) == len(operands)
        alone = multilinear and len(partial) == 1 and pending.reduction == "sum"
        if any((o.partial, o.reduction) != (pending.partial, pending.reduction) for o in partial):
            return "expected operands partial over the same axes, got different ones"
        if not (alone or (together and (pending.reduction == "sum" or factors.linear == "any"))):
            return f"expected reduced operands, got a partial {pending.reduction}"
    sharding = try_op_sharding(factors, {f: a for f, a in chosen.items() if a}, mesh, pending)
    if sharding is None:
        return "expected each axis to split one factor, got an axis that splits two"
    for i, (want, have) in enumerate(zip(sharding.results, results, strict=True)):
        if want.simplified(mesh) != have.on_device.simplified(mesh):
            return f"expected result {i} with [{want}], got [{have}]"
    return ""


def factor_names(n: int, prefix: str = "d") -> list[str]:
    """Names of n factors."""
    return [f"{prefix}{i}" for i in range(n)]


def rule_of(
    op: type[TensorOp],
    operands: tuple[TensorType, ...],
    results: tuple[TensorType, ...],
    props: Props,
) -> Factors:
    """The factors of an op with this signature; cached."""
    parts = (op, *operands, None, *results)
    return rules.get_or(parts, props, lambda: op.rule(operands, results, props))
