"""Writes that autograd does not see, made visible in the graph of an export.

In torch a value belongs to a storage, its gradient to a tensor. A graph without writes has values
alone, so a write that leaves a gradient as it was needs an op of its own:

    with torch.no_grad():             h = y.clone()
        y.mul_(2)              ->     y.mul_(2)
                                      y.copy_(straight_through(y, h))

`straight_through(x, h)` has the elements of x and the gradient of h. A write to `y.detach()` or
`y.data` also changes y and not its gradient. Results without a gradient of tensors with one are
detached.

The functions of torch that a module calls pass through a mode. There torch itself tells whether a
tensor was written (its version), its base if it is a view, and whether it has a gradient. The graph
has the effects of contexts such as no_grad, but not the contexts, at which it would be split.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import FunctionType
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode

from shardir.compat.torch import (
    DATA,
    SET_GRAD_ENABLED,
    set_grad_enabled,
    tree_leaves,
    tree_map_only,
)
from shardir.diagnostics import ShardirError

_LIBRARY = torch.library.Library("shardir", "DEF")
_LIBRARY.define("straight_through(Tensor x, Tensor history) -> Tensor")
_LIBRARY.impl("straight_through", lambda x, history: x.clone(), "CompositeExplicitAutograd")

_straight_through = torch.ops.shardir.straight_through.default


CHECKS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
"""The functions by which torch.nn.functional detects an active mode."""


HOOKS = ("register_hook", "register_post_accumulate_grad_hook")


VIEWS = ("T", "mT", "H", "mH", "real")
"""Attributes of tensors that are views."""

DROPOUTS = ("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout")
"""Functions of a tensor, a probability and whether to train. If they are off they return the tensor
itself, or a copy if it is fake."""


class _History(NamedTuple):
    """A tensor, a copy with the gradient that it had, and the node of autograd that made it."""

    owner: torch.Tensor
    copy: torch.Tensor
    origin: Any


class Histories(TorchFunctionMode):
    """The mode in which a module is exported. Without training there are no gradients, and only
    `data` becomes an op."""

    def __init__(self, train: bool) -> None:
        super().__init__()
        self._train = train
        self._owners: dict[int, dict[int, torch.Tensor]] = {}
        """By the address of a storage, the tensors with gradients that have detached aliases."""
        self._known: dict[int, torch.Tensor] = {}
        """The tensors that functions got and returned, by their identity."""
        self._inside: dict[int, torch.Tensor] = {}
        """By the identity of a tensor internal to a function of torch, such as the base of the view
        that a linear layer returns, the function's result."""
        self._lost: dict[int, torch.Tensor] = {}
        """Detached tensors that have a gradient since a write to them, which the graph has not."""
        self._stale: dict[int, torch.Tensor] = {}
        """Views made before `data` of their tensor was assigned: they keep the old memory."""
        self._suspended = not train

    @contextmanager
    def recording(self) -> Iterator[None]:
        """The context in which a module runs. Functions of torch.nn.functional do not pass through
        the mode, but the functions that they call do."""
        with ExitStack() as stack:
            for name in CHECKS:
                stack.enter_context(patch.object(torch.nn.functional, name, lambda *_: False))
            stack.enter_context(self)
            yield

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """A context of an autograd function whose gradient follows from its forward part, which
        torch runs without gradients."""
        before, self._suspended = self._suspended, self._suspended or torch.is_grad_enabled()
        try:
            yield
        finally:
            self._suspended = before

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # fmt: skip
        kwargs = kwargs or {}
        if func is SET_GRAD_ENABLED:
            return set_grad_enabled(*args)
        name = getattr(func, "__name__", "")
        if name in ("__get__", "__set__"):
            attribute = getattr(func, "__self__", None)
            if attribute is DATA:
                return self._access_data(name, args)
            if getattr(attribute, "__name__", "") not in VIEWS:
                return func(*args)
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        if name in HOOKS and self._train:
            raise ShardirError(
                f"expected gradients without hooks, got {name}; write it into forward"
            )
        if any(id(x) in self._stale for x in tensors):
            raise ShardirError(
                "expected no view of a tensor that is read after its data is assigned, got one; "
                "clone the view first, or write to the tensor in place"
            )
        if name in DROPOUTS and not all((*args[1:], *kwargs.values())):
            return tensors[0]
        if not self._train:
            self._known |= {id(x): x for x in tensors}
            result = func(*args, **kwargs)
            self._note_results(result)
            return result
        if self._suspended:
            return func(*args, **kwargs)
        self._known |= {id(x): x for x in tensors}
        if any(id(self._root_of(x)) in self._lost for x in tensors):
            raise ShardirError(
                "expected a write without a gradient to a detached tensor that is read later, got "
                "one with a gradient; write to the tensor itself, or to a clone"
            )
        # Functions called by a function of Python do not pass through the mode.
        is_python = isinstance(func, FunctionType)
        owners = self._owners_of(tensors, with_roots=is_python or not torch.is_grad_enabled())
        versions = [x._version for x in tensors]
        with _autograd(True):
            histories = [_History(x, x.clone(), _origin(x)) for x in owners]
        result = func(*args, **kwargs)
        self._note_results(result)
        # Functions of lists, _foreach_mul_, leave the versions of fake tensors as they are.
        is_foreach = name.startswith("_foreach_") and name.endswith("_")
        listed = {id(x) for x in tree_leaves(args[:1])} if is_foreach else ()
        for x, version in zip(tensors, versions, strict=True):
            if x._version != version or id(x) in listed:
                self._keep_gradients(x, tensors, histories)
        if name == "detach_":
            with _autograd(False):
                args[0].copy_(args[0].detach())
        if name == "detach":
            return self._detach(result, tensors, tensors)
        if not torch.is_grad_enabled():
            return self._detach(result, tensors, [x for x in tensors if x.requires_grad])
        return result

    def _access_data(self, name: str, args: Sequence[Any]) -> Any:
        """Read or assign `data` by ops: torch exports neither."""
        x = args[0]
        if name == "__get__":
            detached = self._detach(x.detach(), [x], [x])
            self._known[id(detached)] = detached
            return detached
        new = args[1]
        if new.shape != x.shape or new.dtype != x.dtype:
            raise ShardirError(
                f"expected data of {list(x.shape)} {x.dtype}, got {list(new.shape)} {new.dtype}; "
                "assign a tensor of the same shape and dtype"
            )
        further = (y for y in self._known.values() if y is not x)
        sharing = {id(y): y for y in further if _address(y) == _address(x)}
        with _autograd(False):
            self.__torch_function__(torch.Tensor.copy_, (), (x, new))
        if _address(new) != _address(x):
            self._stale |= sharing
        return None

    def _owners_of(self, tensors: Sequence[torch.Tensor], with_roots: bool) -> list[torch.Tensor]:
        """Return the tensors whose values, but not gradients, a write to one of the tensors may
        change: owners of detached aliases, and also owners without gradient if one of the tensors
        has one. `with_roots`: also bases, with gradients, of the tensors that are views."""
        owners, roots = dict[int, torch.Tensor](), dict[int, torch.Tensor]()
        for x in tensors:
            owners |= self._owners.get(_address(x), {})
            roots[id(self._root_of(x))] = self._root_of(x)
        if with_roots:
            return [x for x in (owners | roots).values() if x.requires_grad]
        is_tracked = any(x.requires_grad for x in tensors)
        return [x for i, x in owners.items() if i not in roots and (x.requires_grad or is_tracked)]

    def _keep_gradients(
        self, written: torch.Tensor, tensors: Sequence[torch.Tensor], histories: Sequence[_History]
    ) -> None:
        """Give the tensors that share a written storage the gradients that autograd records."""
        root = self._root_of(written)
        sharing = [h for h in histories if _address(h.owner) == _address(written)]
        unchanged = [h for h in sharing if _origin(h.owner) is h.origin]
        is_tracked = root.requires_grad and all(h.owner is not root for h in unchanged)
        if is_tracked and not unchanged:
            return
        if is_tracked:  # two gradients of one storage
            self._lost[id(root)] = root
        with _autograd(False):
            for owner, history, _ in unchanged:
                owner.copy_(_straight_through(owner, history))
            if not unchanged and any(x.requires_grad for x in tensors):
                written.copy_(written.detach())

    def _note_results(self, results: Any) -> None:
        """Note the results of a function."""
        for x in tree_leaves(results):
            if isinstance(x, torch.Tensor):
                self._known[id(x)] = x
                if x._base is not None and id(x._base) not in self._known:
                    self._known[id(x._base)] = x._base
                    self._inside[id(x._base)] = x

    def _root_of(self, x: torch.Tensor) -> torch.Tensor:
        """Return the base of a view; the tensor itself if it is no view."""
        return x if x._base is None else self._inside.get(id(x._base), x._base)

    def _detach(
        self, results: Any, tensors: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]
    ) -> Any:
        """Return results without gradient, and record the sources whose values a write to the
        results changes."""

        def detached(x: torch.Tensor) -> torch.Tensor:
            if any(x is y for y in tensors) or not x.is_floating_point():
                return x
            for y in sources:
                if _address(x) == _address(y):
                    self._owners.setdefault(_address(y), {})[id(self._root_of(y))] = self._root_of(
                        y
                    )
            return x.detach() if x.requires_grad or sources else x

        return tree_map_only(torch.Tensor, detached, results)


@contextmanager
def _autograd(enabled: bool) -> Iterator[None]:
    """A context, in no graph, in which autograd records or not."""
    before = torch.is_grad_enabled()
    set_grad_enabled(enabled)
    try:
        yield
    finally:
        set_grad_enabled(before)


def _origin(x: torch.Tensor) -> Any:
    """Return the node of autograd that made a tensor, or the base of a view."""
    return (x if x._base is None else x._base).grad_fn


def _address(x: torch.Tensor) -> int:
    """Return a number that tensors share if they share a storage."""
    return x.untyped_storage()._cdata
