"""Writes that autograd does not see, made visible in the graph of an export.

In torch a value belongs to a storage, its gradient to a tensor. A graph without writes has values
alone, so a write that leaves a gradient as it was needs an op of its own:

    with torch.no_grad():             h = y.clone()
        y.mul_(2)              ->     y.mul_(2)
                                      y.copy_(straight_through(y, h))

`straight_through(x, h)` has the elements of x and the gradient of h. The same holds for a write to
`y.detach()` or `y.data`, which changes y and not its gradient. Results without a gradient of
tensors with one are detached.

The functions of torch that a module calls pass through a mode, where torch itself tells what was
written (the version of a tensor), of what a tensor is a view, and whether it has a gradient.
Contexts such as no_grad are not in the graph, which would be split at each: what they change is.
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
"""The functions by which those of torch.nn.functional find that a mode is active."""


HOOKS = ("register_hook", "register_post_accumulate_grad_hook")


VIEWS = ("T", "mT", "H", "mH", "real")
"""Attributes of tensors that are views."""

DROPOUTS = ("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout")
"""Functions of a tensor, a probability and whether to train, which return the tensor itself where
they are off; of fake tensors a copy."""


class _History(NamedTuple):
    """A tensor, a copy with the gradient that it had, and the node of autograd that made it."""

    owner: torch.Tensor
    copy: torch.Tensor
    origin: Any


class Histories(TorchFunctionMode):
    """The mode within which a module is exported. Where it is not to be trained, there are no
    gradients, and only `data` becomes an op."""

    def __init__(self, train: bool) -> None:
        super().__init__()
        self._train = train
        self._owners: dict[int, dict[int, torch.Tensor]] = {}
        """By the address of a storage, the tensors with gradients that have detached aliases."""
        self._known: dict[int, torch.Tensor] = {}
        """The tensors that functions got and returned, by their identity."""
        self._inside: dict[int, torch.Tensor] = {}
        """By the identity of a tensor that is inside of a function of torch, as that of which a
        linear layer returns a view, the function's result."""
        self._lost: dict[int, torch.Tensor] = {}
        """Detached tensors that have a gradient since a write to them, which the graph has not."""
        self._stale: dict[int, torch.Tensor] = {}
        """Views made before `data` of their tensor was assigned: they keep the old memory."""
        self._suspended = not train

    @contextmanager
    def recording(self) -> Iterator[None]:
        """The context in which a module runs. The functions that those of torch.nn.functional
        call pass through the mode, not these themselves."""
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
                return self._data(name, args)
            if getattr(attribute, "__name__", "") not in VIEWS:
                return func(*args)
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        if name in HOOKS and self._train:
            raise ShardirError(
                f"expected gradients without hooks, got {name}; write it into forward"
            )
        if any(id(x) in self._stale for x in given):
            raise ShardirError(
                "expected no view of a tensor that is read after its data is assigned, got one; "
                "clone the view first, or write to the tensor in place"
            )
        if name in DROPOUTS and not all((*args[1:], *kwargs.values())):
            return given[0]
        if not self._train:
            self._known |= {id(x): x for x in given}
            found = func(*args, **kwargs)
            self._learn(found)
            return found
        if self._suspended:
            return func(*args, **kwargs)
        self._known |= {id(x): x for x in given}
        if any(id(self._root(x)) in self._lost for x in given):
            raise ShardirError(
                "expected a write without a gradient to a detached tensor that is read later, got "
                "one with a gradient; write to the tensor itself, or to a clone"
            )
        # What a function of Python calls does not pass through the mode.
        is_python = isinstance(func, FunctionType)
        owners = self._owners_of(given, with_roots=is_python or not torch.is_grad_enabled())
        versions = [x._version for x in given]
        with _autograd(True):
            histories = [_History(x, x.clone(), _origin(x)) for x in owners]
        found = func(*args, **kwargs)
        self._learn(found)
        # Functions of lists, _foreach_mul_, leave the versions of fake tensors as they are.
        is_foreach = name.startswith("_foreach_") and name.endswith("_")
        listed = {id(x) for x in tree_leaves(args[:1])} if is_foreach else ()
        for x, version in zip(given, versions, strict=True):
            if x._version != version or id(x) in listed:
                self._keep(x, given, histories)
        if name == "detach_":
            with _autograd(False):
                args[0].copy_(args[0].detach())
        if name == "detach":
            return self._detached(found, given, given)
        if not torch.is_grad_enabled():
            return self._detached(found, given, [x for x in given if x.requires_grad])
        return found

    def _data(self, name: str, args: Sequence[Any]) -> Any:
        """Read or assign `data` by ops: torch exports neither."""
        x = args[0]
        if name == "__get__":
            found = self._detached(x.detach(), [x], [x])
            self._known[id(found)] = found
            return found
        new = args[1]
        if new.shape != x.shape or new.dtype != x.dtype:
            raise ShardirError(
                f"expected data of {list(x.shape)} {x.dtype}, got {list(new.shape)} {new.dtype}; "
                "assign a tensor of the same shape and dtype"
            )
        others = (y for y in self._known.values() if y is not x)
        sharing = {id(y): y for y in others if _address(y) == _address(x)}
        with _autograd(False):
            self.__torch_function__(torch.Tensor.copy_, (), (x, new))
        if _address(new) != _address(x):
            self._stale |= sharing
        return None

    def _owners_of(self, given: Sequence[torch.Tensor], with_roots: bool) -> list[torch.Tensor]:
        """Return the tensors whose values alone a write to one of the tensors may change, and not
        their gradients: the owners of detached aliases, also those without a gradient where one of
        the tensors has one; `with_roots`: those with gradients of which it is a view too.
        """
        owners, roots = dict[int, torch.Tensor](), dict[int, torch.Tensor]()
        for x in given:
            owners |= self._owners.get(_address(x), {})
            roots[id(self._root(x))] = self._root(x)
        if with_roots:
            return [x for x in (owners | roots).values() if x.requires_grad]
        is_tracked = any(x.requires_grad for x in given)
        return [x for i, x in owners.items() if i not in roots and (x.requires_grad or is_tracked)]

    def _keep(
        self, written: torch.Tensor, given: Sequence[torch.Tensor], histories: Sequence[_History]
    ) -> None:
        """Let the tensors that share a written storage have the gradients that autograd says."""
        root = self._root(written)
        sharing = [h for h in histories if _address(h.owner) == _address(written)]
        kept = [h for h in sharing if _origin(h.owner) is h.origin]
        is_tracked = root.requires_grad and all(h.owner is not root for h in kept)
        if is_tracked and not kept:
            return
        if is_tracked:  # two gradients of one storage
            self._lost[id(root)] = root
        with _autograd(False):
            for owner, history, _ in kept:
                owner.copy_(_straight_through(owner, history))
            if not kept and any(x.requires_grad for x in given):
                written.copy_(written.detach())

    def _learn(self, found: Any) -> None:
        """Note the results of a function."""
        for x in tree_leaves(found):
            if isinstance(x, torch.Tensor):
                self._known[id(x)] = x
                if x._base is not None and id(x._base) not in self._known:
                    self._known[id(x._base)] = x._base
                    self._inside[id(x._base)] = x

    def _root(self, x: torch.Tensor) -> torch.Tensor:
        """The tensor of which one is a view, or itself."""
        return x if x._base is None else self._inside.get(id(x._base), x._base)

    def _detached(
        self, found: Any, given: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]
    ) -> Any:
        """Return results that have no gradient, and retain which of the sources have values that a
        write to them changes."""

        def detached(x: torch.Tensor) -> torch.Tensor:
            if any(x is y for y in given) or not x.is_floating_point():
                return x
            for y in sources:
                if _address(x) == _address(y):
                    self._owners.setdefault(_address(y), {})[id(self._root(y))] = self._root(y)
            return x.detach() if x.requires_grad or sources else x

        return tree_map_only(torch.Tensor, detached, found)


@contextmanager
def _autograd(enabled: bool) -> Iterator[None]:
    """A context in which autograd records or not, that is in no graph."""
    before = torch.is_grad_enabled()
    set_grad_enabled(enabled)
    try:
        yield
    finally:
        set_grad_enabled(before)


def _origin(x: torch.Tensor) -> Any:
    """The node of autograd that made a tensor, or that of which it is a view."""
    return (x if x._base is None else x._base).grad_fn


def _address(x: torch.Tensor) -> int:
    """A number that tensors have in common if they share a storage."""
    return x.untyped_storage()._cdata
