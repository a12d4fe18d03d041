"""The batches of a compiled model."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from xdsl.dialects.builtin import ModuleOp

from shardir.backend.runs import Options
from shardir.backend.torch.shardir_runtime.checkpoints import manifest as manifests
from shardir.backend.torch.shardir_runtime.checkpoints.saving import is_new
from shardir.backend.torch.shardir_runtime.data import loaders
from shardir.backend.torch.started import errors
from shardir.compat.torch import tree_map, tree_map_only
from shardir.diagnostics import ShardirError, describe
from shardir.dialects.train import ForwardOp
from shardir.frontends.torch.capture import flat_inputs
from shardir.frontends.torch.importer import Imported
from shardir.frontends.torch.weights import array_of


def repeat_batches(batches: Iterable[Any]) -> Iterator[tuple[int, Any]]:
    """Yield batches with their numbers. Repeats a list or a loader; an iterator ends.

    Raises:
        ShardirError: there are no batches.
    """
    source, count, before = iter(batches), 0, -1
    while True:
        for batch in source:
            yield count, batch
            count += 1
        # A loader that goes on from the end of an epoch has none at first.
        if count == before or (not count and source is batches):
            raise ShardirError("expected batches, got none")
        if source is batches:
            return
        source, before = iter(batches), count


def stateful_loader(batches: Iterable[Any], options: Options) -> Any:
    """Return batches whose state belongs to checkpoints, after they have the state of the
    checkpoint from which a run goes on; None for batches without a state.

    Raises:
        ShardirError: there is no such checkpoint, or it has no state of a loader.
    """
    if not loaders.is_stateful(batches):
        return None
    folder = options.resume
    if folder is not None and not is_new(options):
        with errors():
            state = loaders.read_state(manifests.checkpoint_at(folder), batches)
        batches.load_state_dict(state)  # type: ignore - it is stateful
    return batches


def microbatches_of(module: ModuleOp) -> int:
    """Return the number of batches that a forward function reads at once."""
    requests = [op for op in module.body.ops if isinstance(op, ForwardOp)]
    return max((op.microbatches for op in requests), default=1)


def split_batch(batch: Any, count: int) -> list[Any]:
    """Split the tensors of a batch along dimension 0 into `count` microbatches. Tensors whose
    dimension 0 is not divisible are in each one."""

    def part(k: int, x: torch.Tensor) -> torch.Tensor:
        return x.chunk(count)[k] if x.ndim and x.shape[0] % count == 0 else x

    return [tree_map_only(torch.Tensor, partial(part, k), batch) for k in range(count)]


def repeat_arrays(imported: Imported, batches: Iterable[Any], local: bool) -> Iterator[list[Any]]:
    """Yield the arrays of repeated batches (see `repeat_batches` and `arrays_of`). `local`: a batch
    is a list of the parts of all ranks."""
    for count, batch in repeat_batches(batches):
        arrays = [arrays_of(imported, count, x, local) for x in (batch if local else [batch])]
        yield arrays if local else arrays[0]


def arrays_of(imported: Imported, number: int, batch: Any, local: bool = False) -> list[Any]:
    """Return the arrays of a batch, in the order of the inputs. `local`: the batch is a rank's
    part, whose shapes are not checked.

    Raises:
        ShardirError: the inputs differ from the examples.
    """
    inputs, arrays = _inputs(imported, number, tree_map(loaders.as_tensor, batch)), []
    for name, like in imported.inputs:
        x = inputs[name]
        if not isinstance(x, torch.Tensor) or (x.shape != like.shape and not local):
            got = list(x.shape) if isinstance(x, torch.Tensor) else describe(x)
            raise ShardirError(
                f"expected {name} of {list(like.shape)} in batch {number}, got {got}; compile "
                "with inputs as the batches have them"
            )
        if x.dtype != like.dtype:
            raise ShardirError(
                f"expected {name} of {like.dtype} in batch {number}, got {x.dtype}; use "
                f".to({like.dtype})"
            )
        if x.is_meta:
            raise ShardirError(
                f"expected the values of {name} in batch {number}, got the meta device; pass "
                "batches with values"
            )
        arrays.append(array_of(x))
    return arrays


def examples_of(imported: Imported) -> list[Any]:
    """Return the arrays of the example inputs as a batch."""
    return [array_of(x) for _, x in imported.inputs]


def rows_of(imported: Imported, batches: Sequence[Sequence[Any]]) -> dict[str, Any]:
    """Concatenate each input of all batches along dimension 0; return the rows by input name.

    Raises:
        ShardirError: there are no batches.
    """
    if not batches:
        raise ShardirError("expected batches, got none")
    names = [name for name, _ in imported.inputs]
    return {name: np.concatenate([x if x.ndim else x[None] for x in arrays])
            for name, arrays in zip(names, zip(*batches, strict=True), strict=True)}  # fmt: skip


def _inputs(imported: Imported, number: int, batch: Any) -> Mapping[str, Any]:
    """Return the inputs of a batch by name. Raises ShardirError if they differ from the
    examples."""
    labelled = any(name.startswith("labels") for name, _ in imported.inputs)
    pair = isinstance(batch, tuple | list) and len(batch) == 2
    inputs, labels = batch if pair and labelled else (batch, None)
    if labelled and isinstance(batch, Mapping) and "labels" in batch:
        inputs, labels = {k: x for k, x in batch.items() if k != "labels"}, batch["labels"]
    try:
        values = dict(flat_inputs(imported.model, inputs, labels))
    except ShardirError as e:
        raise ShardirError(f"batch {number}: {e}") from None
    constants = imported.constants
    wanted = [name for name, _ in imported.inputs]
    if not {*wanted} <= values.keys() <= {*wanted, *constants}:
        form = "(inputs, labels)" if labelled else "inputs"
        raise ShardirError(
            f"expected {', '.join(wanted)} in batch {number}, got "
            f"{', '.join(values) or 'none'}; give {form} as the examples were given"
        )
    for name in constants.keys() & values.keys():
        if type(values[name]) is not type(constants[name]) or values[name] != constants[name]:
            raise ShardirError(
                f"expected {name} = {constants[name]!r} in batch {number}, as in the examples, "
                f"got {describe(values[name])}; compile with a tensor in its place"
            )
    return values
