"""One version of a text, compiled as far as it goes: errors, types, and layouts with reasons."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from xdsl.dialects.builtin import TensorType
from xdsl.ir import Attribute, SSAValue

from shardir.algebra.mesh import axes_text
from shardir.analysis.functions import values
from shardir.diagnostics import Diagnostic, Failure, ShardirError
from shardir.dialects import dist
from shardir.passes.propagate_strategies import (
    FunctionPropagation,
    PropagateStrategies,
    propagate_functions,
)
from shardir.reports.layouts import reasons_of
from shardir.syntax.parser import default_parser
from shardir.syntax.source import Source, collect_warnings


@dataclass
class Analysis:
    """What is known of a text.

    Attributes:
        diagnostics: the errors of the parser and the verifier, or if there are none those of
            propagation, and its warnings.
        definitions: the values of each name, by the offset of its definition.
        written: the type of each value as the text has it, before propagation.
        propagations: of each value whose layout propagation decided, that of its function.
    """

    source: Source
    diagnostics: list[Diagnostic] = field(default_factory=list)
    definitions: dict[int, Sequence[SSAValue]] = field(default_factory=dict)
    written: dict[SSAValue, Attribute] = field(default_factory=dict)
    propagations: dict[SSAValue, FunctionPropagation] = field(default_factory=dict)

    def describe(self, offset: int, name: str) -> str | None:
        """Return the type and layout of the values that are defined at an offset, as Markdown, and
        who decided on the layout; None of no values.

        Args:
            name: with the number of one result, `%x#1`, or of all.
        """
        defined = self.definitions.get(offset)
        if defined is None:
            return None
        first, _, number = name.partition("#")
        if number.isdecimal() and int(number) < len(defined):
            return self._describe(f"{first}#{number}", defined[int(number)])
        names = [f"{first}#{i}" for i in range(len(defined))] if len(defined) > 1 else [first]
        return "\n\n".join(self._describe(n, v) for n, v in zip(names, defined, strict=True))

    def _describe(self, name: str, v: SSAValue) -> str:
        lines = ["```mlir", f"{name}: {self.written.get(v, v.type)}", "```"]
        layout = dist.layout_of(v) if isinstance(v.type, TensorType) else None
        if layout is None:
            return "\n".join(lines)
        lines += ["", f"Layout `[{layout}]`: {_in_words(layout.dims)}"]
        if (found := self.propagations.get(v)) is not None:
            lines += ["", "```text", *reasons_of(found, v), "```"]
        elif dist.is_local(v.type):
            lines += ["", "Written in its type, of the local view: shapes are those of shards."]
        return "\n".join(lines)


def _in_words(dims: Sequence[Sequence[object]]) -> str:
    split = [f"dimension {d} over {axes_text(axes)}" for d, axes in enumerate(dims) if axes]  # type: ignore - axes of any mesh
    return ", ".join(split) or "replicated"


def analyse(text: str, name: str) -> Analysis:
    """Return the analysis of a text. Errors are part of it.

    Args:
        name: of the file, for locations in messages.
    """
    source = Source(text, name)
    source.definitions = {}
    module, errors = default_parser().check(source)
    analysis = Analysis(source, errors, source.definitions)
    analysis.written = {v: v.type for defined in source.definitions.values() for v in defined}
    if module is None or errors:
        return analysis
    with collect_warnings() as warnings:
        try:
            for found in propagate_functions(PropagateStrategies().concerned_functions(module)):
                analysis.propagations |= dict.fromkeys(values(found.block), found)
        except Failure as e:
            analysis.diagnostics += e.diagnostics(source)
        except ShardirError as e:
            analysis.diagnostics.append(Diagnostic(str(e), name))
    for op, message in warnings:
        found = source.at_op(op, message)
        analysis.diagnostics.append(
            Diagnostic(message, name, found.line, found.column, found.length, severity="warning")
        )
    return analysis
