"""torch.autocast of any device, where a module is exported on one.

A program for GPUs may be compiled where there is none: on a login node, or of a module on the meta
device. torch switches `torch.autocast("cuda")` off there; here it is taken at its word, as that of
the device on which the module is traced.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch

SWITCHED_OFF = "CUDA is not available or torch_xla is imported. Disabling autocast."
"""torch's warning where it switches autocast off."""

LOST = (
    'torch.autocast("cuda") is off: torch switches it off on a machine without CUDA; the program '
    'computes in the dtypes of its tensors. Use precision="bf16"'
)


@contextmanager
def autocast_of_any_device(home: str, warn: Callable[[str], object]) -> Iterator[None]:
    """A context in which modules on the device type `home` are traced, where autocasts of other
    devices are of this one. `warn` gets a warning where one is off, and may have been on."""
    init, enter = torch.autocast.__init__, torch.autocast.__enter__

    def init_at_home(self: Any, device_type: str, dtype: Any = None, *rest: Any, **kw: Any) -> None:
        dtype = torch.get_autocast_dtype(device_type) if dtype is None else dtype
        init(self, home, dtype, *rest, **kw)

    def enter_at_home(self: Any) -> Any:
        if self.device != home:  # made before, as a decorator is
            if not self._enabled:
                warn(LOST)
            self.device = home
        return enter(self)

    with ExitStack() as stack:
        stack.enter_context(patch.object(torch.autocast, "__init__", init_at_home))
        stack.enter_context(patch.object(torch.autocast, "__enter__", enter_at_home))
        if not torch.is_autocast_enabled(home) and (dtype := _dtype_around(home, warn)):
            stack.enter_context(torch.autocast(home, dtype))
        yield


def _dtype_around(home: str, warn: Callable[[str], object]) -> torch.dtype | None:
    """Return the dtype of the autocast of another device, within which this runs."""
    if torch.is_autocast_enabled("cuda"):
        return torch.get_autocast_dtype("cuda")
    nesting = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    if nesting == 0 or home == "cuda" or torch.cuda.is_available():
        return None
    frame = sys._getframe()
    while frame is not None:
        # where a warning is shown, Python retains it in the module that has caused it
        shown = frame.f_globals.get("__warningregistry__", {})
        if any(isinstance(key, tuple) and key[0] == SWITCHED_OFF for key in shown):
            return torch.get_autocast_dtype("cuda")
        frame = frame.f_back
    warn(LOST)
    return None
