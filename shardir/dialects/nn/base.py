"""What every tensor op states of itself, once.

An op is one class. From its types and properties alone follow `infer` (the result types), `rule`
(the factors that layouts follow from), `evaluate` (numpy, the reference) and `gradient`. An op
that needs a dimension whole may also state how it is calculated when that dimension is split:
`decompose`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar

import numpy as np
from xdsl.dialects.builtin import FloatAttr, IntegerAttr, NoneAttr, TensorType, f64, i1, i64
from xdsl.ir import Attribute, Operation, SSAValue
from xdsl.irdl import IRDLOperation, irdl_attr_definition, opt_prop_def, traits_def
from xdsl.traits import Pure
from xdsl.utils.exceptions import VerifyException

from shardir.algebra.cluster import BYTES
from shardir.algebra.factors import Factors, try_op_sharding
from shardir.algebra.layout import Layout, Shape
from shardir.algebra.mesh import Mesh
from shardir.diagnostics import ShardirError
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
from shardir.dialects.text import IntsAttr

if TYPE_CHECKING:
    from shardir.dialects.builder import Builder

Props = Mapping[str, Attribute]
Types = Sequence[TensorType]
Array = np.ndarray[Any, Any]

STRATEGY = "(`strategy` $strategy^)? attr-dict `:` functional-type(operands, results)"
"""How the format of every tensor op ends."""


@irdl_attr_definition
class DimsAttr(IntsAttr):
    """A list of dimensions: `<1, 0>`."""

    name = "nn.dims"


class Device(Protocol):
    """Where an op is evaluated: which part of each value a device holds."""

    def start(self, value: SSAValue, dim: int) -> int:
        """The global index of the first row of `value` along `dim` here."""
        ...

    def shape(self, value: SSAValue) -> Shape:
        """The shape of `value` here."""
        ...

    def global_shape(self, value: SSAValue) -> Shape:
        """The global shape of `value`."""
        ...


class TensorOp(IRDLOperation, ABC):
    """An op on tensors, in either view: on a device it calculates that device's contribution."""

    strategy = opt_prop_def(StrategyAttr)
    traits = traits_def(Pure())

    INFERRED: ClassVar[bool] = True
    """Whether the result types follow from the operands; otherwise the text states them."""
    MULTILINEAR: ClassVar[bool] = False
    """Whether one partial operand (a sum) among complete ones gives a partial result."""
    GLOBAL_TYPES: ClassVar[bool] = False
    """Whether types follow from each other only for whole values, and not for shards too."""

    PRECISION: ClassVar[str] = "given"
    """In which type mixed precision calculates it: "narrow" (what gains most by it), "wide" (what
    needs the range or the digits), or "given", that of its operands."""

    FLOPS: ClassVar[int] = 1
    """Floating-point operations for each element of the largest of its operands and results; a
    function such as exp is one."""

    @classmethod
    def infer(cls, operands: Types, props: Props) -> list[TensorType]:
        """The results' shapes and element types, where they follow from the operands. Raises
        ShardirError where operands do not fit."""
        raise ShardirError(f"{cls.name} states its result types")

    @classmethod
    @abstractmethod
    def rule(cls, operands: Types, results: Types, props: Props) -> Factors:
        """The op's factors, for global shapes."""

    @classmethod
    def flops(cls, sizes: Mapping[str, int], shapes: Sequence[Shape]) -> int:
        """Floating-point operations of one device, which has these sizes of the factors, and these
        shapes of operands, then results."""
        return cls.FLOPS * max(map(prod, shapes))

    @classmethod
    def touched(cls, shapes: Sequence[Shape]) -> Sequence[int]:
        """How many elements of each operand, then of each result, are read or written."""
        return [prod(s) for s in shapes]

    @abstractmethod
    def evaluate(self, device: Device, *arrays: Array) -> Array | tuple[Array, ...]:
        """The results, in numpy, of what one device holds."""

    def gradient(self, b: "Builder", *cotangents: SSAValue | None) -> Sequence[SSAValue | None]:
        """The operands' cotangents from the results'; None where there is none.

        Raises:
            ShardirError: the op has no gradient.
        """
        dy = cotangents[0]
        if len(cotangents) > 1 or dy is None:
            raise self.no_gradient()
        return self.pullback(b, dy)

    def pullback(self, b: "Builder", dy: SSAValue) -> Sequence[SSAValue | None]:
        """`gradient`, of an op with one result."""
        raise self.no_gradient()

    def no_gradient(self) -> ShardirError:
        """The error that the op has none."""
        return ShardirError(f"[G8] {self.name} has no gradient; nn.stop_gradient ends it before")

    def decompose(self, b: "Builder") -> Sequence[SSAValue] | None:
        """The results by ops that allow every split, or None when there is no such way."""
        return None

    def exchange(self, mesh: Mesh) -> tuple[type[CollectiveOp], Props] | None:
        """The collective that calculates the op in the local view, and its properties, where
        devices need rows that others hold; None where each has all that it needs."""
        return None

    def verify_(self) -> None:
        types = [v.type for v in (*self.operands, *self.results)]
        names = {l.mesh for t in types if (l := type_layout(t)) is not None}
        meshes = [find_mesh(self, n) for n in sorted(names)]
        parts = (type(self), *meshes, None, *types, *self.properties.values())
        _verified.get_or((*parts, len(self.operands)), self.verify_signature)

    def verify_signature(self) -> None:
        """What `verify_` does, once for each signature."""
        check_types(self)
        operands = [unsharded_type(v) for v in self.operands]
        results = [unsharded_type(v) for v in self.results]
        if self.GLOBAL_TYPES:
            layouts = [type_layout(v.type) for v in (*self.operands, *self.results)]
            mesh = next((find_mesh(self, l.mesh) for l in layouts if l is not None), None)
            operands = [_whole(v.type, mesh) for v in self.operands]
            results = [_whole(v.type, mesh) for v in self.results]
        try:
            if self.INFERRED:
                expected = self.infer(operands, self.properties)
                if len(expected) != len(results):
                    raise ShardirError(f"[T1] {len(expected)} results follow, not {len(results)}")
                for i, (want, have) in enumerate(zip(expected, results, strict=True)):
                    if want is not have and want != have:
                        raise ShardirError(f"[T1] result {i} is {want}, the type says {have}")
            else:
                self.check_results(operands, results, self.properties)
        except ShardirError as e:
            raise VerifyException(str(e)) from None
        if self.results and is_local(self.results[0].type):
            self.check_local()

    @classmethod
    def check_results(cls, operands: Types, results: Types, props: Props) -> None:
        """Raises ShardirError when stated result types do not fit (ops with `INFERRED` False)."""

    def factors(self, mesh: Mesh | None = None) -> Factors:
        """The op's factors on its global shapes."""
        return rule_of(
            type(self),
            tuple(_whole(v.type, mesh) for v in self.operands),
            tuple(_whole(v.type, mesh) for v in self.results),
            self.properties,
        )

    def shapes(self, mesh: Mesh | None = None) -> tuple[Shape, ...]:
        """Global shapes of the operands, then of the results."""
        return tuple(global_shape(v.type, mesh) for v in (*self.operands, *self.results))

    def check_local(self) -> None:
        """Local computability: the layouts of operands and results agree with the factors."""
        values = (*self.operands, *self.results)
        layouts = [l for v in values if (l := type_layout(v.type)) is not None]
        if not layouts:
            return
        if len(layouts) < len(values):
            raise VerifyException(
                "[T2] some values of this op have a layout and some have none; "
                "run propagate-strategies, or give each a layout"
            )
        mesh = find_mesh(self, layouts[0].mesh)
        n = len(self.operands)
        message = layout_mismatch(
            self.factors(mesh), tuple(layouts[:n]), tuple(layouts[n:]), mesh, self.MULTILINEAR
        )
        if not message and (exchange := self.exchange(mesh)) is not None:
            message = f"devices need rows that others hold; {exchange[0].name} fetches them"
        if message:
            raise VerifyException(f"[T3] not computable where its operands lie: {message}")


