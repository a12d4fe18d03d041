"""Extra results: the number of tokens of each result that is a mean over tokens.

    %loss = nn.div %s, %n {train.weighs = 0}      ->  func.return %loss, %n

An evaluation over several batches weighs the means by these numbers.
"""

from collections.abc import Iterator

from xdsl.dialects.builtin import ModuleOp
from xdsl.dialects.func import FuncOp
from xdsl.ir import Operation, SSAValue

from shardir.dialects import nn, train
from shardir.rewriting.copying import copied
from shardir.rewriting.functions import update_signature


def with_weights(module: ModuleOp) -> ModuleOp:
    """Return a copy of the module with these results: the module itself if there are none."""
    if not any(True for f in _functions(module) for _ in _numbers(f)):
        return module
    module = copied(module)
    for f in _functions(module):
        numbers, last = dict(_numbers(f)), f.body.block.last_op
        if numbers and last is not None:
            attributes = [*train.result_attrs(f), *map(train.weighing_attrs, numbers)]
            last.operands = [*last.operands, *numbers.values()]
            update_signature(f)
            train.set_result_attrs(f, attributes)
    return module


def _functions(module: ModuleOp) -> Iterator[FuncOp]:
    """Yield the functions that are neither steps nor functions of stages."""
    for f in module.body.ops:
        if (
            isinstance(f, FuncOp) and f.body.blocks
            and not train.is_step(f) and train.stage_of(f) is None
        ):  # fmt: skip
            yield f


def _numbers(f: FuncOp) -> Iterator[tuple[int, SSAValue]]:
    """Yield the indices of results that are means over tokens, with the numbers of tokens."""
    marked: list[tuple[int, Operation]] = [
        (i, op) for op in f.body.block.ops if (i := train.weighed_by(op)) is not None
    ]
    for i, op in marked:
        v = op.operands[isinstance(op, nn.DivOp)]
        if not isinstance(v.owner, Operation) or train.loop_of(v.owner) is None:
            yield i, v
