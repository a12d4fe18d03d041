"""The builder of a function: its arguments, ops and results."""

import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from xdsl.dialects.builtin import (
    FileLineColLoc,
    FloatAttr,
    IntAttr,
    IntegerAttr,
    LocationAttr,
    StringAttr,
    SymbolRefAttr,
    TensorType,
    UnknownLoc,
    f64,
    i64,
)
from xdsl.dialects.func import FuncOp, ReturnOp
from xdsl.ir import Attribute, Block, Region, SSAValue
from xdsl.utils.exceptions import VerifyException

from shardir.build.attributes import element_type, layout_attr
from shardir.build.ops import Ops, ops_of
from shardir.build.values import OpScope, Value
from shardir.diagnostics import ShardirError
from shardir.dialects.locations import file_name
from shardir.dialects import nn
from shardir.dialects.dist import tensor
from shardir.dialects.nn.base import Props
from shardir.dialects.train import (
    RULE,
    SCALAR,
    InitAttr,
    Role,
    set_arg_attrs,
    set_result_attrs,
    gradient_attrs,
    metric_attrs,
    updates_attrs,
)
from shardir.rewriting.functions import update_signature
from shardir.rewriting.rewriter import Rewriter

PACKAGE = str(Path(__file__).parent.parent)


class FunctionBuilder(OpScope):
    """Builds a function of a module. `Module.function` makes one."""

    def __init__(self, name: str, private: bool, mesh: str | None, rule: str | None = None):
        self.name, self._mesh = name, mesh
        self.block = Block()
        visibility = "private" if private else None
        self.func = FuncOp(name, ((), ()), Region(self.block), visibility)
        self.func.location = caller()
        if rule is not None:
            self.func.attributes[RULE] = StringAttr(rule)
        self._rewriter = Rewriter(None, self.block)
        self._arguments: list[dict[str, Attribute]] = []
        self._updates: list[tuple[str, Value]] = []
        self._location: LocationAttr | None = None
        self.returned = False
        self.nn = Ops(self)

    def __getattr__(self, name: str) -> Ops:
        """Return the ops of the dialect of an extension."""
        if name.startswith("_"):
            raise AttributeError(f"expected an attribute of a function, got {name!r}")
        return ops_of(name, self)

    @property
    def mesh_name(self) -> str:
        if self._mesh is None:
            raise ShardirError('expected a mesh, got none; use Module(mesh="dp = 2, tp = 2")')
        return self._mesh

    # ---- arguments ----

    def input(
        self,
        name: str,
        shape: Sequence[int],
        dtype: str = "f32",
        *,
        layout: str | None = None,
        init: str | None = None,
    ) -> Value:
        """Add an input. Without other data its values are those of `init`: `normal, std = 1.0`, or
        `file, path = "digits.npz", array = "x"`."""
        attributes: dict[str, Attribute] = {}
        if init is not None:
            attributes[Role.INPUT.attribute] = InitAttr.read(init)
        return self._argument(name, shape, dtype, layout, attributes)

    def parameter(
        self,
        name: str,
        shape: Sequence[int],
        dtype: str = "f32",
        *,
        layout: str | None = None,
        init: str | None = None,
        weight_decay: float | None = None,
        lr_scale: float | None = None,
        fusion: int | None = None,
        state_layout: str | None = None,
        rule: str | None = None,
    ) -> Value:
        """Add a parameter, which a training step updates.

        Args:
            weight_decay: replaces the optimizer's.
            lr_scale: multiplies the optimizer's learning rate.
            fusion: parameters with the same number have their gradients communicated in one buffer.
            state_layout: the layout of the optimizer's states.
            rule: the name of the function that updates it in place of the optimizer.
        """
        attributes: dict[str, Attribute] = {}
        if weight_decay is not None:
            attributes["train.weight_decay"] = FloatAttr(weight_decay, f64)
        if lr_scale is not None:
            attributes["train.lr_scale"] = FloatAttr(lr_scale, f64)
        if fusion is not None:
            attributes["train.fusion"] = IntegerAttr(fusion, i64)
        if state_layout is not None:
            attributes["train.state_layout"] = layout_attr(state_layout, self.mesh_name)
        if rule is not None:
            attributes[RULE] = SymbolRefAttr(rule)
        return self._add_retained(Role.PARAMETER, name, shape, dtype, layout, init, attributes)

    def state(
        self,
        name: str,
        shape: Sequence[int],
        dtype: str = "f32",
        *,
        layout: str | None = None,
        init: str | None = None,
    ) -> Value:
        """Add a state: a value that is retained between steps, and that `update` replaces."""
        return self._add_retained(Role.STATE, name, shape, dtype, layout, init, {})

    def scalar(self, name: str) -> Value:
        """Add a scalar of a rule, f64: `lr`, the learning rate, or `done`, the number of steps
        before this one."""
        return self._argument(name, (), "f64", None, {SCALAR: StringAttr(name)})

    def _add_retained(
        self, role: Role, name: str, shape: Sequence[int], dtype: str, layout: str | None,
        init: str | None, attributes: dict[str, Attribute],
    ) -> Value:  # fmt: skip
        attributes[role.attribute] = StringAttr(name)
        if init is not None:
            attributes["train.init"] = InitAttr.read(init)
        return self._argument(name, shape, dtype, layout, attributes)

    def _argument(
        self, name: str, shape: Sequence[int], dtype: str, layout: str | None,
        attributes: dict[str, Attribute],
    ) -> Value:  # fmt: skip
        t = tensor(element_type(dtype), tuple(shape))
        if layout is not None:
            encoding = layout_attr(layout, self.mesh_name)
            t = TensorType(t.element_type, t.get_shape(), encoding)
        argument = self.block.insert_arg(t, len(self.block.args))
        argument.name_hint = hint_of(name)
        argument.location = self.location()
        self._arguments.append(attributes)
        return Value(self, argument)

    # ---- ops ----

    @property
    def builder(self) -> Rewriter:
        self._rewriter.location = self.location()
        return self._rewriter

    def location(self) -> LocationAttr:
        """The location of the next op: the line of Python outside this package that builds it."""
        return caller() if self._location is None else self._location

    @contextmanager
    def at(self, location: LocationAttr) -> Iterator[None]:
        """Give ops built within the block this location instead of their line of Python."""
        before, self._location = self._location, location
        try:
            yield
        finally:
            self._location = before

    def constant(self, values: Any, *, dtype: str = "f32") -> Value:
        """Add a constant: a number, or numbers in nested lists or an array."""
        import numpy as np

        array = np.asarray(values)
        element = element_type(dtype)
        t = tensor(element, array.shape)
        kind = float if dtype in ("f64", "f32", "bf16", "f16") else int
        numbers = [kind(v) for v in array.reshape(-1).tolist()]
        props = {"value": nn.dense_attr(t, numbers)}
        return self.op(nn.ConstantOp, [], props, shape=array.shape, dtype=dtype)[0]

    def op(
        self,
        kind: type[nn.TensorOp],
        operands: Sequence[Value],
        props: Props | None = None,
        *,
        shape: Sequence[int] | None = None,
        dtype: str | None = None,
        results: Sequence[tuple[Sequence[int], str]] | None = None,
    ) -> tuple[Value, ...]:
        """Add an op; return its results.

        Args:
            shape, dtype: of the result, for an op that does not infer it; default to those of the
                first operand.
            results: the shapes and dtypes of several results.

        Raises:
            ShardirError: the operands or the properties do not fit.
        """
        for v in operands:
            if v.function is not self:
                raise ShardirError(
                    f"expected operands of @{self.name}, got {v!r} of @{v.function.name}"
                )
        result: list[TensorType] | None = None
        if results is not None:
            result = [tensor(element_type(d), tuple(s)) for s, d in results]
        elif not kind.INFERRED:
            element = element_type(dtype) if dtype else _first(kind, operands).element_type
            sizes = tuple(shape) if shape is not None else _first(kind, operands).get_shape()
            result = [tensor(element, sizes)]
        elif shape is not None or dtype is not None:
            raise ShardirError(f"expected no shape and dtype of {kind.name}, which infers them")
        op = self.builder.op(kind, *(v.ssa for v in operands), props=props, result=result)
        for r in op.results:
            r.name_hint = r.name_hint or kind.name.partition(".")[2]
        return tuple(Value(self, r) for r in op.results)

    def while_loop(
        self,
        carried: Sequence[Value],
        condition: Callable[..., Value],
        body: Callable[..., Value | Sequence[Value]],
    ) -> tuple[Value, ...]:
        """Add a loop that runs as long as a condition holds; return the carried values after it.

            root, runs = f.while_loop(
                (x, n), lambda x, n: n < 8, lambda x, n: ((x + a / x) / 2, n + 1)
            )

        Args:
            condition: returns a bool of shape () from the carried values.
            body: returns the carried values of the next run, of the same shapes and dtypes. Both
                use no other values of the function.

        Raises:
            ShardirError: they return other things.
        """
        regions = [
            self._region(name, function, carried)
            for name, function in (("condition", condition), ("body", body))
        ]
        op = self.builder.op(nn.WhileOp, *(v.ssa for v in carried), regions=regions)
        try:
            op.verify_()
        except VerifyException as e:
            raise ShardirError(str(e)) from None
        for v, result in zip(carried, op.results, strict=True):
            result.name_hint = v.ssa.name_hint
        return tuple(Value(self, r) for r in op.results)

    def _region(
        self, name: str, function: Callable[..., Value | Sequence[Value]], carried: Sequence[Value]
    ) -> Region:
        region = FunctionBuilder(f"{name} of a loop in {self.name}", True, None)
        arguments = [
            region.input(v.ssa.name_hint or "carried", v.shape, v.dtype) for v in carried
        ]
        results = function(*arguments)
        values = [results] if isinstance(results, Value) else [*results]
        for v in values:
            if not isinstance(v, Value) or v.function is not region:
                raise ShardirError(
                    f"expected values of the {region.name}, computed from its arguments, got {v!r}"
                )
        return region.as_region(values)

    def as_region(self, results: Sequence[Value]) -> Region:
        """Return what has been built as a region of `nn.while` that yields `results`."""
        self.block.add_op(
            nn.YieldOp.create(operands=[v.ssa for v in results], location=self.location())
        )
        self.func.body.detach_block(self.block)
        return Region(self.block)

    # ---- results ----

    def update(self, state: str, value: Value) -> None:
        """Set the new value of the state `state`."""
        self._updates.append((state, value))

    def returns(
        self,
        *values: Value,
        gradients: Mapping[str, Value] | None = None,
        metrics: Mapping[str, Value] | None = None,
    ) -> None:
        """End the function. It returns these values and the new values of its states.

        Args:
            gradients: gradients by parameter name, which are then not derived.
            metrics: scalars by name, which a step reports.
        """
        gradients, metrics = gradients or {}, metrics or {}
        updates = [v for _, v in self._updates]
        operands = [*values, *metrics.values(), *gradients.values(), *updates]
        self.block.add_op(
            ReturnOp.create(operands=[v.ssa for v in operands], location=self.location())
        )
        update_signature(self.func)
        set_arg_attrs(self.func, self._arguments)
        marks = [metric_attrs(name) for name in metrics]
        marks += [gradient_attrs(name) for name in gradients]
        marks += [updates_attrs(name) for name, _ in self._updates]
        if marks:
            set_result_attrs(self.func, [*({} for _ in values), *marks])
        self.returned = True


def hint_of(name: str) -> str:
    """Return the valid SSA name for a name: `layer0.weight` for `0.weight`."""
    text = re.sub(r"[^\w$.-]", "_", name, flags=re.ASCII)
    return text if SSAValue.is_valid_name(text) else f"layer{text}"


def caller() -> LocationAttr:
    """Return the location of the line of Python that calls this package."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(PACKAGE):
        frame = frame.f_back
    if frame is None:
        return UnknownLoc()
    return file_line(frame.f_code.co_filename, frame.f_lineno)


def file_line(file: str, line: int) -> FileLineColLoc:
    """Return the location of a line of a file."""
    return FileLineColLoc(file_name(file), IntAttr(line), IntAttr(1))


def _first(kind: type[nn.TensorOp], operands: Sequence[Value]) -> TensorType:
    """Return the type of the first operand. Raises ShardirError without operands."""
    if not operands:
        raise ShardirError(f"expected the shape and the dtype of {kind.name}, got none")
    return operands[0].type
