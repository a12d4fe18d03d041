"""The node that an entry of the table of ATen ops translates, and its result."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.fx import Node
from xdsl.utils.exceptions import VerifyException

from shardir.build import FunctionBuilder, Value
from shardir.build.values import Real
from shardir.compat.torch import OpOverload, schema_of
from shardir.diagnostics import ShardirError
from shardir.frontends.torch.dtypes import dtype_name
from shardir.rewriting.rewriter import erase

AtenEntry = Callable[..., Any]

WITHOUT_VALUES = {
    "device", "layout", "pin_memory", "memory_format", "non_blocking", "dtype", "half_to_float",
    "copy", "output_dtype", "size", "shape", "output_size", "implicit", "sparse", "sparse_grad",
    "cudnn_enable", "cudnn_enabled",
}  # fmt: skip
"""Arguments that say where and how a tensor is stored, and its dtype and shape: `Translation` has
the result's."""


@dataclass(frozen=True)
class ByType:
    """An entry whose result follows from its tensors and the type of the result, which
    `Translation` has: the arguments after its parameters say no more than that type."""

    entry: AtenEntry

    def __call__(self, *args: Any) -> Any:
        return self.entry(*args)


@dataclass(frozen=True)
class Binding:
    """The parameter of an entry that takes each argument of a schema."""

    taken: Mapping[str, str]
    """Names of arguments, and of the parameters that take them."""
    left: Mapping[str, Any]
    """Names of arguments that the entry does not take, and the values that they may have."""
    complete: bool
    """Whether each parameter without a default has an argument."""


REQUIRED = object()
"""In place of the default of an argument without one."""


@cache
def binding_of(entry: AtenEntry, target: OpOverload) -> Binding:
    """Bind the arguments of a schema to the parameters of an entry: by their names, or else by
    their places to the parameters without a default."""
    by_type = isinstance(entry, ByType)
    parameters = list(inspect.signature(entry.entry if by_type else entry).parameters.values())[1:]
    names = {p.name for p in parameters}
    schema = schema_of(target).arguments
    defaults = {a.name: a.default_value if a.has_default_value() else REQUIRED for a in schema}
    taken: dict[str, str] = {}
    for i, argument in enumerate(schema):
        if argument.name in names and not by_type:
            taken[argument.name] = argument.name
        elif (
            i < len(parameters)
            and parameters[i].default is inspect.Parameter.empty
            and (by_type or parameters[i].name not in defaults)
        ):
            taken[argument.name] = parameters[i].name
    left = {} if by_type else {
        name: default for name, default in defaults.items()
        if name not in taken and name not in WITHOUT_VALUES
    }  # fmt: skip
    required = {p.name for p in parameters if p.default is inspect.Parameter.empty}
    return Binding(taken, left, required <= set(taken.values()))


