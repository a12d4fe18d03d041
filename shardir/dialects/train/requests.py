"""What to differentiate: `train.step` and `train.gradient`, what arguments say of themselves, and
the marks between the parts of what is made of them.

A parameter may say `train.fusion = 2 : i64`: its gradient is communicated in one buffer with those
of the other parameters of that index. `train.weight_decay = 0.0 : f64` stands in place of the
optimizer's number for it, and `train.lr_scale = 0.1 : f64` multiplies its learning rate.
"""

from abc import ABC
from math import inf
from typing import Any

from xdsl.dialects.builtin import (
    AnyFloat,
    ArrayAttr,
    DictionaryAttr,
    FloatAttr,
    IntegerAttr,
    StringAttr,
    SymbolNameConstraint,
    SymbolRefAttr,
    TensorType,
    i64,
)
from xdsl.dialects.func import FuncOp
from xdsl.irdl import IRDLOperation, irdl_op_definition, opt_prop_def, prop_def, traits_def
from xdsl.traits import SymbolOpInterface
from xdsl.utils.exceptions import VerifyException

from shardir.dialects.nn.base import DimsAttr
from shardir.dialects.train.options import (
    AccumulateAttr,
    ClipAttr,
    LossScaleAttr,
    OptimizerAttr,
)


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
    accumulate = opt_prop_def(AccumulateAttr)
    clip = opt_prop_def(ClipAttr)
    loss_scale = opt_prop_def(LossScaleAttr)
    traits = traits_def(SymbolOpInterface())
    assembly_format = (
        "$sym_name `of` $function $optimizer (`accumulate` $accumulate^)? (`clip` $clip^)? "
        "(`loss_scale` $loss_scale^)? attr-dict"
    )

    @property
    def microbatches(self) -> int:
        """How many times a step runs the function."""
        return 1 if self.accumulate is None else self.accumulate.values["microbatches"]

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
        check_marks(f)
        for attrs in arg_attrs(f):
            for name in OWN_NUMBERS:
                number_attr(attrs, name, 0.0)
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
        name = self.function.root_reference.data
        n = len(self.signature(())[0])
        for i in self.wrt.data:
            if not 0 <= i < n:
                raise VerifyException(f"[G4] @{name} has no argument {i}")
        if len(set(self.wrt.data)) != len(self.wrt.data):
            raise VerifyException(f"[G4] an argument stands twice in wrt {list(self.wrt.data)}")
        if self.maker() is None:
            check_marks(self.find())

    def maker(self) -> "GradientOp | None":
        """The request that makes the function, where that is a gradient itself."""
        wanted = self.function.root_reference.data
        module = self.parent_op()
        found = module.regions[0].block.ops if module is not None else ()
        return next(
            (o for o in found if isinstance(o, GradientOp) and o.sym_name.data == wanted), None
        )

    def signature(self, above: tuple["GradientOp", ...]) -> tuple[list[Any], list[Any]]:
        """The types of the function's arguments and results. `above`: the requests that ask.

        Raises:
            VerifyException: there is no such function, or a gradient is to be made of itself.
        """
        if self in above:
            raise VerifyException(f"[G1] @{self.sym_name.data} is to be made of itself")
        maker = self.maker()
        if maker is None:
            type = self.find().function_type
            return list(type.inputs), list(type.outputs)
        inputs, outputs = maker.signature((*above, self))
        seeds = [
            t for t in outputs
            if isinstance(t, TensorType) and isinstance(t.element_type, AnyFloat) and t.get_shape()
        ]  # fmt: skip
        wrt = [inputs[i] for i in maker.wrt.data if 0 <= i < len(inputs)]
        return [*inputs, *seeds], [*outputs, *wrt]


class Mark(IRDLOperation, ABC):
    """Where a part of a function begins."""

    assembly_format = "attr-dict"


@irdl_op_definition
class BackwardOp(Mark):
    """Where the forward part of a function (of a microbatch) ends and its backward part begins."""

    name = "train.backward"


@irdl_op_definition
class MicrobatchOp(Mark):
    """Where the forward part of the next microbatch begins."""

    name = "train.microbatch"


@irdl_op_definition
class UpdateOp(Mark):
    """Where the backward part of a step ends, and what follows from its gradients begins."""

    name = "train.update"


MARKS: list[type[Mark]] = [BackwardOp, MicrobatchOp, UpdateOp]


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


def check_marks(f: FuncOp) -> None:
    """Raises VerifyException when an argument is two things at once, or its `train.fusion` is no
    index."""
    for i, attrs in enumerate(arg_attrs(f)):
        kinds = [k for k in ("train.parameter", "train.state", "train.input") if k in attrs]
        if len(kinds) > 1:
            raise VerifyException(
                f"[G6] argument {i} of @{f.sym_name.data} has {' and '.join(kinds)}; "
                "it is one of them: leave the other out"
            )
        index = attrs.get("train.fusion")
        is_index = isinstance(index, IntegerAttr) and index.type == i64 and index.value.data >= 0
        if index is not None and not is_index:
            raise VerifyException(
                f"[G5] train.fusion of argument {i} of @{f.sym_name.data} is an index "
                f"such as 2 : i64, not {index}"
            )


def set_arg_attrs(f: FuncOp, attrs: list[dict[str, Any]]) -> None:
    f.properties["arg_attrs"] = ArrayAttr(DictionaryAttr(a) for a in attrs)


MICROBATCH = "train.microbatch"
"""Marks an input of a step with the number of the microbatch that it belongs to, from 0."""


def microbatch_of(attrs: dict[str, Any]) -> int | None:
    """The microbatch that an input belongs to, where there are several."""
    attr = attrs.get(MICROBATCH)
    return attr.value.data if isinstance(attr, IntegerAttr) else None


def text_attr(attrs: dict[str, Any], name: str) -> str | None:
    """The string of a string attribute, or None."""
    attr = attrs.get(name)
    return attr.data if isinstance(attr, StringAttr) else None


OWN_NUMBERS = ("train.weight_decay", "train.lr_scale")
"""What a parameter may say of itself to its optimizer."""


def number_attr(attrs: dict[str, Any], name: str, default: float) -> float:
    """The number of an attribute such as `train.lr_scale = 0.1 : f64`.

    Raises:
        VerifyException: it is no number, or a negative one.
    """
    attr = attrs.get(name)
    if attr is None:
        return default
    if not (isinstance(attr, FloatAttr) and 0 <= attr.value.data < inf):
        raise VerifyException(f"[G9] {name} is a number, at least 0, such as 0.1 : f64, not {attr}")
    return attr.value.data
