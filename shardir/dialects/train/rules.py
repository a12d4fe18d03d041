"""Rules: functions that update one parameter each, in place of the optimizer of a step.

    func.func private @lion(%w: tensor<4x2xf32>, %g: tensor<4x2xf32>,
        %m: tensor<4x2xf32> {train.state = "exp_avg", train.init = #train.init<...>},
        %lr: tensor<f64> {train.scalar = "lr"}) -> (tensor<4x2xf32>, tensor<4x2xf32>)
        attributes {train.rule = "elementwise"} { ... }
    func.func @loss(%w: tensor<4x2xf32> {train.parameter = "w", train.rule = @lion}, ...)

The arguments are the parameter, its gradient, its states and scalars; the results are the new
parameter and the new states. `distributed-autodiff` puts the ops of the rule into the step; no
other pass sees them. An "elementwise" rule runs on shards. In a "whole" one the ops that are not
elementwise, and those between two such, run on unsharded values.
"""

from xdsl.dialects.builtin import StringAttr, TensorType, f64
from xdsl.dialects.func import FuncOp, ReturnOp
from xdsl.ir import Attribute, Operation
from xdsl.utils.exceptions import VerifyException

from shardir.diagnostics import coded
from shardir.dialects.dist import tensor
from shardir.dialects.locations import file_location
from shardir.dialects.nn.base import TensorOp
from shardir.dialects.nn.elementwise import Elementwise
from shardir.dialects.nn.types import unsharded_type
from shardir.dialects.train.options import InitAttr
from shardir.dialects.train.roles import RULE, SCALAR, Role, arguments, text_attr, without_layout

ELEMENTWISE, WHOLE = "elementwise", "whole"
"""The kinds of rules."""

SCALARS = ("lr", "done")
"""The scalars of a rule, of type f64: the learning rate of the parameter, and the number of steps
done before this one."""


def is_rule(f: FuncOp) -> bool:
    """Whether a function is a rule."""
    return RULE in f.attributes


def acts_on_elements(op: Operation) -> bool:
    """Whether an op runs on shards of its operands without communication: it is elementwise, or
    its operands are scalars."""
    return isinstance(op, Elementwise | ReturnOp) or not any(
        unsharded_type(v).get_shape() for v in op.operands
    )


def first_on_whole(f: FuncOp) -> Operation | None:
    """Return the first op of a rule that needs unsharded operands."""
    return next((op for op in f.body.block.ops if not acts_on_elements(op)), None)


def not_elementwise(op: Operation) -> str:
    """Return the message about an op in an elementwise rule."""
    place = file_location(op.location)
    at = f" at {place[0]}:{place[1]}" if place else ""
    return f"expected an elementwise update, got {op.name}{at}"


def check_rule(f: FuncOp, parameter: TensorType) -> None:
    """Raises VerifyException if a function is no rule for parameters of this type."""

    def wrong(wanted: str, got: object) -> VerifyException:
        return VerifyException(coded("G18", f"expected {wanted} of the rule @{name}, got {got}"))

    name, wanted = f.sym_name.data, without_layout(parameter)
    args = list(zip(f.function_type.inputs, arguments(f), strict=True))
    kind = f.attributes.get(RULE)
    if not isinstance(kind, StringAttr) or kind.data not in (ELEMENTWISE, WHOLE):
        raise wrong(f'the attribute {RULE} = "{ELEMENTWISE}" or "{WHOLE}"', kind)
    assert isinstance(wanted, TensorType)
    if [t for t, _ in args[:2]] != [wanted, wanted]:
        got = ", ".join(str(t) for t, _ in args[:2])
        raise wrong(f"a parameter and a gradient of {wanted} as first arguments", got or "none")
    results: list[Attribute] = [wanted]
    for t, argument in args[2:]:
        if argument.role is Role.STATE:
            sizes = t.get_shape() if isinstance(t, TensorType) else None
            if sizes not in (wanted.get_shape(), ()):
                raise wrong(f"a state of the parameter's shape, or a scalar, as {argument.key}", t)
            if not isinstance(argument.init, InitAttr):
                raise wrong(f"the initial values of {argument.key}, train.init", argument.init)
            results.append(t)
        elif text_attr(argument.attributes, SCALAR) not in SCALARS or t != tensor(f64, ()):
            scalars = " or ".join(f'{SCALAR} = "{n}"' for n in SCALARS)
            raise wrong(f"states, and scalars of f64 with {scalars}", f"{t} {argument.attributes}")
    outputs = list(f.function_type.outputs)
    if outputs != results:
        shown = (", ".join(map(str, types)) for types in (results, outputs))
        raise wrong(f"the new parameter and states, {next(shown)}, as results", next(shown))
    for op in f.body.block.ops:
        if not isinstance(op, TensorOp | ReturnOp):
            raise wrong("ops on tensors", op.name)
    if kind.data == ELEMENTWISE and (op := first_on_whole(f)) is not None:
        use = f'use {RULE} = "{WHOLE}"'
        raise VerifyException(coded("G18", not_elementwise(op), use=use))