class Composite(TensorOp, ABC):
    """An op that means what its parts calculate, `decompose`, and gains nothing from being more.

    Layouts spread through it by its factors, as through any op. insert-redistributions and
    distributed-autodiff put the parts in its place; the interpreter and the backend do so where no
    pass has (`shardir/rewriting/composites.py`). So it has no evaluation, gradient or text of its
    own, and does not stand in the local view.
    """

    @abstractmethod
    def decompose(self, b: "Builder") -> Sequence[SSAValue]:
        """The results by other ops."""

    def evaluate(self, device: Device, *arrays: Array) -> Array | tuple[Array, ...]:
        raise AssertionError(f"{self.name} is evaluated by its parts")

    def check_local(self) -> None:
        raise VerifyException(
            f"[T3] {self.name} is not of the local view: write the ops that it is made of, as "
            "insert-redistributions does"
        )


def decomposes(kind: type[TensorOp]) -> bool:
    """Whether an op says how it is calculated by others."""
    return kind.decompose is not TensorOp.decompose


def strategy_factors(op: TensorOp) -> Factors:
    """The factors that a strategy of the op may split: of one that decomposes, `replicate` ones
    too."""
    factors = op.factors()
    return factors.unrestricted if decomposes(type(op)) else factors


def splits_replicated(factors: Factors, operands: Sequence[Layout]) -> bool:
    """Whether these layouts of its operands split a dimension that an op wants whole."""
    whole = factors.replicate | factors.moved
    return any(
        axes and any(f in whole for f in dim)
        for dims, layout in zip(factors.operands, operands, strict=True)
        for dim, axes in zip(dims, layout.dims, strict=True)
    )


