"""inline-calls: a call becomes the ops of the function that it calls.

    func.func private @layer(%a) { %b = nn.relu %a; func.return %b }
    %y = func.call @layer(%x)
 -> %y = nn.relu %x

1. Afterwards no function with a body calls another, so layouts spread, and cotangents flow, through
   what were calls as through any ops; two calls of one function may be laid out differently.
2. A private function that was called, and that nothing names any more, goes away.
3. Ops keep their places in the source, and values their names.
"""

from dataclasses import dataclass

from xdsl.context import Context
from xdsl.dialects.builtin import ModuleOp, SymbolRefAttr
from xdsl.dialects.func import CallOp, FuncOp, ReturnOp
from xdsl.ir import Operation, SSAValue
from xdsl.passes import ModulePass

from shardir.analysis.functions import name_of
from shardir.diagnostics import Failure, Located
from shardir.rewriting.functions import bodies
from shardir.rewriting.rewriter import erase


@dataclass(frozen=True)
class InlineCalls(ModulePass):
    """Puts the ops of functions in the place of their calls."""

    name = "inline-calls"

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        inlining = _Inlining(op)
        for f, _ in bodies(op):
            inlining.inline(f, ())
        if inlining.errors:
            raise Failure(inlining.errors)
        inlining.sweep(op)


class _Inlining:
    def __init__(self, module: ModuleOp):
        self.functions = {name_of(f): f for f, _ in bodies(module)}
        self.errors: list[Located] = []
        self.done: set[FuncOp] = set()
        self.called: dict[FuncOp, None] = {}

    def inline(self, f: FuncOp, inside: tuple[str, ...]) -> None:
        """Inlines all calls of a function, those of its callees first."""
        if f in self.done:
            return
        inside = (*inside, name_of(f))
        for op in list(f.body.block.ops):
            if not isinstance(op, CallOp):
                continue
            name = op.callee.string_value()
            if name not in self.functions:
                message = f"[F1] @{name} has no body here; a call is of a function that has one"
                self.errors.append((op, message))
            elif name in inside:
                way = " calls ".join(f"@{n}" for n in (*inside[inside.index(name) :], name))
                message = f"[F2] {way}; write out as many turns as there are"
                self.errors.append((op, message))
            else:
                callee = self.functions[name]
                self.inline(callee, inside)
                self.called[callee] = None
                if not self.errors:
                    _replace(op, callee)
        self.done.add(f)

    def sweep(self, module: ModuleOp) -> None:
        for f in reversed(self.called):
            private = f.sym_visibility is not None and f.sym_visibility.data == "private"
            if private and not any(name_of(f) in _names(op) for op in module.body.ops):
                erase(f)


def _replace(call: CallOp, callee: FuncOp) -> None:
    block = call.parent
    assert block is not None
    values: dict[SSAValue, SSAValue] = dict(zip(callee.body.block.args, call.operands, strict=True))
    for op in callee.body.block.ops:
        if isinstance(op, ReturnOp):
            for out, v in zip(call.results, op.operands, strict=True):
                out.replace_all_uses_with(values[v])
            break
        new = op.clone(values)
        new.location = op.location
        block.insert_op_before(new, call)
    erase(call)


def _names(op: Operation) -> set[str]:
    """The functions that an op at the top of the module names."""
    attributes = (*op.properties.values(), *op.attributes.values())
    return {a.string_value() for a in attributes if isinstance(a, SymbolRefAttr)}
