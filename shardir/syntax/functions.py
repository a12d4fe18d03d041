"""The reductions of modules and functions: no assembly_format can declare their syntax."""

from collections.abc import Sequence
from typing import Any

from xdsl.dialects.builtin import ArrayAttr, DictionaryAttr, FunctionType, ModuleOp, StringAttr
from xdsl.dialects.func import FuncOp
from xdsl.ir import Attribute, Block, Operation, Region

from shardir.grammar.machine import Token
from shardir.syntax.reductions import Reductions
from shardir.syntax.spelling import text_of


class FunctionReductions(Reductions):
    """The reductions of builtin.module and func.func; `c` is the list of a rule's children."""

    def builtin_module(self, c: list[Any]) -> Operation | None:
        name, symbol, attrs, region = c
        if not region.blocks:
            region.add_block(Block())
        if self.bad:
            return None
        op = ModuleOp(region, attrs or {}, None if symbol is None else StringAttr(text_of(symbol)))
        op.location = self.source.location(name.start)
        return op

    # ---- the head of a function ----
    def param(self, c: list[Any]) -> tuple[Token, Attribute | None, Any, Any]:
        """Return (name, type, location, attributes); a bad type drops the argument only."""
        t, type, attrs, loc = c
        if self.bad:
            self.head_lost = True
        self.bad = False
        return t, type, loc, attrs

    def unnamed(self, c: list[Any]) -> tuple[None, Attribute | None, Any, Any]:
        type, attrs, loc = c
        return None, type, loc, attrs

    def func_result(self, c: list[Any]) -> list[tuple[Attribute, None]]:
        return [(c[0], None)]

    def listed_result(self, c: list[Any]) -> tuple[Attribute, Any]:
        return c[0], c[1]

    def func_results(self, c: list[Any]) -> list[Any]:
        return c[0] or []

    def func_head(self, c: list[Any]) -> tuple[Any, ...]:
        name, visibility, symbol, params, results, attrs = c
        params = params or []
        named = [p for p in params if p[0] is not None]
        if named and len(named) != len(params):
            self.log.report_at(symbol, "expected all arguments to be named, or none")
            self.bad = True
        bad, self.bad = self.bad or self.head_lost, False
        self.head_lost = False
        if bad:
            self.log.incomplete.symbols.add(self.symbol(symbol))
        self.arguments, self.isolated = [(t, type, loc) for t, type, loc, _ in named], True
        return bad, name, visibility, symbol, params, results or [], attrs or {}

    # ---- the function ----
    def func_func(self, c: list[Any]) -> Operation | None:
        (bad, name, visibility, symbol, params, results, attrs), region = c
        self.arguments, self.isolated = None, False
        if bad or self.bad:
            return None
        type = FunctionType.from_lists([p[1] for p in params], [t for t, _ in results])
        op = FuncOp(
            self.symbol(symbol), type, region or Region(),
            None if visibility is None else visibility[0].value,
            arg_attrs=_dictionaries([p[3] for p in params]) if region is not None else None,
            res_attrs=_dictionaries([a for _, a in results]),
        )  # fmt: skip
        if reserved := sorted(attrs.keys() & {"sym_name", "function_type", "sym_visibility"}):
            message = f"attribute {reserved[0]} has its own place in the syntax of func.func"
            self.log.report_at(name, message)
            return None
        op.attributes.update(attrs)
        op.location = self.source.location(name.start)
        return op


def _dictionaries(entries: Sequence[dict[str, Attribute] | None]) -> ArrayAttr[Any] | None:
    """Return the attributes of arguments or results; None if all are empty."""
    if not any(entries):
        return None
    return ArrayAttr([DictionaryAttr(e or {}) for e in entries])
