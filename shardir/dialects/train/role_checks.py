"""Checks of the roles of a function's arguments and results.

They raise VerifyException with a code of docs/reference/invariants.md.
"""

from collections import Counter

from xdsl.dialects.builtin import IntegerAttr, TensorType, i64
from xdsl.dialects.func import FuncOp
from xdsl.utils.exceptions import VerifyException

from shardir.diagnostics import ShardirError, coded
from shardir.dialects.dist import check_type, find_mesh, global_type, with_layout
from shardir.dialects.nn.types import element_name
from shardir.dialects.random import check_range
from shardir.dialects.train.options import InitAttr, ScheduleAttr
from shardir.dialects.train.roles import (
    FUSION,
    GRADIENT,
    LR_SCALE,
    OWN_LR,
    STATE_LAYOUT,
    UPDATES,
    WEIGHT_DECAY,
    Argument,
    Attributes,
    Role,
    arg_attrs,
    arguments,
    gradient_arguments,
    number_attr,
    result_attrs,
    text_attr,
    updated_arguments,
    without_layout,
)  # fmt: skip


def check_parameters(f: FuncOp) -> None:
    """Raises VerifyException if a function has no parameter, or two with one name."""
    parameters = [a for a in arg_attrs(f) if Role.PARAMETER.attribute in a]
    if not parameters:
        raise VerifyException(
            coded("G3", f"expected an argument of @{f.sym_name.data} that is a parameter, got none")
        )
    counts = Counter(text_attr(a, Role.PARAMETER.attribute) for a in parameters)
    for key, number in counts.items():
        if not key or number > 1:
            raise VerifyException(
                coded(
                    "G6",
                    f"expected parameters of @{f.sym_name.data} with distinct, non-empty names, "
                    f"got {number} of the name {key!r}",
                    use="give each its own name; use one argument for a shared weight",
                )
            )


def check_arguments(f: FuncOp) -> None:
    """Raises VerifyException if an argument has two roles, or an invalid `train.fusion` or
    `train.state_layout`."""
    for i, attributes in enumerate(arg_attrs(f)):
        roles = [role.attribute for role in Role if role.attribute in attributes]
        if len(roles) > 1:
            raise VerifyException(
                coded(
                    "G6",
                    f"expected one role of argument {i} of @{f.sym_name.data}, got "
                    f"{' and '.join(roles)}",
                    use="drop one of them",
                )
            )
        index = attributes.get(FUSION)
        is_index = isinstance(index, IntegerAttr) and index.type == i64 and index.value.data >= 0
        if index is not None and not is_index:
            raise VerifyException(
                coded(
                    "G5",
                    f"expected train.fusion of argument {i} of @{f.sym_name.data} to be an index, "
                    f"got {index}",
                )
            )
        check_state_layout(f, i, attributes)


def check_state_layout(f: FuncOp, i: int, attributes: Attributes) -> None:
    """Raises VerifyException if argument i has a `train.state_layout` that is invalid for its
    states."""
    if STATE_LAYOUT not in attributes:
        return
    argument, t = Argument.of(attributes), f.function_type.inputs.data[i]
    layout = argument.state_layout
    if layout is None or layout.partial or argument.role is not Role.PARAMETER:
        raise VerifyException(
            coded(
                "G11",
                f"expected train.state_layout of argument {i} of @{f.sym_name.data} to be a "
                f"complete layout, on a parameter, got {attributes[STATE_LAYOUT]} on one that is "
                f"{'an input' if argument.role is Role.INPUT else f'a {argument.role}'}",
            )
        )
    t = global_type(t, find_mesh(f, layout.mesh))
    check_type(f, with_layout(t, layout), f"states of argument {i}")


def check_initial_values(f: FuncOp) -> None:
    """Raises VerifyException if an argument's type cannot hold its initial values."""
    for i, (t, argument) in enumerate(zip(f.function_type.inputs, arguments(f), strict=False)):
        init = argument.init
        if isinstance(init, InitAttr) and isinstance(t, TensorType):
            try:
                check_range(init.kind, init.values, element_name(t.element_type))
            except ShardirError as e:
                raise VerifyException(f"argument {i}: {e}") from None


def check_own_numbers(f: FuncOp) -> None:
    """Raises VerifyException if the weight decay or the learning rate of a parameter is invalid."""
    for attributes in arg_attrs(f):
        for name in (WEIGHT_DECAY, LR_SCALE):
            number_attr(attributes, name, 0.0)
        lr = attributes.get(OWN_LR)
        if lr is not None and (not isinstance(lr, ScheduleAttr) or lr.kind == "given"):
            message = f"expected {OWN_LR} to be a schedule of the steps, got {lr}"
            use = f"write {OWN_LR} = #train.schedule<cosine, rate = 0.1, steps = 100>"
            raise VerifyException(coded("G9", message, use=use))


def check_updates(f: FuncOp) -> None:
    """Raises VerifyException if a result is annotated as the update of a parameter or state, but
    does not fit it."""
    args, updated = arguments(f), set[int]()
    results = zip(f.function_type.outputs, result_attrs(f), updated_arguments(f), strict=True)
    for i, (t, attributes, at) in enumerate(results):
        if UPDATES not in attributes:
            continue
        where = f"result {i} of @{f.sym_name.data}"
        key = attributes[UPDATES]
        if at is None:
            retained = [f'"{a.key}"' for a in args if a.is_retained]
            raise VerifyException(
                coded(
                    "G7",
                    f"expected {where} to update a state or a parameter of an argument, "
                    f"{', '.join(retained) or 'of which there is none'}, got {key}",
                )
            )
        if at in updated:
            raise VerifyException(
                coded(
                    "G7", f"expected one result that updates {key}, got {where} too", use="drop one"
                )
            )
        updated.add(at)
        old = f.function_type.inputs.data[at]
        if without_layout(t) != without_layout(old):
            raise VerifyException(
                coded(
                    "G7",
                    f"expected {where}, which updates {key}, of type {old}, got {t}",
                    use="reshape or convert it",
                )
            )


def check_gradients(f: FuncOp) -> None:
    """Raises VerifyException if a result is annotated as the gradient of a parameter, but does not
    fit it."""
    differentiated = set[int]()
    results = zip(f.function_type.outputs, result_attrs(f), gradient_arguments(f), strict=True)
    for i, (t, attributes, at) in enumerate(results):
        if GRADIENT not in attributes:
            continue
        where, key = f"result {i} of @{f.sym_name.data}", attributes[GRADIENT]
        if at is None:
            names = [f'"{a.key}"' for a in arguments(f) if a.role is Role.PARAMETER]
            message = f"expected {where} to be the gradient of a parameter, {', '.join(names)}"
            raise VerifyException(coded("G13", f"{message}, got {key}"))
        if at in differentiated:
            message = f"expected one result that is the gradient of {key}, got {where} too"
            raise VerifyException(coded("G13", message, use="add them"))
        differentiated.add(at)
        wanted = f.function_type.inputs.data[at]
        if without_layout(t) != without_layout(wanted):
            message = f"expected {where}, the gradient of {key}, of type {wanted}, got {t}"
            raise VerifyException(coded("G13", message, use="reshape or convert it"))
