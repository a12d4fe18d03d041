"""The attributes of a memory plan, and their check: values that are read later are not overwritten.

An op's attribute `offsets` has the offset in bytes of each result in the function's arena, or -1.
"""

from collections.abc import Iterable, Iterator, Sequence

from xdsl.dialects.builtin import DenseArrayBase
from xdsl.ir import Operation, OpResult
from xdsl.utils.exceptions import VerifyException

from shardir.diagnostics.codes import coded
from shardir.dialects.nn.types import size_of

OFFSETS = "offsets"
"""The attribute of an op with the offsets of its results."""

MEMORY_PLAN = "memory_plan"
"""The attribute of a function with the sizes of its plan."""


def planned_results(ops: Iterable[Operation]) -> Iterator[tuple[int, OpResult]]:
    """Yield the results that have offsets, each with its offset."""
    for op in [op for op in ops if OFFSETS in op.attributes]:
        if isinstance(offsets := op.attributes[OFFSETS], DenseArrayBase):
            for v, offset in zip(op.results, offsets.get_values(), strict=False):
                if isinstance(offset, int) and offset >= 0:
                    yield offset, v


def check_offsets(ops: Sequence[Operation]) -> None:
    """Check that no result of a memory plan overwrites a value that is read later.

    Only uses of the value itself count, not uses of its views.

    Raises:
        VerifyException: a result overlaps a live value.
    """
    planned = list(planned_results(ops))
    index_of = {op: i for i, op in enumerate(ops)} if planned else {}
    live: list[tuple[int, int, int, OpResult]] = []  # last use, offset, end
    for offset, v in planned:
        defined, end = index_of[v.op], offset + size_of(v)
        live = [x for x in live if x[0] >= defined]
        for _, low, top, other in live:
            if low < end and offset < top:
                got = f"{_named(v)} at {offset} to {end} and {_named(other)} at {low} to {top}"
                message = f"expected values that are live at once apart, got {got}"
                raise VerifyException(coded("F5", message))
        last = max((index_of.get(use.operation, defined) for use in v.uses), default=defined)
        live.append((last, offset, end, v))


def _named(v: OpResult) -> str:
    return f"%{v.name_hint}" if v.name_hint else f"a result of {v.op.name}"
