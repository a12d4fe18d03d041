"""Custom calls of functions that are registered, with a rule of Shardy or without."""

from collections.abc import Sequence
from typing import Any

from xdsl.dialects.builtin import DictionaryAttr, StringAttr

from shardir.build import Value
from shardir.build.attributes import option_attribute
from shardir.dialects.nn import CustomOp
from shardir.dialects.nn.custom import is_dotted_name, is_registered
from shardir.frontends.stablehlo.form import HloOp
from shardir.frontends.stablehlo.shardy import RULE, rule_from_sdy
from shardir.frontends.stablehlo.translation import HloEntry, OpTranslation
from shardir.frontends.stablehlo.types import DTYPES

CALL = "stablehlo.custom_call"

READ = frozenset((
    "call_target_name", "api_version", "backend_config", "has_side_effect", "operand_layouts",
    "result_layouts", "output_operand_aliases", "called_computations", RULE, "sdy.sharding",
))  # fmt: skip
"""The attributes that are read, or that say nothing about values."""


def is_custom(op: HloOp) -> bool:
    """Whether an op is a call of a function that is registered."""
    return op.name == CALL and is_registered(_target(op))


def _target(op: HloOp) -> str:
    return str(op.attributes.get("call_target_name"))


def _custom(t: OpTranslation, *operands: Value) -> Sequence[Value]:
    name = _target(t.op)
    if not is_dotted_name(name):
        t.refuse(f"a target with the name {name!r}; use letters, digits, _ and dots")
    if t["has_side_effect"]:
        t.refuse("a call with side effects")
    if others := sorted(t.op.attributes.keys() - READ):
        t.refuse(f"the attribute {others[0]} of a custom call")
    props: dict[str, Any] = {"callee": StringAttr(name)}
    if t[RULE] is not None:
        props["sharding_rule"] = StringAttr(rule_from_sdy(t[RULE]))
    if options := _options(t):
        props["options"] = DictionaryAttr(options)
    results = [(r.type.shape, DTYPES[r.type.element]) for r in t.op.results]
    return t.function.op(CustomOp, operands, props, results=results)


def _options(t: OpTranslation) -> dict[str, Any]:
    config = t["backend_config"]
    if not config:
        return {}
    if not isinstance(config, dict):
        return {"config": StringAttr(str(config))}
    return {key: option_attribute(value) for key, value in config.items()}


TABLE: dict[str, HloEntry] = {CALL: _custom}
