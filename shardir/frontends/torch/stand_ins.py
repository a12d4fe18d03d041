"""CPU tensors without values, in place of the tensors of a module on the meta device.

torch has neither autocast nor all kernels for the meta device; for fake tensors it has.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from shardir.compat.torch import FakeTensorMode, tree_map_only


@contextmanager
def stand_ins(model: torch.nn.Module, given: Any) -> Iterator[Any]:
    """Replace the meta tensors of a module by fake ones on the CPU within the block; yield fake
    examples for the `given` ones. Without meta tensors nothing changes."""
    if not any(p.is_meta for p in model.parameters()):
        yield given
        return
    mode, made = FakeTensorMode(allow_non_fake_inputs=True), dict[int, torch.Tensor]()

    def stand_in(x: torch.Tensor) -> torch.Tensor:
        if id(x) not in made:
            with mode:
                new = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cpu")
            is_parameter = isinstance(x, torch.nn.Parameter)
            made[id(x)] = torch.nn.Parameter(new, x.requires_grad) if is_parameter else new
        return made[id(x)]

    before: list[tuple[dict[str, Any], dict[str, Any]]] = [
        (held, dict(held)) for m in model.modules() for held in (m._parameters, m._buffers)
    ]
    try:
        for held, found in before:
            held.update((n, stand_in(x)) for n, x in found.items() if x is not None and x.is_meta)
        yield tree_map_only(torch.Tensor, stand_in, given)
    finally:
        for held, found in before:
            held.update(found)
