"""inline-calls: a call becomes the ops of the function that it calls.

    func.func private @layer(%a) { %b = nn.relu %a; func.return %b }
    %y = func.call @layer(%x)
 -> %y = nn.relu %x

1. Afterwards no function with a body calls another. Layouts and cotangents propagate through the
   inlined ops; two calls of one function may have different layouts.
2. A private function that was called, and that nothing names any more, is erased.
3. Ops keep their source locations, and values their names.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from xdsl.dialects.builtin import SymbolRefAttr
from xdsl.dialects.func import CallOp, ReturnOp
from xdsl.ir import Operation, SSAValue

from shardir.diagnostics import Located, coded
from shardir.rewriting.bases import Function, FunctionPass, collect_errors
from shardir.rewriting.rewriter import erase

Callees = dict[str, Function]
"""The functions that have a body, by name."""


@dataclass(frozen=True)
class InlineCalls(FunctionPass):
    """Replaces calls by the ops of the functions that they call."""

    name = "inline-calls"

    def check_all(self, functions: Sequence[Function]) -> None:
        callees = {f.name: f for f in functions}
        collect_errors(functions, lambda f: _not_inlinable(f, callees))

    def rewrite_all(self, functions: Sequence[Function]) -> None:
        callees = {f.name: f for f in functions}
        called: dict[Function, None] = {}
        for f in _callees_first(functions, callees):
            for call in _calls(f):
                callee = callees[call.callee.string_value()]
                called[callee] = None
                _inline(call, callee)
        for f in reversed(called):
            private = f.op.sym_visibility is not None and f.op.sym_visibility.data == "private"
            if private and not any(f.name in _names(op) for op in f.module.body.ops):
                erase(f.op)


def _calls(f: Function) -> list[CallOp]:
    return [op for op in f.block.ops if isinstance(op, CallOp)]


def _not_inlinable(f: Function, callees: Callees) -> Iterator[Located]:
    """Yield the calls of functions without a body, and those by which a function calls itself."""
    for call in _calls(f):
        name = call.callee.string_value()
        if name not in callees:
            yield call, coded("F1", f"expected a function with a body, got @{name} without one")
        elif cycle := _cycle(f.name, (f.name, name), callees):
            path = " calls ".join(f"@{n}" for n in cycle)
            yield call, coded("F2", f"expected calls without recursion, got {path}")


def _cycle(name: str, path: tuple[str, ...], callees: Callees) -> tuple[str, ...] | None:
    """Return a chain of calls that begins with `path` and ends at `name`, if there is one."""
    if path[-1] == name:
        return path
    seen: set[str] = {*path}
    chains = [path]
    for chain in chains:
        for call in _calls(callees[chain[-1]]) if chain[-1] in callees else ():
            following = call.callee.string_value()
            if following == name:
                return (*chain, name)
            if following not in seen:
                seen.add(following)
                chains.append((*chain, following))
    return None


def _callees_first(functions: Sequence[Function], callees: Callees) -> list[Function]:
    """Return the functions, each after those that it calls."""
    order: dict[Function, None] = {}

    def visit(f: Function) -> None:
        if f not in order:
            for call in _calls(f):
                visit(callees[call.callee.string_value()])
            order[f] = None

    for f in functions:
        visit(f)
    return list(order)


def _inline(call: CallOp, callee: Function) -> None:
    block = call.parent
    assert block is not None
    values: dict[SSAValue, SSAValue] = dict(zip(callee.block.args, call.operands, strict=True))
    for op in callee.block.ops:
        if isinstance(op, ReturnOp):
            for out, v in zip(call.results, op.operands, strict=True):
                out.replace_all_uses_with(values[v])
            break
        new = op.clone(values)
        new.location = op.location
        block.insert_op_before(new, call)
    erase(call)


def _names(op: Operation) -> set[str]:
    """Return the functions that an op at the top of the module names."""
    attributes = (*op.properties.values(), *op.attributes.values())
    return {a.string_value() for a in attributes if isinstance(a, SymbolRefAttr)}
