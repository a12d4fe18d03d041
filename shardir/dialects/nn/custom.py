"""Custom ops: functions that the embedder registers under a name.

    %y = nn.custom "acme.rescale"(%x) with {by = 2.0} : (tensor<8x4xf32>) -> tensor<8x4xf32>

    shardir.register_custom_op("acme.rescale", torch="acme.kernels:rescale", evaluate=rescale,
                               rule="(i, j) -> (i, j)", gradient="acme.rescale_grad")

The IR has only the op's name and data; its functions are registered in Python. Without a rule
nothing is known about its dimensions: every device computes the whole op, from replicated operands.
"""

import keyword
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from xdsl.dialects.builtin import (
    AnyFloat,
    ArrayAttr,
    DenseArrayBase,
    DictionaryAttr,
    FloatAttr,
    IntegerAttr,
    StringAttr,
    TensorType,
    UnitAttr,
    i1,
)
from xdsl.ir import Attribute, SSAValue
from xdsl.irdl import (
    opt_prop_def,
    prop_def,
    var_operand_def,
    var_result_def,
)

from shardir.algebra.factors import Dims, Factors
from shardir.algebra.layout import Shape
from shardir.diagnostics import ShardirError, coded
from shardir.dialects.definition import op_definition
from shardir.dialects.nn.base import STRATEGY, Array, Device, Props, TensorOp, Types, factor_names
from shardir.dialects.nn.types import unsharded_type
from shardir.dialects.signatures import forget_signatures

if TYPE_CHECKING:
    from shardir.dialects.builder import OpBuilder

OptionValue = int | float | str | tuple["OptionValue", ...]

NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", re.ASCII)
RULE = re.compile(
    r"(?P<operands>.*?)->(?P<results>[^>]*\))"
    r"(\s*reduce\s+(?P<reduction>sum|max|min))?(\s*replicate\s+(?P<replicate>\w+(\s*,\s*\w+)*))?"
    r"(\s*sizes\s+(?P<sizes>\w+\s*=\s*\d+(\s*,\s*\w+\s*=\s*\d+)*))?\s*",
    re.ASCII,
)
GROUPS = re.compile(r"\s*(\([^()]*\)(\s*,\s*\([^()]*\))*)?\s*")
FACTOR = re.compile(r"[A-Za-z_]\w*", re.ASCII)
REST = "..."
"""Any number of dimensions, one or more of them next to each other."""


def is_dotted_name(text: str) -> bool:
    """Whether a text is an ASCII Python name, perhaps dotted."""
    return NAME.fullmatch(text) is not None and not any(map(keyword.iskeyword, text.split(".")))


# ---- registrations ----


