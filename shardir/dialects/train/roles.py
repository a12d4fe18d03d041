"""The roles of a function's arguments and results, as attributes.

    %x {train.input = #train.init<normal>}
    %w {train.parameter = "w", train.init = #train.init<normal>}
    %m {train.state = "w.momentum", train.init = #train.init<constant, value = 0.0>}
    -> (tensor<f32>, tensor<4x2xf32> {train.updates = "w"})
    -> (tensor<f32>, tensor<4x2xf32> {train.gradient = "w"})
    -> (tensor<f32>, tensor<f32> {train.metric = "accuracy"})

A function that returns gradients (of its loss) is not differentiated. A metric is reported beside
the loss, without a gradient; over several microbatches it is averaged. An argument without such an
attribute is an input. A parameter may also have:

    train.fusion = 2 : i64            gradients with equal indices are communicated in one buffer
    train.weight_decay = 0.0 : f64    replaces the optimizer's weight decay
    train.lr_scale = 0.1 : f64        multiplies the learning rate
    train.state_layout = #dist.layout<@m, [{dp}, {}]>    the layout of its states
    train.lr = #train.schedule<...>   replaces the learning rate
    train.rule = @lion                the function that updates it (rules.py)

`train.microbatches = 4 : i64`: dimension 0 of an input of a step, or of a result of a forward part
alone, counts microbatches.
"""

from collections.abc import Mapping
from enum import StrEnum
from math import inf
from typing import Any, NamedTuple

from xdsl.dialects.builtin import (
    ArrayAttr,
    DictionaryAttr,
    FloatAttr,
    IntegerAttr,
    StringAttr,
    SymbolRefAttr,
    TensorType,
    UnitAttr,
    i64,
)
from xdsl.dialects.func import FuncOp
from xdsl.ir import Attribute, Operation
from xdsl.utils.exceptions import VerifyException

from shardir.algebra.layout import Layout
from shardir.diagnostics import coded
from shardir.dialects.dist import LayoutAttr, with_layout
from shardir.dialects.signatures import SignatureMemo

STEP, UPDATES, MICROBATCHES = "train.step", "train.updates", "train.microbatches"
STATES = "train.states"
"""On a step: the name of its optimizer's states."""

UPDATE, UPDATE_OF = "update", "train.update_of"
"""The end of the name of a function that updates the parameters of a step apart from its backward
part, and the attribute with the name of the step."""

GRADIENT, METRIC = "train.gradient", "train.metric"
FUSION, WEIGHT_DECAY, LR_SCALE = "train.fusion", "train.weight_decay", "train.lr_scale"
OWN_LR = "train.lr"
STATE_LAYOUT = "train.state_layout"
RULE, SCALAR = "train.rule", "train.scalar"
WEIGHS = "train.weighs"
"""On an op that reads a number of tokens: the index of the result that is the mean over these
tokens. The number is the result's weight in means over several batches."""

Attributes = Mapping[str, Attribute]


class Role(StrEnum):
    """The role of an argument in its function."""

    PARAMETER = "parameter"
    STATE = "state"
    INPUT = "input"

    @property
    def attribute(self) -> str:
        """The attribute of the role."""
        return f"train.{self}"


_RETAINED = tuple((role, role.attribute) for role in (Role.PARAMETER, Role.STATE))


class Argument(NamedTuple):
    """The role and attributes of an argument; `key` is the name of a parameter or state."""

    role: Role
    key: str | None
    attributes: Attributes

    @staticmethod
    def of(attributes: Attributes) -> "Argument":
        for role, name in _RETAINED if attributes else ():
            if key := text_attr(attributes, name):
                return Argument(role, key, attributes)
        return Argument(Role.INPUT, None, attributes)

    @property
    def is_retained(self) -> bool:
        """Whether the argument keeps its value between steps: a parameter or a state."""
        return self.role is not Role.INPUT

    @property
    def init(self) -> Attribute | None:
        """The initial values of a parameter or state, or the values of an input."""
        values = self.attributes.get(Role.INPUT.attribute) if self.role is Role.INPUT else None
        return values or self.attributes.get("train.init")

    @property
    def microbatches(self) -> int | None:
        """The number of microbatches in dimension 0 of an input; None if it has no such
        dimension."""
        count = self.attributes.get(MICROBATCHES)
        return count.value.data if isinstance(count, IntegerAttr) else None

    @property
    def fusion(self) -> Attribute | None:
        """The index of the buffer in which a parameter's gradient is communicated."""
        return self.attributes.get(FUSION)

    def weight_decay(self, default: float) -> float:
        return number_attr(self.attributes, WEIGHT_DECAY, default)

    @property
    def lr_scale(self) -> float:
        return number_attr(self.attributes, LR_SCALE, 1.0)

    @property
    def lr(self) -> Attribute | None:
        """The schedule of a parameter in place of the optimizer's."""
        return self.attributes.get(OWN_LR)

    @property
    def rule(self) -> str | None:
        """The name of the function that updates a parameter in place of the optimizer."""
        rule = self.attributes.get(RULE)
        return rule.string_value() if isinstance(rule, SymbolRefAttr) else None

    @property
    def state_layout(self) -> Layout | None:
        """The annotated layout of a parameter's states."""
        layout = self.attributes.get(STATE_LAYOUT)
        return layout.data if isinstance(layout, LayoutAttr) else None


def state_attrs(key: str, init: Attribute) -> dict[str, Attribute]:
    """The attributes of an argument that is a state."""
    return {Role.STATE.attribute: StringAttr(key), "train.init": init}


