"""inline-calls: a call becomes the ops of the function that it calls.

    func.func private @layer(%a) { %b = nn.relu %a; func.return %b }
    %y = func.call @layer(%x)
 -> %y = nn.relu %x

1. Afterwards no function with a body calls a function. Layouts and cotangents propagate through the
   inlined ops; two calls of one function may have different layouts.
2. A private function that was called, and that nothing names any more, is erased.
3. Ops keep their source locations, and values their names.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter

from xdsl.dialects.builtin import SymbolRefAttr
from xdsl.dialects.func import CallOp
from xdsl.ir import Operation

from shardir.diagnostics import Failure, Located, coded
from shardir.dialects.blocks import of_kind
from shardir.dialects.dist.manual import ManualOp
from shardir.rewriting.bases import Function, FunctionPass, collect_errors
from shardir.rewriting.inlining import inline
from shardir.rewriting.rewriter import erase

MAX_OPS = 200_000
"""The maximum number of ops that calls add to the functions of a module: nested calls double the
ops at each level, and this stops them while memory suffices."""

Callees = dict[str, Function]
"""The functions that have a body, by name."""


@dataclass(frozen=True)
class InlineCalls(FunctionPass):
    """Replaces calls by the ops of the functions that they call."""

    name = "inline-calls"

    def check_all(self, functions: Sequence[Function]) -> None:
        callees = {f.name: f for f in functions}
        sizes = _inlined_sizes(callees)
        collect_errors(functions, lambda f: _inlining_errors(f, callees, recursive=not sizes))
        total = 0
        for f in _remaining_functions(functions):
            total += sizes[f.name] - len(f.ops)
            if total > MAX_OPS:
                message = (
                    f"expected calls to add at most {MAX_OPS} ops, got {total} up to @{f.name}"
                )
                raise Failure([(f.op, coded("F4", message))])

    def rewrite_all(self, functions: Sequence[Function]) -> None:
        callees = {f.name: f for f in functions}
        remaining = _remaining_functions(functions)
        for f in remaining:
            op = f.block.first_op
            while op is not None:
                if isinstance(op, CallOp):
                    op = _inline(op, callees[op.callee.string_value()])
                else:
                    op = op.next_op
        for f in functions:
            if f not in remaining:
                erase(f.op)


def _remaining_functions(functions: Sequence[Function]) -> list[Function]:
    """Return the functions that remain: public functions, and functions that are not called or that
    something other than a call names."""
    called = {call.callee.string_value() for f in functions for call in _calls(f)}
    if not functions:
        return []
    named = {name for op in functions[0].module.body.ops for name in _named_functions(op)}
    named.update(op.callee.string_value() for f in functions for op in of_kind(f.ops, ManualOp))
    return [
        f
        for f in functions
        if f.name not in called
        or f.name in named
        or f.op.sym_visibility is None
        or f.op.sym_visibility.data != "private"
    ]


def _inlined_sizes(callees: Callees) -> dict[str, int]:
    """Return the number of ops of each function with its calls inlined; empty if a function calls
    itself."""
    calls = {name: [c.callee.string_value() for c in _calls(f)] for name, f in callees.items()}
    sizes: dict[str, int] = {}
    try:
        for name in TopologicalSorter(calls).static_order():
            own = len(callees[name].ops) if name in callees else 0
            sizes[name] = own + sum(sizes[c] - 2 for c in calls.get(name, ()))
    except CycleError:
        return {}
    return sizes


def _calls(f: Function) -> list[CallOp]:
    return of_kind(f.ops, CallOp)


def _inlining_errors(f: Function, callees: Callees, recursive: bool) -> Iterator[Located]:
    """Yield an error for each call of a function without a body, and, if `recursive`, for each call
    by which a function calls itself."""
    for call in _calls(f):
        name = call.callee.string_value()
        if name not in callees:
            yield call, coded("F1", f"expected a function with a body, got @{name} without one")
        elif recursive and (cycle := _find_cycle(f.name, (f.name, name), callees)):
            path = " calls ".join(f"@{n}" for n in cycle)
            yield call, coded("F2", f"expected calls without recursion, got {path}")


def _find_cycle(name: str, path: tuple[str, ...], callees: Callees) -> tuple[str, ...] | None:
    """Return a chain of calls that begins with `path` and ends at `name`; None if there is none."""
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


def _inline(call: CallOp, callee: Function) -> Operation | None:
    """Replace a call by the ops of a function; return the first of them, or the op after the
    call."""
    block, before = call.parent, call.prev_op
    assert block is not None
    inline(call, callee.block)
    return block.first_op if before is None else before.next_op


def _named_functions(op: Operation) -> set[str]:
    """Return the functions that an op at the top of the module names."""
    attributes = (*op.properties.values(), *op.attributes.values())
    return {a.string_value() for a in attributes if isinstance(a, SymbolRefAttr)}
