"""The `train` dialect: what to differentiate, how parameters start and how they are updated.

    func.func @loss(%x: tensor<8x4xf32> {train.input = #train.init<normal, mean = 0.0, std = 1.0>},
                    %w: tensor<4x2xf32> {train.parameter = "w", train.init = #train.init<...>})
        -> tensor<f32> { ... }
    train.step @step of @loss <momentum, lr = 0.1, momentum = 0.9>

A parameter may say `train.fusion = 2 : i64`: its gradient is communicated in one buffer with those
of the other parameters of that index.

`distributed-autodiff` turns a `train.step` into a function from inputs, parameters and states to
the loss and the updated parameters and states.
"""

from abc import ABC
from typing import Any, ClassVar

import numpy as np
from xdsl.dialects.builtin import (
    AnyFloat,
    DictionaryAttr,
    FloatAttr,
    IntegerAttr,
    StringAttr,
    SymbolNameConstraint,
    SymbolRefAttr,
    TensorType,
    f64,
    i64,
)
from xdsl.dialects.func import FuncOp
from xdsl.ir import Dialect
from xdsl.irdl import (
    IRDLOperation,
    irdl_attr_definition,
    irdl_op_definition,
    operand_def,
    prop_def,
    result_def,
    traits_def,
)
from xdsl.traits import SymbolOpInterface
from xdsl.utils.exceptions import VerifyException

from shardir.algebra.errors import ShardirError
from shardir.dialects.nn.base import (
    STRATEGY,
    Array,
    DimsAttr,
    Place,
    Props,
    Types,
    float_of,
)
from shardir.dialects.nn.elementwise import Elementwise, needs_float
from shardir.dialects.text import OptionsAttr

# ---- attributes ----


@irdl_attr_definition
class InitAttr(OptionsAttr):
    """How a value starts: drawn by its global position, so that every mesh draws the same, or read
    from an array of an .npz file, in rows."""

    name = "train.init"
    KINDS: ClassVar[dict[str, dict[str, type | float]]] = {
        "normal": {"mean": 0.0, "std": 1.0},
        "uniform": {"low": 0.0, "high": 1.0},
        "integers": {"low": int, "high": int},
        "constant": {"value": float},
        "file": {"path": str, "array": str},
    }


@irdl_attr_definition
class OptimizerAttr(OptionsAttr):
    """The optimizer of a train step, with its numbers."""

    name = "train.optimizer"
    KINDS: ClassVar[dict[str, dict[str, type | float]]] = {
        "sgd": {"lr": float, "weight_decay": 0.0},
        "momentum": {"lr": float, "momentum": float, "weight_decay": 0.0},
    }


# ---- what to differentiate ----


class _OfFunction(IRDLOperation, ABC):
    sym_name = prop_def(SymbolNameConstraint())
    function = prop_def(SymbolRefAttr)

    def find(self) -> FuncOp:
        """The function. Raises VerifyException when there is none of that name with a body."""
        wanted = self.function.root_reference.data
        module = self.parent_op()
        if module is not None:
            for op in module.regions[0].block.ops:
                if isinstance(op, FuncOp) and op.sym_name.data == wanted:
                    if not op.body.blocks:
                        raise VerifyException(f"[G1] function @{wanted} has no body")
                    return op
        raise VerifyException(f"[G1] no function @{wanted}")


