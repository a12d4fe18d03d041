"""The roles of a function's values: which arguments are retained, which results replace them."""

from collections.abc import Sequence

from xdsl.dialects.func import FuncOp, ReturnOp
from xdsl.ir import SSAValue

from shardir.dialects.train import (
    Argument,
    GradientOp,
    Request,
    Role,
    arguments,
    is_step,
    stage_of,
    updated_arguments,
)


def differentiated_arguments(request: Request, arguments: Sequence[Argument]) -> list[int]:
    """Return the indices of the arguments with respect to which a function is differentiated: the
    ones that a gradient names; for a step, the parameters."""
    if isinstance(request, GradientOp):
        return list(request.wrt.data)
    return [i for i, argument in enumerate(arguments) if argument.role is Role.PARAMETER]


def retained_arguments(f: FuncOp) -> frozenset[SSAValue]:
    """Return the parameters and states of a function."""
    args = zip(f.body.block.args, arguments(f), strict=True)
    return frozenset(v for v, argument in args if argument.is_retained)


def donated_arguments(f: FuncOp) -> frozenset[SSAValue]:
    """Return the parameters and states that a result replaces: the function may write their
    memory."""
    block = f.body.block
    return frozenset(block.args[i] for i in updated_arguments(f) if i is not None)


def frees(f: FuncOp) -> bool:
    """Whether a program of the function frees each value after its last use: yes for a step, for a
    stage, and for a model with parameters or states; a small function reads better without."""
    return is_step(f) or stage_of(f) is not None or bool(retained_arguments(f))


def ties(f: FuncOp) -> dict[SSAValue, SSAValue]:
    """Return the returned values that become arguments of the next step, each with its argument."""
    block = f.body.block
    last = block.last_op
    assert isinstance(last, ReturnOp)
    returned = zip(last.operands, updated_arguments(f), strict=True)
    return {v: block.args[i] for v, i in returned if i is not None}
