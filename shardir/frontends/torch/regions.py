"""Regions of a module's source that torch.export runs through without a trace in its graph.

A checkpoint (torch.utils.checkpoint) is annotated: its nodes have the number of the region. A
gradient that is written by hand (torch.autograd.Function) would be lost without a word, so it is
refused.
"""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any
from unittest.mock import patch

import torch
from torch.fx import Node, traceback
from torch.utils import checkpoint

from shardir.compat.torch import NON_REENTRANT, apply_function
from shardir.diagnostics import ShardirError
from shardir.frontends.torch.histories import Histories

CHECKPOINT = "checkpoint"
"""The annotation of a node of a checkpoint: the number of the region."""


def checkpoint_of(node: Node) -> int | None:
    """Return the number of the checkpoint that a node is of; None outside."""
    return (node.meta.get("custom") or {}).get(CHECKPOINT)


REGISTERED = "GeneratedBackwardFor"
"""The names of the classes that torch.library makes; their ops are in the graph as such."""


def _has_gradient(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.requires_grad


@contextmanager
def annotated(
    train: bool, derived: Collection[str], histories: Histories, warn: Callable[[str], object]
) -> Iterator[None]:
    """A context of an export that annotates checkpoints. In training it refuses gradients written
    by hand, except of autograd functions of these names. `warn` gets the warnings.
    """
    numbers = count()

    def region(*_: Any, **__: Any) -> Iterator[None]:
        with traceback.annotate({CHECKPOINT: next(numbers)}):
            yield

    class Reentrant:
        """In place of the reentrant form, which is an autograd function: its result has a gradient
        if one of its arguments has one, whatever parameters it uses."""

        @staticmethod
        def apply(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
            has_gradient = any(map(_has_gradient, args))
            if torch.is_grad_enabled() and not has_gradient:
                warn(
                    "expected an input with a gradient of a checkpoint with use_reentrant=True, "
                    "got none: as in torch nothing within is trained; use use_reentrant=False"
                )
            trains = torch.is_grad_enabled() and has_gradient
            with traceback.annotate({CHECKPOINT: next(numbers)}), torch.set_grad_enabled(trains):
                return function(*args)

    def refuse(cls: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
        name = cls.__name__
        is_derived = name in derived or name.startswith(REGISTERED)
        if train and not is_derived and any(map(_has_gradient, args)):
            raise ShardirError(
                f"expected operations whose gradients follow, got the autograd function {name}, "
                "whose backward would be ignored; use trace=True, or, if it is the derivative of "
                f'its forward, derived=["{name}"]'
            )
        with histories.suspended():
            return apply_function(cls, *args, **kwargs)

    with (
        traceback.preserve_node_meta(),
        patch.object(checkpoint, NON_REENTRANT, region),
        patch.object(checkpoint, "CheckpointFunction", Reentrant),
        patch.object(torch.autograd.Function, "apply", classmethod(refuse)),
    ):
        yield
