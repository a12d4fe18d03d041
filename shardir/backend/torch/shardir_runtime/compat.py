"""Private names of torch, and names that differ between its versions."""

from typing import Any

from torch import Tensor
from torch.utils import _python_dispatch
from torch.utils._pytree import tree_leaves

__all__ = ["TorchDispatchMode", "tree_leaves"]


class TorchDispatchMode(_python_dispatch.TorchDispatchMode):
    """Torch's, without its wrapper against compilation, which imports torch's compiler at the first
    op (a second) and makes each op slower. It may not be active while compiled code runs."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def schema_of(op: Any) -> Any:
    """Return the schema of an op of torch: its name, arguments and returns."""
    return op._schema


def is_zeros_without_memory(x: Tensor) -> bool:
    """Whether a tensor is one of zeros that has no memory."""
    formal: Any = x  # torch declares no such method
    return formal._is_zerotensor()


def wrapper(kind: type[Any], shape: Any, dtype: Any) -> Any:
    """Return a new tensor of a subclass, without memory of its own."""
    return Tensor._make_wrapper_subclass(kind, shape, dtype=dtype)


def is_profiled() -> bool:
    """Whether a profiler of torch runs."""
    from torch.autograd import profiler

    return profiler._is_profiler_enabled


def compile_errors() -> type[RuntimeError]:
    """Return the class of the errors of torch.compile."""
    from torch._dynamo.exc import TorchDynamoException

    return TorchDynamoException
