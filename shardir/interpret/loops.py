"""The evaluation of an op on one device, and of the runs of a loop, op by op."""

from collections.abc import Sequence

from xdsl.ir import Block, SSAValue

from shardir.dialects.blocks import ops_of
from shardir.dialects.nn import WhileOp
from shardir.dialects.nn.base import Array, Device, TensorOp
from shardir.interpret.values import round_to_element, tensor_type


def evaluate(op: TensorOp, device: Device, *arrays: Array) -> Array | tuple[Array, ...]:
    """Compute the results of an op on one device."""
    if not isinstance(op, WhileOp):
        return op.evaluate(device, *arrays)
    carried = arrays
    while _yielded(op.condition.block, device, carried)[0]:
        carried = _yielded(op.body.block, device, carried)
    return carried


def _yielded(block: Block, device: Device, arguments: Sequence[Array]) -> tuple[Array, ...]:
    """Return what a region yields."""
    env: dict[SSAValue, Array] = dict(zip(block.args, arguments, strict=True))
    for op in ops_of(block):
        inputs = [env[v] for v in op.operands]
        if not isinstance(op, TensorOp):
            return tuple(inputs)
        out = evaluate(op, device, *inputs)
        for v, array in zip(op.results, out if isinstance(out, tuple) else (out,), strict=True):
            env[v] = round_to_element(array, tensor_type(v.type).element_type)
    raise AssertionError("a region ends with nn.yield")