@dataclass(frozen=True)
class Rule:
    """The factors of an op, whatever the sizes of its dimensions.

    Attributes:
        operands, results: one factor for each dimension of each value, "" for none, "a b" for a
            dimension of several.
        sizes: of factors, where no dimension has them.
    """

    operands: Dims
    results: Dims
    reduction: str
    replicate: tuple[str, ...]
    sizes: tuple[tuple[str, int], ...] = ()

    @staticmethod
    def read(text: str) -> "Rule":
        """Parse `(..., k), (k, j) -> (..., j)`, with optional `reduce max`, `replicate j` and
        `sizes i = 2, j = 4` of factors of dimensions `i j`, which have several.

        Raises:
            ShardirError: the text is malformed, or no device could compute by the rule.
        """

        def wrong(want: str, got: str) -> ShardirError:
            return ShardirError(f"rule {text!r}: expected {want}, got {got}")

        m = RULE.fullmatch(text)
        if m is None or not all(GROUPS.fullmatch(m[side]) for side in ("operands", "results")):
            form = '"(i, k), (k, j) -> (i, j) reduce sum replicate j"'
            raise ShardirError(f"expected a rule of the form {form}, got {text!r}")
        operands, results = (
            tuple(
                tuple("" if (d := " ".join(dim.split())) == "1" else d for dim in group.split(","))
                if group.strip()
                else ()
                for group in re.findall(r"\(([^()]*)\)", m[side])
            )
            for side in ("operands", "results")
        )
        replicate = tuple(f.strip() for f in (m["replicate"] or "").split(",") if f.strip())
        for value in (*operands, *results):
            if bad := [d for d in value if d != REST and not all(map(FACTOR.fullmatch, d.split()))]:
                raise wrong("names for a dimension, or 1 for none", repr(bad[0]))
            factors = _names_of([value])
            if len(set(factors)) < len(factors):
                raise wrong("distinct names in a value", f"({', '.join(value)})")
        known = {*_names_of(operands)}
        for f in _names_of(results):
            if f not in known and f not in replicate:
                raise wrong("the names of results in an operand", f"{f}; add replicate {f}")
        sizes = tuple((f, int(n)) for f, n in re.findall(r"(\w+)\s*=\s*(\d+)", m["sizes"] or ""))
        names = {*_names_of((*operands, *results))}
        for word, own in (("replicate", {*replicate}), ("sizes", {f for f, _ in sizes})):
            if lost := own - names:
                raise wrong(f"names of dimensions after {word}", min(lost))
        return Rule(operands, results, m["reduction"] or "sum", replicate, sizes)

    def of(self, operands: Sequence[Shape], results: Sequence[Shape]) -> "Rule":
        """Return the rule with names in place of `...`, from the right: `(a, b, k), (k, j) ->
        (a, b, j)`. A value of which it does not fit keeps it."""
        names = {*_names_of((*self.operands, *self.results))}
        if REST not in names:
            return self
        pairs = zip((*self.operands, *self.results), (*operands, *results), strict=False)
        counts = [len(shape) - len(dims) + 1 for dims, shape in pairs if REST in dims]
        most = max(counts, default=0)
        free = [n for i in range(most + len(names)) if (n := f"d{i}") not in names][:most]

        def named(dims: tuple[str, ...], shape: Shape) -> tuple[str, ...]:
            count = len(shape) - len(dims) + 1
            if REST not in dims or count < 0:
                return dims
            at = dims.index(REST)
            return (*dims[:at], *free[most - count :], *dims[at + 1 :])

        sides = (self.operands, operands), (self.results, results)
        of_operands, of_results = (
            tuple(map(named, dims, shapes)) if len(dims) == len(shapes) else dims
            for dims, shapes in sides
        )
        return replace(self, operands=of_operands, results=of_results)

    def misfit(self, operands: Sequence[Shape], results: Sequence[Shape]) -> str:
        """Return the mismatch of shapes and rule as "X, got Y"; "" if they fit."""
        sizes = dict(self.sizes)
        merged: list[tuple[str, int]] = []
        for what, names, shapes in (
            ("operand", self.operands, operands), ("result", self.results, results),
        ):  # fmt: skip
            if len(names) != len(shapes):
                return f"{len(names)} {what}s, got {len(shapes)}"
            for i, (dims, shape) in enumerate(zip(names, shapes, strict=True)):
                if len(dims) != len(shape):
                    if REST in dims:
                        least = len(dims) - 1
                        return f"at least {least} dimensions in {what} {i}, got {len(shape)}"
                    return f"{len(dims)} dimensions in {what} {i}, got {len(shape)}"
                for f, n in zip(dims, shape, strict=True):
                    if " " in f:
                        merged.append((f, n))
                    elif f and sizes.setdefault(f, n) != n:
                        return f"one size of {f}, got {sizes[f]} and {n}"
        for factors, n in merged:
            if lacking := [f for f in factors.split() if f not in sizes]:
                return f"the size of {lacking[0]}, as in sizes {lacking[0]} = 2, got none"
            if (size := prod(sizes[f] for f in factors.split())) != n:
                return f"{size} elements of {factors}, got {n}"
        return ""


def _names_of(values: Sequence[Sequence[str]]) -> list[str]:
    """Return the names of the factors of values, in their order."""
    return [f for value in values for dim in value for f in dim.split()]


@dataclass(frozen=True)
class Custom:
    """The registration of a custom op."""

    evaluate: Callable[..., Any] | None = None
    torch: str | None = None
    gradient: str | None = None
    rule: Rule | Callable[..., str | None] | None = None

    @cached_property
    def function(self) -> tuple[str, str] | None:
        """The module and the function of `torch`."""
        if self.torch is None:
            return None
        module, _, function = self.torch.partition(":")
        return module, function


_registered: dict[str, Custom] = {}
_NOTHING = Custom()


