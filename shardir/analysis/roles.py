"""Which results of a function become which arguments of its next call."""

from xdsl.dialects.builtin import StringAttr
from xdsl.dialects.func import FuncOp, ReturnOp
from xdsl.ir import Block, SSAValue

from shardir.dialects.train import arg_attrs, result_attrs


def ties(f: FuncOp, block: Block) -> dict[SSAValue, SSAValue]:
    """The returned values that become arguments of the next step."""
    names: dict[str, SSAValue] = {}
    for arg, attrs in zip(block.args, arg_attrs(f), strict=True):
        for key in ("train.parameter", "train.state"):
            if isinstance(name := attrs.get(key), StringAttr):
                names[name.data] = arg
    found: dict[SSAValue, SSAValue] = {}
    end = block.last_op
    assert isinstance(end, ReturnOp)
    for v, marks in zip(end.operands, result_attrs(f), strict=True):
        if isinstance(name := marks.get("train.updates"), StringAttr) and name.data in names:
            found[v] = names[name.data]
    return found
