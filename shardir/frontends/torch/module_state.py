"""What a forward part leaves in the attributes of a module.

A buffer that is assigned anew, `self.count = self.count + 1`, has its new value in the next step,
as one that is written in place. A number of Python, `self.n += 1`, is part of the program.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain, pairwise
from typing import Any

import torch

from shardir.diagnostics import ShardirError

Attributes = list[tuple[str, torch.nn.Module, dict[str, Any]]]
"""Of each module its path, itself, and some of its attributes by their names."""


@contextmanager
def recorded_attributes(model: torch.nn.Module, warn: Callable[[str], object]) -> Iterator[None]:
    """A context in which a module runs, that ends with the buffers that were assigned anew written
    in place. `warn` gets the names of other attributes that the module has changed.

    Raises:
        ShardirError: a buffer has another shape or dtype, or none; a parameter is another one; or a
            tensor that is none of both is written in place.
    """
    modules = list(model.named_modules())
    parameters: Attributes = [(path, m, dict(m._parameters)) for path, m in modules]
    buffers: Attributes = [(path, m, dict(m._buffers)) for path, m in modules]
    numbers: Attributes = [(path, m, _numbers(m)) for path, m in modules]
    tensors: Attributes = [(path, m, _tensors(m)) for path, m in modules]
    versions = [x._version for _, _, x, _ in _all(tensors)]
    yield
    for (name, module, before, attribute), version in zip(_all(tensors), versions, strict=True):
        if before._version != version:
            raise ShardirError(
                f"expected buffers where forward writes in place, got {name}, an attribute; use "
                "register_buffer"
            )
        if _tensors(module).get(attribute, before) is not before:
            warn(
                f"forward assigns {name} anew, a tensor that is no buffer: where it is read before "
                "that, a program has its present value in each step; make it a buffer"
            )
    for name, module, before, attribute in _all(parameters):
        if module._parameters.get(attribute) is not before:
            raise ShardirError(
                f"expected parameters that forward writes in place, got {name} assigned anew; use "
                "copy_() in torch.no_grad()"
            )
    for name, module, before, attribute in _all(buffers):
        if (after := module._buffers.get(attribute)) is not before:
            _write(name, before, after)
            module._buffers[attribute] = before
    for name, module, before, attribute in _all(numbers):
        if _numbers(module).get(attribute, before) != before:
            warn(
                f"forward changes {name}, a number or text of Python: the program has its first "
                f"value, {getattr(module, attribute)!r}, in each step; make it a buffer"
            )


def _numbers(module: torch.nn.Module) -> dict[str, Any]:
    return {name: x for name, x in vars(module).items() if isinstance(x, bool | int | float | str)}


def _tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: x for name, x in vars(module).items() if isinstance(x, torch.Tensor)}


def _all(attributes: Attributes) -> Iterator[tuple[str, torch.nn.Module, Any, str]]:
    """Yield the full name of each attribute, its module, its value, and its name."""
    for path, module, found in attributes:
        for name, value in found.items():
            yield f"{path}.{name}" if path else name, module, value, name


def _write(name: str, before: torch.Tensor | None, after: torch.Tensor | None) -> None:
    """Write the new value of a buffer into the tensor that it was."""
    if before is None or after is None or _form(before) != _form(after):
        raise ShardirError(
            f"expected buffer {name} of one shape and dtype, got {_form(before)} before forward "
            f"and {_form(after)} after it; register it as it is to be"
        )
    with torch.no_grad():
        before.copy_(after)


def _form(x: torch.Tensor | None) -> str:
    return "none" if x is None else f"{list(x.shape)} of {x.dtype}"


def check_trained(model: torch.nn.Module) -> None:
    """Check what training a module by a program would leave out.

    Raises:
        ShardirError: with all that is wrong: gradients have hooks, or two tensors share memory.
    """
    wrong = [
        f"gradients without hooks, got one of {name}: write it into forward"
        for name, p in model.named_parameters()
        if p._backward_hooks or p._post_accumulate_grad_hooks
    ]
    held = {id(x): (name, x) for name, x in _held(model)}
    at = sorted(held.values(), key=lambda found: _memory(found[1])[:2])
    for (name, x), (other, y) in pairwise(at):
        (storage, _, end), (same, first, _) = _memory(x), _memory(y)
        if storage == same and first < end:
            wrong.append(
                f"tensors that share no memory, got {name} and {other}: register one tensor under "
                "both names, or clone one"
            )
    if wrong:
        raise ShardirError("expected " + "; ".join(wrong))


def _held(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters and buffers of a module that have memory, with their names."""
    for name, x in chain(model.named_parameters(), model.named_buffers()):
        if x.layout is torch.strided and not x.is_meta and x.numel():
            yield name, x


def _memory(x: torch.Tensor) -> tuple[int, int, int]:
    """The storage of a tensor, and the range of its bytes in it."""
    first = int(x.storage_offset()) * x.element_size()
    reach = 1 + sum((n - 1) * int(step) for n, step in zip(x.shape, x.stride(), strict=True))
    return x.untyped_storage()._cdata, first, first + reach * x.element_size()
