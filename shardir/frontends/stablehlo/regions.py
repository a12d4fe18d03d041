"""Regions of scalar computations: with calls inlined, and as computations of whole tensors."""

from collections.abc import Callable, Sequence

from shardir.algebra.layout import Shape
from shardir.frontends.stablehlo.form import HloBlock, HloOp, HloType, HloValue


def inlined(block: HloBlock, callee: Callable[[str], HloBlock]) -> HloBlock:
    """Return a block without calls."""
    if all(op.name != "func.call" for op in block.ops):
        return block
    values: dict[HloValue, HloValue] = {}
    ops: list[HloOp] = []
    for op in block.ops:
        operands = [values.get(v, v) for v in op.operands]
        if op.name != "func.call":
            results = [HloValue(r.type) for r in op.results]
            values.update(zip(op.results, results, strict=True))
            ops.append(HloOp(op.name, operands, results, op.attributes, op.regions, op.location))
            continue
        body = inlined(callee(op.attributes["callee"]), callee)
        inner = _with(body, operands)
        ops += inner.ops[:-1]
        values.update(zip(op.results, inner.results, strict=True))
    return HloBlock(block.arguments, ops)


def of_tensors(block: HloBlock, shape: Shape) -> HloBlock:
    """Return a scalar computation, elementwise, as one of tensors of a shape."""
    arguments = [HloValue(HloType(shape, a.type.element)) for a in block.arguments]
    return _with(block, arguments, shape)


def _with(
    block: HloBlock, arguments: Sequence[HloValue], shape: Shape | None = None
) -> HloBlock:  # fmt: skip
    """Return a copy of a block with other arguments, all of whose values have a shape, if given."""
    values = dict(zip(block.arguments, arguments, strict=True))
    ops: list[HloOp] = []
    for op in block.ops:
        operands = [values.get(v, v) for v in op.operands]
        types = [r.type if shape is None else HloType(shape, r.type.element) for r in op.results]
        results = [HloValue(t) for t in types]
        values.update(zip(op.results, results, strict=True))
        ops.append(HloOp(op.name, operands, results, op.attributes, op.regions, op.location))
    return HloBlock(arguments, ops)


def components(block: HloBlock) -> list[HloBlock] | None:
    """Return the block of each result of a reduction of several values, if each result depends on
    its own two arguments alone; else None."""
    count = len(block.results)
    makers = {r: op for op in block.ops for r in op.results}
    blocks = []
    for i, result in enumerate(block.results):
        own = (block.arguments[i], block.arguments[count + i])
        needed, waiting = set(), [result]
        while waiting:
            v = waiting.pop()
            if v in makers:
                needed.add(makers[v])
                waiting += makers[v].operands
            elif v not in own:
                return None
        end = HloOp("stablehlo.return", [result], (), {}, (), None)
        blocks.append(HloBlock(own, [*(op for op in block.ops if op in needed), end]))
    return blocks
