"""The batches that a program of a model runs on."""

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_map_only
from xdsl.dialects.builtin import ModuleOp

from shardir.diagnostics import ShardirError
from shardir.dialects.train import ForwardOp


def repeated(batches: Iterable[Any]) -> Iterator[tuple[int, Any]]:
    """Yield batches with their numbers; those of a list or a loader again and again.

    Raises:
        ShardirError: there is none.
    """
    source, count = iter(batches), 0
    while True:
        for batch in source:
            yield count, batch
            count += 1
        if not count:
            raise ShardirError("expected batches, got none")
        if source is batches:
            return
        source = iter(batches)


def microbatches_of(module: ModuleOp) -> int:
    """Return the number of those that a function without a backward part reads at a time."""
    requests = [op for op in module.body.ops if isinstance(op, ForwardOp)]
    return max((op.microbatches for op in requests), default=1)


def parts_of(batch: Any, count: int) -> list[Any]:
    """Return the microbatches of a batch: its tensors are split along dimension 0."""

    def part(k: int, x: torch.Tensor) -> torch.Tensor:
        return x.chunk(count)[k] if x.ndim and x.shape[0] % count == 0 else x

    return [tree_map_only(torch.Tensor, partial(part, k), batch) for k in range(count)]