def updates_attrs(key: str) -> dict[str, Attribute]:
    """The attributes of a result that is the new value of a parameter or state."""
    return {UPDATES: StringAttr(key)}


def gradient_attrs(key: str) -> dict[str, Attribute]:
    """The attributes of a result that is the gradient of a parameter."""
    return {GRADIENT: StringAttr(key)}


def metric_attrs(name: str) -> dict[str, Attribute]:
    """The attributes of a result that is a metric of a step: a scalar beside the loss."""
    return {METRIC: StringAttr(name)}


def weighing_attrs(result: int) -> dict[str, Attribute]:
    """Return the attributes of an op that reads the number of tokens of a result."""
    return {WEIGHS: IntegerAttr(result, i64)}


def weighed_by(op: Operation) -> int | None:
    """Return the index of the result whose number of tokens an op reads; None for other ops."""
    result = op.attributes.get(WEIGHS)
    return result.value.data if isinstance(result, IntegerAttr) else None


def of_microbatches(attributes: Attributes, count: int) -> dict[str, Attribute]:
    """Add to the attributes of an input or a result that dimension 0 counts microbatches."""
    return {**attributes, MICROBATCHES: IntegerAttr(count, i64)}


# ---- of a function ----


def arg_attrs(f: FuncOp) -> list[dict[str, Any]]:
    """The attributes of each argument."""
    if f.arg_attrs is None:
        return [{} for _ in f.function_type.inputs]
    return [dict(d.data) for d in f.arg_attrs]


def result_attrs(f: FuncOp) -> list[dict[str, Any]]:
    """The attributes of each result."""
    if f.res_attrs is None:
        return [{} for _ in f.function_type.outputs]
    return [dict(d.data) for d in f.res_attrs]


def set_arg_attrs(f: FuncOp, attributes: list[dict[str, Any]]) -> None:
    f.properties["arg_attrs"] = ArrayAttr(DictionaryAttr(a) for a in attributes)


def set_result_attrs(f: FuncOp, attributes: list[dict[str, Any]]) -> None:
    f.properties["res_attrs"] = ArrayAttr(DictionaryAttr(a) for a in attributes)


def remove_annotations(f: FuncOp, *names: str) -> None:
    """Remove attributes of arguments, such as `train.state_layout`."""
    attributes = arg_attrs(f)
    if any(name in a for a in attributes for name in names):
        set_arg_attrs(f, [{k: x for k, x in a.items() if k not in names} for a in attributes])


def arguments(f: FuncOp) -> list[Argument]:
    """The arguments of a function by their attributes."""
    if f.arg_attrs is None:
        return [Argument.of({}) for _ in f.function_type.inputs]
    cached = _arguments.of(
        f.arg_attrs, lambda attributes: [Argument.of(a.data) for a in attributes]
    )
    return cached.copy()


_arguments = SignatureMemo(limit=8)
"""A cache for the last functions: passes ask often, and a function has thousands of arguments."""


def updated_keys(f: FuncOp) -> list[str | None]:
    """The key of the parameter or state that each result updates, or None."""
    if f.res_attrs is None:
        return [None for _ in f.function_type.outputs]
    return [text_attr(a.data, UPDATES) for a in f.res_attrs]


def metric_names(f: FuncOp) -> list[str | None]:
    """The name of each result that is a metric, else None."""
    return [text_attr(a, METRIC) for a in result_attrs(f)]


def result_batches(f: FuncOp) -> list[int | None]:
    """The number of microbatches in dimension 0 of each result; None without such a dimension."""
    return [Argument.of(a).microbatches for a in result_attrs(f)]


def updated_arguments(f: FuncOp) -> list[int | None]:
    """The index of the argument that each result updates, or None."""
    index = {a.key: i for i, a in reversed([*enumerate(arguments(f))]) if a.is_retained}
    return [index.get(key) for key in updated_keys(f)]


def gradient_arguments(f: FuncOp) -> list[int | None]:
    """The index of the parameter whose gradient each result is, or None."""
    index = {a.key: i for i, a in enumerate(arguments(f)) if a.role is Role.PARAMETER}
    return [index.get(text_attr(a, GRADIENT) or "") for a in result_attrs(f)]


def is_step(f: FuncOp) -> bool:
    """Whether a function is a training step: it owns its parameters and states."""
    return STEP in f.attributes


def mark_step(f: FuncOp) -> None:
    f.attributes[STEP] = UnitAttr()


def without_layout(type: Attribute) -> Attribute:
    """A tensor type without its layout; other types unchanged."""
    return with_layout(type, None) if isinstance(type, TensorType) else type


def text_attr(attributes: Attributes, name: str) -> str | None:
    """The string of a string attribute, or None."""
    attr = attributes.get(name)
    return attr.data if isinstance(attr, StringAttr) else None


def number_attr(attributes: Attributes, name: str, default: float) -> float:
    """The value of an attribute such as `train.lr_scale = 0.1 : f64`.

    Raises:
        VerifyException: the attribute is not a float, or negative or infinite.
    """
    attr = attributes.get(name)
    if attr is None:
        return default
    if not (isinstance(attr, FloatAttr) and 0 <= attr.value.data < inf):
        raise VerifyException(
            coded(
                "G9",
                f"expected {name} to be a finite f64 of 0 or more, got {attr}",
                use=f"write {name} = 0.1 : f64",
            )
        )
    return attr.value.data