@irdl_op_definition
class StepOp(_OfFunction):
    """A training step: the function's loss, and its parameters updated by the optimizer."""

    name = "train.step"
    optimizer = prop_def(OptimizerAttr)
    traits = traits_def(SymbolOpInterface())
    assembly_format = "$sym_name `of` $function $optimizer attr-dict"

    def verify_(self) -> None:
        f = self.find()
        outs = list(zip(f.function_type.outputs.data, result_attrs(f), strict=True))
        losses = [t for t, marks in outs if "train.updates" not in marks]
        loss = losses[0] if len(losses) == 1 else None
        if not isinstance(loss, TensorType) or loss.get_shape() != ():
            marks = " and mark what it updates" if len(losses) > 1 else ""
            raise VerifyException(
                f"[G2] @{f.sym_name.data} must return one scalar, the loss; reduce it{marks}"
            )
        check_updates(f)
        if not isinstance(loss.element_type, AnyFloat):
            raise VerifyException(
                f"[G2] @{f.sym_name.data} returns a loss of {loss.element_type}, which has no "
                "gradient; nn.convert what it is made of to floats"
            )
        if not any("train.parameter" in a for a in arg_attrs(f)):
            raise VerifyException(
                f"[G3] @{f.sym_name.data} has no parameter; mark arguments with "
                '{train.parameter = "name", train.init = #train.init<...>}'
            )
        check_fusion(f)
        keys = [text_attr(a, "train.parameter") for a in arg_attrs(f) if "train.parameter" in a]
        for key in keys:
            if not key or keys.count(key) > 1:
                raise VerifyException(
                    f"[G6] @{f.sym_name.data}: {keys.count(key)} arguments have the parameter "
                    f"{key!r}; give each a name of its own (a shared weight is one argument)"
                )


@irdl_op_definition
class GradientOp(_OfFunction):
    """A function from the arguments (and, for each result that is no scalar, its cotangent) to
    the results and the cotangents of the arguments `wrt`."""

    name = "train.gradient"
    wrt = prop_def(DimsAttr)
    traits = traits_def(SymbolOpInterface())
    assembly_format = "$sym_name `of` $function `wrt` $wrt attr-dict"

    def verify_(self) -> None:
        f = self.find()
        n = len(f.function_type.inputs)
        for i in self.wrt.data:
            if not 0 <= i < n:
                raise VerifyException(f"[G4] @{f.sym_name.data} has no argument {i}")
        if len(set(self.wrt.data)) != len(self.wrt.data):
            raise VerifyException(f"[G4] an argument stands twice in wrt {list(self.wrt.data)}")
        check_fusion(f)


@irdl_op_definition
class BackwardOp(IRDLOperation):
    """Where the forward part of a function ends and its backward part begins."""

    name = "train.backward"
    assembly_format = "attr-dict"


def arg_attrs(f: FuncOp) -> list[dict[str, Any]]:
    """The attributes of each argument."""
    n = len(f.function_type.inputs)
    if f.arg_attrs is None:
        return [{} for _ in range(n)]
    return [dict(d.data) for d in f.arg_attrs]


def result_attrs(f: FuncOp) -> list[dict[str, Any]]:
    """The attributes of each result."""
    n = len(f.function_type.outputs)
    if f.res_attrs is None:
        return [{} for _ in range(n)]
    return [dict(d.data) for d in f.res_attrs]


def updated_argument(f: FuncOp, marks: dict[str, Any]) -> int | None:
    """The argument whose `train.state` a result with these attributes updates."""
    name = text_attr(marks, "train.updates")
    states = [text_attr(a, "train.state") for a in arg_attrs(f)]
    return states.index(name) if name is not None and name in states else None


def check_updates(f: FuncOp) -> None:
    """Raises VerifyException when a result is marked as the update of what it can't be."""
    done: set[int] = set()
    for i, (t, marks) in enumerate(zip(f.function_type.outputs, result_attrs(f), strict=True)):
        if "train.updates" not in marks:
            continue
        name, at = marks["train.updates"], updated_argument(f, marks)
        where = f"[G7] result {i} of @{f.sym_name.data} updates {name}"
        if at is None:
            states = [str(a["train.state"]) for a in arg_attrs(f) if "train.state" in a]
            raise VerifyException(
                f"{where}, which is the train.state of no argument; "
                f"there is {', '.join(states) or 'none'}"
            )
        if at in done:
            raise VerifyException(f"{where}, which another result updates; one is the new value")
        done.add(at)
        old = f.function_type.inputs.data[at]
        assert isinstance(t, TensorType) and isinstance(old, TensorType)
        if (t.element_type, t.get_shape()) != (old.element_type, old.get_shape()):
            raise VerifyException(f"{where}, a {old}: it is {t}; reshape or convert it")


