"""The input, the row and the line of an index that is out of range."""

from collections.abc import Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import Tensor

from ..plan.program import PlanArgument, PlanFunction
from .anomalies import place_of
from .program_module import PROGRAM
from .states import States


def index_error(
    error: IndexError,
    function: PlanFunction,
    states: States,
    inputs: Sequence[Tensor],
    step: int = 0,
) -> IndexError:
    """Return an error that names the input and its row in the global batch, if the index comes from
    one, and the line of the program and its source.

    Args:
        error: as an op of the function has raised it.
        inputs: this rank's shards of the inputs, in their order.
        step: the number of the step, counted from 1; 0 for another function.
    """
    frames = _frames(error.__traceback__)
    lines = [frame for frame in frames if Path(frame.f_code.co_filename).name == PROGRAM]
    where = place_of(Path(lines[-1].f_code.co_filename), lines[-1].f_lineno) if lines else ""
    ids, total = next(filter(None, map(_looked_up, frames)), (None, 0))
    if ids is None:
        return IndexError(f"{error}{where}")
    allowed = next((f.f_locals.get("allowed") for f in frames if "allowed" in f.f_locals), None)
    flat = ids.reshape(-1)
    wrong = (flat < 0) | (flat >= total)
    if allowed is not None:
        wrong &= flat != allowed
    bad = int(flat[wrong][0])
    expected = f"expected 0 to {total - 1}, got {bad}"
    args = [arg for arg in function.args if arg.role == "input"]
    pairs = [(a, x) for a, x in zip(args, inputs, strict=True) if not x.is_floating_point()]
    # The input itself, or one from which the op's indices are made: a part of it, or a copy.
    pairs.sort(key=lambda pair: not _are_equal(pair[1], ids))
    for arg, x in pairs:
        if x.ndim and bool((x == bad).any()):
            row = _row(arg, states, (x == bad).nonzero()[0].tolist())
            of_step = f" of the batch of step {step}" if step else ""
            return IndexError(f"{arg.name}: {expected} in row {row}{of_step}{where}")
    return IndexError(f"{expected} as an index{where}")


def _frames(traceback: TracebackType | None) -> list[FrameType]:
    found = []
    while traceback is not None:
        found.append(traceback.tb_frame)
        traceback = traceback.tb_next
    return found


def _looked_up(frame: FrameType) -> tuple[Tensor, int] | None:
    """Return the indices of a lookup, and the number of its rows."""
    names: dict[str, Any] = frame.f_locals
    match frame.f_code.co_name:
        case "in_range":
            return names["ids"], names["total"]
        case "embedding" if "weight" in names:
            return names["input"], names["weight"].shape[0]
    return None


def _are_equal(x: Tensor, ids: Tensor) -> bool:
    return x.numel() == ids.numel() and torch.equal(x.reshape(-1).long(), ids.reshape(-1).long())


def _row(arg: PlanArgument, states: States, index: list[int]) -> int:
    """Return the row in the global batch, whose microbatches are concatenated, of an element of
    this rank's shard."""
    starts = [start for start, _ in states.bounds(arg)]
    place = [i + start for i, start in zip(index, starts, strict=True)]
    return place[0] if arg.microbatches is None else place[0] * arg.shape[1] + place[1]