def arguments_of(
    target: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Return all arguments of a call by their names, with the defaults of the schema."""
    schema = schema_of(target).arguments
    defaults = {a.name: a.default_value for a in schema if a.has_default_value()}
    return defaults | dict(zip((a.name for a in schema), args, strict=False)) | dict(kwargs)


def not_taken(
    entry: AtenEntry, target: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[str]:
    """Return the names of the arguments of a call that an entry does not take, and whose values are
    not the schema's defaults."""
    left = binding_of(entry, target).left
    arguments = arguments_of(target, args, kwargs)
    return [name for name, default in left.items() if not _is_default(arguments.get(name), default)]


def _is_default(value: Any, default: Any) -> bool:
    if value is None:
        return True
    if isinstance(value, Value) or default is REQUIRED:
        return False
    if isinstance(value, list | tuple) and isinstance(default, list | tuple):
        return list(value) == list(default)
    return bool(value == default)


def entry_call(entry: AtenEntry) -> AtenEntry:
    """Return a function of a call's arguments that passes an entry the arguments that it takes. It
    returns NotImplemented if the entry does not take one, so that none is left out in silence, or
    if ops of ours do not take its operands."""

    def call(t: "Translation", *args: Any, **kwargs: Any) -> Any:
        target = t.node.target
        assert isinstance(target, OpOverload)
        binding = binding_of(entry, target)
        if not binding.complete or not_taken(entry, target, args, kwargs):
            return NotImplemented
        arguments = arguments_of(target, args, kwargs)
        if not arguments.keys().isdisjoint(DIMENSIONS):
            arguments = _with_rows(arguments, arguments[schema_of(target).arguments[0].name])
        operands_by_name = {
            binding.taken[name]: x for name, x in arguments.items() if name in binding.taken
        }
        block = t.function.block
        before = block.last_op
        try:
            result = (
                entry(t, *operands_by_name.values())
                if isinstance(entry, ByType)
                else entry(t, **operands_by_name)
            )
            result = _without_rows(t.node, result)
            op = block.last_op
            while op is not before and op is not None:
                op.verify_()
                op = op.prev_op
        except (ShardirError, VerifyException):  # ops of ours do not take integers, for example
            while (last_op := block.last_op) is not before and last_op is not None:
                erase(last_op)
            return NotImplemented
        return result

    return call


DIMENSIONS = ("dim", "dims")
"""The arguments that name dimensions: a scalar has one, 0 or -1."""


def _with_rows(arguments: dict[str, Any], first: Any) -> dict[str, Any]:
    """The arguments of a call whose first one is a scalar, with tensors of one dimension in place
    of scalars."""
    if not isinstance(first, Value) or first.shape:
        return arguments
    return {n: x.reshape(1) if isinstance(x, Value) and not x.shape else x
            for n, x in arguments.items()}  # fmt: skip


def _without_rows(node: Node, results: Any) -> Any:
    """Return the results of an entry, as scalars where the node's results are."""
    examples = node.meta.get("val")
    if isinstance(results, tuple | list):
        several = examples if isinstance(examples, tuple | list) else [examples]
        both = zip(results, several, strict=False)
        return (*(_scalar(x, fake) for x, fake in both), *results[len(several) :])
    return _scalar(results, examples)


def _scalar(x: Any, fake: Any) -> Any:
    is_row = isinstance(x, Value) and x.shape == (1,)
    return x.reshape() if is_row and isinstance(fake, torch.Tensor) and not fake.dim() else x


SMALL = {torch.uint8: (0, 255), torch.int8: (128, 255), torch.int16: (32768, 65535)}
"""The integers computed in i32: the offset that makes all of them nonnegative, and the mask of
their bits."""


def conform(node: Node, results: Any, moved: bool) -> Any:
    """Return the results of a node with torch's dtypes; small integers wrap around. `moved` results
    consist of elements of the operands.

    Raises:
        ShardirError: a result is of another type than torch's.
    """
    expected = node.meta.get("val")
    several = isinstance(expected, tuple | list)
    outputs = results if isinstance(results, tuple | list) else [results]
    out = []
    for x, fake in zip(outputs, expected if several else [expected], strict=False):
        if isinstance(x, Value) and isinstance(fake, torch.Tensor):
            want = tuple(fake.shape), dtype_name(fake.dtype)
            if (x.shape, x.dtype) != want:
                raise ShardirError(
                    f"expected {node.target} of {want[1]} {list(want[0])}, got {x.dtype} "
                    f"{list(x.shape)}: its translation is wrong; write it by other ops"
                )
            if fake.dtype in SMALL and not moved:
                first, mask = SMALL[fake.dtype]
                x = (x + first if first else x) & x.function.constant(mask, dtype="i32")
                x = x - first if first else x
        out.append(x)
    return (*out, *outputs[len(out) :]) if isinstance(results, tuple | list) else out[0]


class Translation:
    """The translation of one node."""

    def __init__(
        self,
        function: FunctionBuilder,
        node: Node,
        random: Callable[[], tuple[Value, int]],
    ):
        self.function, self.node, self.nn = function, node, function.nn
        self.random = random
        """Returns the key of random numbers, and a stream of its own for each call."""

    # ---- the result ----

    @property
    def result(self) -> Any:
        """The node's result, or the first of several, as torch's fake tensor."""
        example = self.node.meta["val"]
        return example[0] if isinstance(example, tuple | list) else example

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.result.shape)

    @property
    def dtype(self) -> str:
        return dtype_name(self.result.dtype)

    def of(self, at: int) -> "Translation":
        """The translation of a node whose result is like an argument of this one."""
        node = self.node.args[at]
        assert isinstance(node, Node)
        return Translation(self.function, node, self.random)

    # ---- operands ----

    def argument(self, at: int) -> Any:
        """The fake tensor, or the number, of an argument."""
        argument = self.node.args[at]
        return argument.meta["val"] if isinstance(argument, Node) else argument

    def value(self, x: Value | Real, dtype: str | None = None) -> Value:
        """Convert a value or a number to a dtype, by default the result's."""
        dtype = dtype or self.dtype
        if isinstance(x, Value):
            return x.to(dtype)
        number = bool(x) if dtype == "i1" else int(x) if dtype.startswith("i") else x
        return self.function.constant(number, dtype=dtype)

    def binary(self, op: AtenEntry, x: Value | Real, y: Value | Real) -> Value:
        """Apply an op to two operands in the result's dtype."""
        return op(self.value(x), self.value(y))

    def promoted(self, x: Value | Real, y: Value | Real) -> tuple[Value, Value]:
        """Convert two operands to the dtype to which torch promotes them."""
        dtype = dtype_name(torch.result_type(self.argument(0), self.argument(1)))
        return self.value(x, dtype), self.value(y, dtype)

    def full(self, number: Real, shape: Sequence[int] | None = None) -> Value:
        """Return a tensor full of a number, in the result's dtype and, by default, shape."""
        return self.value(number).broadcast_to(*(self.shape if shape is None else shape))

    def iota(self, shape: Sequence[int], dim: int = 0, dtype: str = "i64") -> Value:
        """Return the indices along a dimension."""
        return self.nn.iota(dim=dim, shape=shape, dtype=dtype)