def register_custom_op(
    name: str,
    *,
    torch: str | None = None,
    evaluate: Callable[..., Any] | None = None,
    rule: str | Callable[..., str | None] | None = None,
    gradient: str | None = None,
) -> None:
    """Register the functions of `nn.custom "name"`, or of an op `name` of a dialect that shardir
    does not know. This replaces an earlier registration of the name.

    Args:
        torch: `"module:function"`. Emitted programs import the module, and call the function with
            the operands' tensors, and the op's attributes by name. It must not modify operands.
        evaluate: a function with equal results on numpy arrays, for the interpreter.
        rule: how the dimensions relate, such as `"(..., k), (k, j) -> (..., j)"`, where `...` is
            any number of dimensions; or a function of the shapes of operands and of results, and of
            the attributes by name, that returns such a text, or None. The functions then get a
            device's shards. Names that a result lacks are summed over. A rule in the program
            counts before it.
        gradient: the name of the custom op that takes operands, results and the cotangents of the
            float results, and returns the cotangents of the float operands.

    Raises:
        ShardirError: a name, the rule or `torch` is invalid.
    """
    for n in (name, gradient):
        if n is not None and not NAME.fullmatch(n):
            raise ShardirError(
                f"expected a name of a custom op, got {n!r}; use letters, digits, _ and dots"
            )
    if torch is not None:
        module, colon, function = torch.partition(":")
        if not (colon and is_dotted_name(module) and is_dotted_name(function)):
            raise ShardirError(f'expected torch="module:function", got {torch!r}')
    read = Rule.read(rule) if isinstance(rule, str) else rule
    registration = Custom(evaluate, torch, gradient, read)
    _registered[name] = registration
    forget_signatures()


def is_registered(name: str) -> bool:
    """Whether functions are registered under a name."""
    return name in _registered


def forget_custom_op(name: str) -> None:
    """Remove the registration of a name."""
    _registered.pop(name, None)
    forget_signatures()


# ---- the op ----


def python_value(attr: Attribute) -> OptionValue:
    """The Python value of an attribute: a number, a bool, a string, a tuple of these, or else its
    text."""
    match attr:
        case IntegerAttr():
            return bool(attr.value.data) if attr.type == i1 else attr.value.data
        case FloatAttr():
            return attr.value.data
        case StringAttr():
            return attr.data
        case UnitAttr():
            return True
        case ArrayAttr():
            return tuple(python_value(a) for a in attr.data)
        case DenseArrayBase():
            integers_or_floats: Any = attr
            return tuple(integers_or_floats.get_values())
        case _:
            return str(attr)


def values_of(options: Attribute | None) -> dict[str, OptionValue]:
    """Return the options of an op as Python values."""
    data = options.data if isinstance(options, DictionaryAttr) else {}
    return {name: python_value(a) for name, a in data.items()}


def rule_among(operands: Types, results: Types, props: Props) -> Rule | None:
    """Return the rule of a custom op, that of its text or of its registration; None without one.

    Raises:
        ShardirError: the text is malformed, or a registered function returns no rule.
    """
    callee, text = props["callee"], props.get("sharding_rule")
    assert isinstance(callee, StringAttr)
    shapes = [[t.get_shape() for t in side] for side in (operands, results)]
    rule = _registered.get(callee.data, _NOTHING).rule
    if isinstance(text, StringAttr):
        rule = Rule.read(text.data)
    elif callable(rule):
        found = rule(*shapes, **values_of(props.get("options")))
        if found is not None and not isinstance(found, str):
            raise ShardirError(f"expected the text of a rule from its function, got {found!r:.60}")
        rule = None if found is None else Rule.read(found)
    return None if rule is None else rule.of(*shapes)


