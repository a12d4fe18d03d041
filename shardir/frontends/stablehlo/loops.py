"""Loops whose number of runs depends on values, as `nn.while`.

A region is imported as a function of its own, of the values that it carries and of those that it
reads from around it; small constants among these are constants of the region. The values that no
run changes are carried too.
"""

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any, Protocol

from xdsl.ir import BlockArgument, Region, SSAValue

from shardir.build import Value
from shardir.build.function import hint_of
from shardir.dialects.nn import WhileOp
from shardir.dialects.nn.base import Array
from shardir.frontends.stablehlo.folding import MAX_FOLDED, FoldingBuilder, known
from shardir.frontends.stablehlo.form import (
    HloBlock,
    HloFunction,
    HloOp,
    HloProgram,
    HloValue,
)
from shardir.frontends.stablehlo.manual import ManualBuilder
from shardir.frontends.stablehlo.shardy import BlockImporter
from shardir.frontends.stablehlo.types import DTYPES

DEVICE_NUMBER = "stablehlo.partition_id"

IN_LOOP = "in a loop whose number of runs depends on values"
"""Where an op is that such a loop can't have."""


class LoopBuilder(FoldingBuilder):
    """A region of a loop, each run of which all devices compute as a whole."""


class LoopImporter(BlockImporter, Protocol):
    """What loops read of the importer of a function."""

    program: HloProgram
    env: dict[HloValue, Value | None]

    def value(self, v: HloValue) -> Value: ...
    def called(self, op: HloOp) -> HloFunction | None: ...
    def run_region(self, block: HloBlock, arguments: Sequence[Value]) -> list[Any]: ...
    def within(self, body: FoldingBuilder) -> "LoopImporter": ...


def import_loop(importer: LoopImporter, op: HloOp, carried: Sequence[Value]) -> Sequence[Value]:
    """Add a loop; return the carried values after it."""
    condition, body = op.regions
    changed = [a is not b for a, b in zip(body.arguments, body.results, strict=True)]
    around = _values_around(importer, op.regions)
    for block in op.regions:
        rest = zip(block.arguments, carried, changed, strict=True)
        around |= {a: v for a, v, is_changed in rest if not is_changed}
    first = [v for v, is_changed in zip(carried, changed, strict=True) if is_changed]
    fixed = [*dict.fromkeys(v.ssa for v in around.values() if _constant(v) is None)]
    hints = [_hint(v.ssa, "carried") for v in first] + [_hint(v, "fixed") for v in fixed]
    operands = [*first, *(Value(importer.function, v) for v in fixed)]
    regions = [
        _region(importer, block, block is body, hints, operands, changed, around)
        for block in (condition, body)
    ]
    loop = importer.function.builder.op(WhileOp, *(v.ssa for v in operands), regions=regions)
    for result, hint in zip(loop.results, hints, strict=True):
        result.name_hint = hint_of(hint)
    importer.facts.loops += 1
    results = iter(loop.results)
    return [
        Value(importer.function, next(results)) if is_changed else v
        for v, is_changed in zip(carried, changed, strict=True)
    ]


def _constant(v: Value) -> Array | None:
    """Return the numbers of a small constant; None for other values."""
    return known(v) if prod(v.shape) <= MAX_FOLDED else None


def _hint(v: SSAValue, otherwise: str) -> str:
    """Return the name of an argument, of which a carried value is a version."""
    return v.name_hint or otherwise if isinstance(v, BlockArgument) else otherwise


def _region(
    importer: LoopImporter, block: HloBlock, is_body: bool, hints: Sequence[str],
    operands: Sequence[Value], changed: Sequence[bool], around: dict[HloValue, Value],
) -> Region:  # fmt: skip
    """Return a region, with an argument for each operand of the loop.

    Args:
        changed: of each argument of `block` whether a run changes it.
        around: the values from around the loop, and of arguments that no run changes.
    """
    region = LoopBuilder("region", True, None)
    inner, location = importer.within(region), importer.function.location()
    with region.at(location):
        given = [region.input(h, v.shape, v.dtype) for h, v in zip(hints, operands, strict=True)]
        count = sum(changed)
        here: dict[SSAValue, Value] = {
            v.ssa: x for v, x in zip(operands[count:], given[count:], strict=True)
        }
        for v in around.values():
            if (numbers := _constant(v)) is not None:
                here[v.ssa] = region.constant(numbers, dtype=v.dtype)
        inner.env |= {v: here[x.ssa] for v, x in around.items()}
        variables = iter(given[:count])
        arguments = [
            next(variables) if is_changed else here[around[a].ssa]
            for a, is_changed in zip(block.arguments, changed, strict=True)
        ]
        results: list[Value] = inner.run_region(block, arguments)
        if is_body:
            results = [v for v, is_changed in zip(results, changed, strict=True) if is_changed]
            results += given[count:]
        made = region.as_region(results)
    inner.erase_unused()
    return made


def _values_around(
    importer: LoopImporter, regions: Sequence[HloBlock]
) -> dict[HloValue, Value]:  # fmt: skip
    """Return the values that regions read from around them, and the numbers of the device that they
    read, which are made before the loop."""
    ops = [op for block in regions for op in _ops_within(importer, block)]
    own = {v for block in regions for v in block.arguments}
    own |= {v for op in ops for v in (*op.results, *(a for r in op.regions for a in r.arguments))}
    own |= {v for f in importer.program.functions.values() for v in f.block.arguments}
    around: dict[HloValue, Value] = {}
    for op in ops:
        around |= {v: importer.value(v) for v in op.operands if v not in own}
        if op.name == DEVICE_NUMBER:
            (number,) = op.results
            if isinstance(importer.function, ManualBuilder):
                importer.env[number] = importer.function.device_id(DTYPES[number.type.element])
            if number in importer.env:
                around[number] = importer.value(number)
    return around


def _ops_within(importer: LoopImporter, block: HloBlock) -> Iterator[HloOp]:
    """Yield the ops of a block, of their regions and of the functions that they call."""
    for op in block.ops:
        yield op
        for region in op.regions:
            yield from _ops_within(importer, region)
        if (f := importer.called(op)) is not None:
            yield from _ops_within(importer, f.block)