@lru_cache(maxsize=64)
def element_name(element: Attribute) -> str:
    """An element type as the text has it. Kept, for printing an attribute takes long."""
    return str(element)


def itemsize(t: TensorType) -> int:
    """The bytes of an element; those of a truth value are one."""
    name = element_name(t.element_type)
    return BYTES[name] if name in BYTES else (t.element_type.bitwidth + 7) // 8  # type: ignore[attr-defined]


def unsharded_type(value: SSAValue) -> TensorType:
    """A value's type without its layout."""
    t = value.type
    assert isinstance(t, TensorType)
    if isinstance(t.encoding, NoneAttr):
        return t
    return tensor(t.element_type, t.get_shape())


def _whole(type: Attribute, mesh: Mesh | None) -> TensorType:
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
    """Why an op can't be calculated with these layouts; empty when it can."""
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
            mine, whole = factors.assign(dim, axes, mesh)
            if not whole:
                return f"dimension {i} of {what} can't be split as [{layout}]"
            for f in dim:
                axes_of = mesh.simplify(mine.get(f, ()))
                moved = f in factors.moved and what.startswith("operand")
                if (moved or f in factors.replicate) and axes_of:
                    return f"dimension {i} of {what} must be whole"
                if moved:
                    continue
                if chosen.setdefault(f, axes_of) != axes_of:
                    return (
                        f"dimension {i} of {what} is not split as the dimension that it must "
                        f"match ([{layout}]); insert-redistributions mends it"
                    )
    partial = [o for o in operands if o.partial]
    kept: Layout | None = None
    if partial:
        kept = partial[0]
        together = factors.linear and len(partial) == len(operands)
        alone = multilinear and len(partial) == 1 and kept.reduction == "sum"
        if any((o.partial, o.reduction) != (kept.partial, kept.reduction) for o in partial):
            return "its partial operands are partial over different axes; reduce them first"
        if not (alone or (together and (kept.reduction == "sum" or factors.linear == "any"))):
            return f"an operand is a partial {kept.reduction}; reduce it first"
    found = try_op_sharding(factors, {f: a for f, a in chosen.items() if a}, mesh, kept)
    if found is None:
        return "an axis splits two of its dimensions"
    for i, (want, have) in enumerate(zip(found.results, results, strict=True)):
        if want.simplified(mesh) != have.simplified(mesh):
            return f"result {i} comes out as [{want}], the type says [{have}]"
    return ""


