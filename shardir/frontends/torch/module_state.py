"""The attributes of a module that its forward part changes.

A buffer that is assigned anew, `self.count = self.count + 1`, has its new value in the next step,
as one that is written in place. A number of Python, `self.n += 1`, is part of the program.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain, pairwise
from typing import Any

import torch

from shardir.diagnostics import ShardirError

ModuleAttributes = list[tuple[str, torch.nn.Module, dict[str, Any]]]
"""Of each module its path, itself, and some of its attributes by their names."""


@contextmanager
def recorded_attributes(
    model: torch.nn.Module, warn: Callable[[str], object]
) -> Iterator[Callable[[Any], Any]]:
    """Run a module within the block; at its end write newly assigned buffers in place. `warn` gets
    the names of other attributes that the module has changed.

    Yields:
        a function that copies a result of the module if it shares memory with a buffer that will be
        written.

    Raises:
        ShardirError: a buffer has changed its shape or dtype, is no tensor, or shares memory with a
            tensor that a step writes to; a parameter was replaced; or a tensor that is neither
            buffer nor parameter is written in place.
    """
    modules = list(model.named_modules())
    parameters: ModuleAttributes = [(path, m, dict(m._parameters)) for path, m in modules]
    buffers: ModuleAttributes = [(path, m, dict(m._buffers)) for path, m in modules]
    numbers: ModuleAttributes = [(path, m, _numbers(m)) for path, m in modules]
    tensors: ModuleAttributes = [(path, m, _tensors(m)) for path, m in modules]
    versions = [x._version for _, _, x, _ in _all(tensors)]
    starts = {id(x): x._version for _, _, x, _ in _all(buffers) if x is not None}

    def retained(x: Any) -> Any:
        if not isinstance(x, torch.Tensor) or x.layout is not torch.strided:
            return x
        replaced = (old for _, m, old, at in _all(buffers) if m._buffers.get(at) is not old)
        memory = {_memory(old)[0] for old in replaced if old is not None}
        return x.clone() if _memory(x)[0] in memory else x

    yield retained
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
    _write_anew(list(_all(buffers)), starts, model)
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


def _all(attributes: ModuleAttributes) -> Iterator[tuple[str, torch.nn.Module, Any, str]]:
    """Yield the full name of each attribute, its module, its value, and its name."""
    for path, module, found in attributes:
        for name, value in found.items():
            yield f"{path}.{name}" if path else name, module, value, name


def _write_anew(
    buffers: list[tuple[str, torch.nn.Module, Any, str]],
    versions: dict[int, int],
    model: torch.nn.Module,
) -> None:
    """Write the new values of buffers into the tensors that they were, whose versions were these.

    Raises:
        ShardirError: a buffer can't have its new value there, or is to share it with another one.
    """
    replaced = [(name, old, module._buffers.get(at)) for name, module, old, at in buffers]
    names: dict[int, tuple[str, torch.Tensor | None]] = {}
    for name, old, new in replaced:
        other, its = names.setdefault(id(old), (name, new))
        if old is not None and new is not its:
            raise ShardirError(
                f"expected one tensor as buffers {other} and {name}, got one assigned anew; write "
                "it in place, with copy_()"
            )
    trained = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    further = trained if torch.is_grad_enabled() else []
    further += [(n, x) for n, _, x in replaced
               if x is not None and x._version != versions.get(id(x), 0)]  # fmt: skip
    anew: list[tuple[torch.Tensor, torch.Tensor]] = []
    for name, old, new in replaced:
        if new is old:
            continue
        if old is None or new is None or _form(old) != _form(new):
            raise ShardirError(
                f"expected buffer {name} of one shape and dtype, got {_form(old)} before forward "
                f"and {_form(new)} after it; register it as it is to be"
            )
        anew.append((old, new))
        for other, x in further:
            if other != name and _memory(x)[0] == _memory(new)[0]:
                raise ShardirError(
                    f"expected buffer {name} with memory of its own, got that of {other}, to which "
                    "each step writes; assign a clone()"
                )
    with torch.no_grad():
        for old, value in [(old, new.clone()) for old, new in anew]:
            old.copy_(value)
    for _, module, old, attribute in buffers:
        module._buffers[attribute] = old


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
