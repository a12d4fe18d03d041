"""Loops whose number of runs depends on values: `while` of Python.

root, runs = x, n
while runs < root:
    ...
    root, runs = c, m
"""

from collections.abc import Sequence
from itertools import compress

from xdsl.ir import Operation

from shardir.backend.torch.emit.names import wrap_statement
from shardir.backend.torch.emit.origins import source_line
from shardir.backend.torch.emit.regions import region_text
from shardir.backend.torch.emit.scope import EmissionScope, Entry, Text
from shardir.dialects import nn


def _while(s: EmissionScope, op: nn.WhileOp) -> Text:
    """Write the loop. What no run changes keeps its variable, or is a literal."""
    names, first = [], []
    values = zip(op.operands, op.results, op.body.block.args, op.changed, strict=True)
    for v, out, arg, is_changed in values:
        if is_changed:
            first.append(s.operand(v))
            names.append(s.define(out, out.name_hint or arg.name_hint or "carried").name)
        elif s.number(v) is not None and not s.is_read(out):
            names.append("")
        else:
            names.append(s.operand(v))
            s.same(out, v)
    variables = [*compress(names, op.changed)]
    _assign(s, variables, first)
    s.source_line = source_line(op)
    arguments = list(zip(names, op.operands, strict=True))
    lines, (goes_on,) = region_text(s, op.condition, arguments)
    prefix = f"{' ' * (s.indent + 4)}{goes_on} = "
    if not lines:
        s.line(f"while {goes_on}:")
    elif len(lines) == 1 and lines[0].startswith(prefix):
        s.line(f"while {lines[0].removeprefix(prefix).partition('  # ')[0]}:")
    else:
        s.line("while True:")
        s.lines += lines
        s.line(f"    if not {goes_on}:")
        s.line("        break")
    lines, yielded = region_text(s, op.body, arguments)
    s.lines += lines
    s.indent += 4
    _assign(s, variables, [*compress(yielded, op.changed)])
    if not variables:
        s.line("pass")
    s.indent -= 4
    return None


def _assign(s: EmissionScope, names: Sequence[str], texts: Sequence[str]) -> None:
    """Write one assignment of all names that change."""
    pairs = [(n, t) for n, t in zip(names, texts, strict=True) if n != t]
    if pairs:
        left, right = (", ".join(side) for side in zip(*pairs, strict=True))
        s.lines += wrap_statement(f"{left} = {right}", s.indent)


TORCH: dict[type[Operation], Entry] = {nn.WhileOp: _while}