# ---- one rule per signature ----

_Value = TypeVar("_Value")


class SignatureMemo(dict[Any, Any]):
    """A memo for what follows from types and properties. Attributes are compared by identity,
    which is cheap and enough, since equal ones are mostly the same object; the memo keeps them
    alive, so that an id stays theirs."""

    LIMIT = 100_000

    def get_or(self, key_parts: tuple[Any, ...], make: Callable[[], _Value]) -> _Value:
        key = tuple(map(id, key_parts))
        found = self.get(key)
        if found is None:
            if len(self) > self.LIMIT:
                self.clear()
            found = self[key] = (key_parts, make())
        return found[1]


_rules = SignatureMemo()
_verified = SignatureMemo()


def forget_signatures() -> None:
    """Empties the memos: what follows from a signature is another than before."""
    _rules.clear()
    _verified.clear()


def rule_of(
    op: type[TensorOp],
    operands: tuple[TensorType, ...],
    results: tuple[TensorType, ...],
    props: Props,
) -> Factors:
    """The factors of an op of this signature, made once."""
    parts = (op, *operands, None, *results, None, *props.values())
    return _rules.get_or(parts, lambda: op.rule(operands, results, props))


# ---- making properties ----


@lru_cache(maxsize=4096)
def int_attr(n: int) -> IntegerAttr:
    return IntegerAttr(n, i64)


@lru_cache(maxsize=4096)
def float_attr(x: float) -> FloatAttr:
    return FloatAttr(x, f64)


@lru_cache(maxsize=4096)
def dims_attr(*dims: int) -> DimsAttr:
    return DimsAttr(dims)


def dims_of(props: Props, name: str, rank: int) -> tuple[int, ...]:
    """The dimensions of a DimsAttr property, negative ones counted from the end.

    Raises:
        ShardirError: one does not exist, or stands twice.
    """
    attr = props[name]
    assert isinstance(attr, DimsAttr)
    for d in attr.data:
        if not -rank <= d < rank:
            raise ShardirError(f"[T4] no dimension {d} in a tensor of {rank} dimensions")
    dims = tuple(d % rank for d in attr.data)
    if len(set(dims)) != len(dims):
        raise ShardirError(f"[T4] a dimension stands twice in {name} {list(attr.data)}")
    return dims


def int_of(props: Props, name: str) -> int:
    attr = props[name]
    assert isinstance(attr, IntegerAttr)
    return attr.value.data


def axis_of(props: Props, name: str, rank: int) -> int:
    """A single dimension, counted from the end when negative."""
    d = int_of(props, name)
    if not -rank <= d < rank:
        raise ShardirError(f"[T4] no dimension {d} in a tensor of {rank} dimensions")
    return d % rank


def float_of(op: Operation, name: str) -> float:
    attr = op.properties[name]
    assert isinstance(attr, FloatAttr)
    return attr.value.data


def letters(n: int, prefix: str = "d") -> list[str]:
    """Names for n factors."""
    return [f"{prefix}{i}" for i in range(n)]


def same_element(operands: Types) -> Attribute:
    """The one element type of all operands."""
    first = operands[0].element_type
    for t in operands[1:]:
        if t.element_type is not first and t.element_type != first:
            raise ShardirError(
                f"[T5] element types differ: {first} and {t.element_type}; nn.convert one"
            )
    return first


def arithmetic_element(op: str, operands: Types) -> Attribute:
    """The one element type of all operands, with which one can calculate."""
    element = same_element(operands)
    if element == i1:
        raise ShardirError(f"[T5] {op} wants numbers, not i1; nn.convert it, or nn.select")
    return element