@op_definition
class CustomOp(TensorOp):
    """The function registered in Python under the name (`shardir.register_custom_op`). Without a
    registered rule each device computes the whole op, from replicated operands"""

    name = "nn.custom"
    callee = prop_def(StringAttr)
    sharding_rule = opt_prop_def(StringAttr)
    options = opt_prop_def(DictionaryAttr)
    xs = var_operand_def(TensorType)
    outs = var_result_def(TensorType)
    assembly_format = (
        f"$callee `(` $xs `)` (`rule` $sharding_rule^)? (`with` $options^)? {STRATEGY}"
    )
    INFERRED: ClassVar[bool] = False
    GLOBAL_TYPES: ClassVar[bool] = True
    PRECISION: ClassVar[str] = "wide"

    @property
    def custom(self) -> Custom:
        """The registration of the callee."""
        return _registered.get(self.callee.data, _NOTHING)

    @property
    def values(self) -> dict[str, OptionValue]:
        """The options as Python values."""
        return values_of(self.options)

    @property
    def has_rule(self) -> bool:
        """Whether the relation of its dimensions is known."""
        operands, results = (
            [unsharded_type(v) for v in side] for side in (self.operands, self.results)
        )
        return rule_among(operands, results, self.properties) is not None

    def lacks(self, what: str, example: str) -> ShardirError:
        """The error that `what` is needed and not registered."""
        name = self.callee.data
        message = f'expected the {what} of the custom op "{name}", got none'
        use = (
            f'use shardir.register_custom_op("{name}", {example}), here or in a module for --import'
        )
        return ShardirError(coded("T11", message, use=use))

    @classmethod
    def infer(cls, operands: Types, props: Props) -> list[TensorType]:
        message = "expected explicit result types of a custom op, got none"
        raise ShardirError(coded("T11", message, use=""))

    @classmethod
    def check_results(cls, operands: Types, results: Types, props: Props) -> None:
        callee, options = props["callee"], props.get("options")
        assert isinstance(callee, StringAttr)
        if not NAME.fullmatch(callee.data):
            text = f"expected a name of a custom op, got {callee.data!r}"
            raise ShardirError(coded("T11", text, use="use letters, digits, _ and dots"))
        for name in options.data if isinstance(options, DictionaryAttr) else ():
            if not is_dotted_name(name) or "." in name:
                text = f"expected a Python name for an option, got {name!r}"
                raise ShardirError(coded("T11", text, use="rename the option"))
        if not results:
            text = "expected a custom op with results, got none"
            raise ShardirError(coded("T11", text, use=""))
        try:
            rule = rule_among(operands, results, props)
        except ShardirError as e:
            use = "correct the rule"
            raise ShardirError(coded("T11", f'"{callee.data}": {e}', use=use)) from None
        shapes = ([t.get_shape() for t in side] for side in (operands, results))
        if rule is not None and (message := rule.misfit(*shapes)):
            text = f'rule of "{callee.data}": expected {message}'
            raise ShardirError(coded("T11", text, use="correct the rule or the types"))

    @classmethod
    def rule(cls, operands: Types, results: Types, props: Props) -> Factors:
        shapes = [t.get_shape() for t in (*operands, *results)]
        if (rule := rule_among(operands, results, props)) is not None:
            factors = Factors.of(rule.operands, rule.results, shapes, replicate=rule.replicate,
                                 reduction=rule.reduction)  # fmt: skip
            return factors.with_sizes(dict(factors.sizes) | dict(rule.sizes))
        names = factor_names(sum(map(len, shapes)))
        unused = iter(names)
        dims = [[next(unused) for _ in shape] for shape in shapes]
        n = len(operands)
        return Factors.of(dims[:n], dims[n:], shapes, replicate=names)

    def evaluate(self, device: Device, *arrays: Array) -> Array | tuple[Array, ...]:
        if self.custom.evaluate is None:
            raise self.lacks("evaluation in numpy", "evaluate=function")
        outputs = self.custom.evaluate(*arrays, **self.values)
        results = tuple(map(np.asarray, outputs if isinstance(outputs, tuple) else (outputs,)))
        shapes, wanted = [a.shape for a in results], [device.shape(v) for v in self.results]
        if shapes != wanted:
            name, have, want = self.callee.data, *(list(map(list, l)) for l in (shapes, wanted))
            message = f'expected shapes {want} of the evaluation of "{name}", got {have}'
            raise ShardirError(coded("T11", message, use="correct the function or the types"))
        return results

    def gradient(self, b: "OpBuilder", *cotangents: SSAValue | None) -> Sequence[SSAValue | None]:
        if self.custom.gradient is None:
            name = self.callee.data
            message = f'expected a gradient of the custom op "{name}", got none'
            use = f'use register_custom_op("{name}", gradient="{name}_grad"), or nn.stop_gradient'
            raise ShardirError(coded("G8", message, use=use))
        result_cotangents = [
            b.zeros(unsharded_type(v), like=v) if d is None else d
            for v, d in zip(self.results, cotangents, strict=True)
            if isinstance(unsharded_type(v).element_type, AnyFloat)
        ]
        types = [unsharded_type(v) for v in self.operands]
        floats = [isinstance(t.element_type, AnyFloat) for t in types]
        props: dict[str, Attribute] = {"callee": StringAttr(self.custom.gradient)}
        if self.options is not None:
            props["options"] = self.options
        operand_cotangents = iter(b.results(
            CustomOp, *self.operands, *self.results, *result_cotangents, props=props,
            result=[t for t, is_float in zip(types, floats, strict=True) if is_float],
        ))  # fmt: skip
        return [next(operand_cotangents) if is_float else None for is_float in floats]