def check_fusion(f: FuncOp) -> None:
    """Raises VerifyException when an argument's `train.fusion` is no index."""
    for i, attrs in enumerate(arg_attrs(f)):
        index = attrs.get("train.fusion")
        if index is not None and not (isinstance(index, IntegerAttr) and index.type == i64):
            raise VerifyException(
                f"[G5] train.fusion of argument {i} of @{f.sym_name.data} is an index "
                f"such as 2 : i64, not {index}"
            )


def set_arg_attrs(f: FuncOp, attrs: list[dict[str, Any]]) -> None:
    from xdsl.dialects.builtin import ArrayAttr

    f.properties["arg_attrs"] = ArrayAttr(DictionaryAttr(a) for a in attrs)


def text_attr(attrs: dict[str, Any], name: str) -> str | None:
    """The string of a string attribute, or None."""
    attr = attrs.get(name)
    return attr.data if isinstance(attr, StringAttr) else None


# ---- optimizers ----


class Update(Elementwise, ABC):
    """A parameter and its states after one step, from its gradient; all of one shape."""

    @classmethod
    def infer(cls, operands: Types, props: Props) -> list[TensorType]:
        needs_float(cls.name, operands)
        for t in operands[1:]:
            if t != operands[0]:
                raise ShardirError(
                    f"[T6] the parameter is {operands[0]}, its gradient or state {t}"
                )
        return [t for i, t in enumerate(operands) if i != 1]

    @classmethod
    def rule(cls, operands: Types, results: Types, props: Props):
        one = super().rule(operands, results[:1], props)
        from dataclasses import replace

        return replace(one, results=one.results * len(results))


@irdl_op_definition
class SgdOp(Update):
    """w - lr (g + weight_decay w)"""

    name = "train.sgd"
    w = operand_def(TensorType)
    g = operand_def(TensorType)
    lr = prop_def(FloatAttr.constr(type=f64))
    weight_decay = prop_def(FloatAttr.constr(type=f64))
    new_w = result_def(TensorType)
    assembly_format = f"$w `,` $g `lr` $lr `weight_decay` $weight_decay {STRATEGY}"

    def evaluate(self, place: Place, *arrays: Array) -> Array:
        w, g = arrays
        g = g + float_of(self, "weight_decay") * w
        return (w - float_of(self, "lr") * g).astype(w.dtype)


@irdl_op_definition
class MomentumOp(Update):
    """v' = momentum v + g + weight_decay w; w' = w - lr v'"""

    name = "train.momentum"
    w = operand_def(TensorType)
    g = operand_def(TensorType)
    v = operand_def(TensorType)
    lr = prop_def(FloatAttr.constr(type=f64))
    momentum = prop_def(FloatAttr.constr(type=f64))
    weight_decay = prop_def(FloatAttr.constr(type=f64))
    new_w = result_def(TensorType)
    new_v = result_def(TensorType)
    assembly_format = (
        "$w `,` $g `,` $v `lr` $lr `momentum` $momentum `weight_decay` $weight_decay " + STRATEGY
    )

    def evaluate(self, place: Place, *arrays: Array) -> tuple[Array, ...]:
        w, g, v = arrays
        v = float_of(self, "momentum") * v + g + float_of(self, "weight_decay") * w
        v = np.asarray(v, dtype=w.dtype)
        return (w - float_of(self, "lr") * v).astype(w.dtype), v


OPTIMIZERS: dict[str, tuple[type[Update], tuple[str, ...]]] = {
    "sgd": (SgdOp, ()),
    "momentum": (MomentumOp, ("momentum",)),
}
"""The update op of each optimizer, and the names of its states (all start at zero)."""

Train = Dialect(
    "train",
    [StepOp, GradientOp, BackwardOp, SgdOp, MomentumOp],
    [InitAttr, OptimizerAttr],
)
