"""One layout of each parameter and state in all functions of a program.

A step, an evaluation and a second step over the same parameters are functions of their own. Where
layouts are decided on function by function, the function that trains a parameter decides on its
layout, and the others take it: a state that changed its layout between two calls would be
redistributed at each of them.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from xdsl.dialects.builtin import TensorType
from xdsl.dialects.func import FuncOp
from xdsl.ir import SSAValue

from shardir.algebra.layout import Layout
from shardir.analysis.functions import is_laid_out, name_of
from shardir.compat.xdsl import set_type
from shardir.dialects.dist import layout_of, sharding_of, with_layout
from shardir.dialects.train import Argument, Role, StepOp, arguments, is_step, updated_keys
from shardir.rewriting.bases import Function, collect_all, collect_errors
from shardir.rewriting.copying import copied
from shardir.rewriting.functions import bodies, ops_of_bodies, update_signature
from shardir.syntax.source import collect_remarks, collect_warnings, warn


def decide_layouts(functions: Sequence[Function], decide: Callable[[Function], object]) -> None:
    """Call `decide` on all functions, those that train first. It sets the layouts of a function's
    values, and leaves annotated ones.

    A function that reads what a later one trains is decided on twice: for what it trains itself,
    and with the layouts of all others.

    Raises:
        Failure: the errors of all functions.
    """
    retained = _RetainedLayouts(functions)
    postponed = list[Function]()

    def visit(f: Function) -> None:
        retained.annotate(f.op)
        if retained.waits(f):
            with collect_warnings(), collect_remarks():  # the second time repeats them
                retained.record(f, _decided_copy(f, decide))
            postponed.append(f)
        else:
            decide(f)
            retained.record(f, f.op)

    def visit_again(f: Function) -> None:
        retained.annotate(f.op)
        decide(f)

    collect_all(
        lambda: collect_errors(retained.in_order(), visit),
        lambda: collect_errors(postponed, visit_again),
    )
    retained.warn_of_differences()


def _decided_copy(f: Function, decide: Callable[[Function], object]) -> FuncOp:
    """Return a copy of a function, in a copy of its module, with its layouts."""
    module = copied(f.module)
    op, ops = next((g, ops) for g, ops in ops_of_bodies(module) if name_of(g) == f.name)
    decide(Function(op, ops, module, f.meshes))
    return op


class _RetainedLayouts:
    """The layouts of parameters and states that several functions have, by key."""

    def __init__(self, functions: Sequence[Function]):
        self.functions, self.stepped = functions, _stepped(functions)
        counts = Counter(key for f in functions for key in {a.key for a, _ in _retained(f.op)})
        others: list[FuncOp] = []
        if functions:
            of_pass = {f.op for f in functions}
            others = [g for g, _ in bodies(functions[0].module) if g not in of_pass]
            others = [g for g in others if is_laid_out(g.body.block)]
        counts.update({a.key for g in others for a, _ in _retained(g)})
        self.shared = {key for key, n in counts.items() if n > 1}
        self.owners: dict[str | None, Function] = {}
        """The function that trains each parameter, or else updates each state."""
        for f in self.in_order():
            for key in self.trained(f):
                self.owners.setdefault(key, f)
        for f in self.in_order():
            for key in updated_keys(f.op):
                self.owners.setdefault(key, f)
        self.layouts: dict[str | None, Layout] = {}
        for g in others:
            for a, v in _retained(g):
                self._record(a, v)

    def in_order(self) -> list[Function]:
        """Return the functions, those that train first."""
        return sorted(self.functions, key=lambda f: not self.trained(f))

    def trained(self, f: Function) -> list[str | None]:
        """Return the keys of the parameters that a function, or a step that is requested of it,
        trains."""
        trains = is_step(f.op) or f.name in self.stepped
        return [a.key for a, _ in _retained(f.op) if trains and a.role is Role.PARAMETER]

    def waits(self, f: Function) -> bool:
        """Whether a function has a state whose layout a later function decides on."""
        return any(
            a.key in self.shared and a.key not in self.layouts and layout_of(v) is None
            and self.owners.get(a.key, f) is not f
            for a, v in _retained(f.op)
        )  # fmt: skip

    def annotate(self, f: FuncOp) -> None:
        """Annotate a function's states with the layouts that are decided on."""
        for a, v in _retained(f):
            layout = self.layouts.get(a.key)
            if layout is not None and sharding_of(v) is None:
                assert isinstance(v.type, TensorType)
                set_type(v, with_layout(v.type, layout))
        update_signature(f)

    def record(self, f: Function, decided: FuncOp) -> None:
        """Record the layouts on which a function, or a copy of it, has decided."""
        for a, v in _retained(decided):
            if self.owners.get(a.key, f) is f:
                self._record(a, v)

    def _record(self, a: Argument, v: SSAValue) -> None:
        layout = layout_of(v)
        if a.key in self.shared and layout is not None:
            self.layouts.setdefault(a.key, layout)

    def warn_of_differences(self) -> None:
        """Warn of states that are annotated with several layouts."""
        for f in self.functions:
            mesh = f.mesh
            for a, v in _retained(f.op):
                layout, decided = layout_of(v), self.layouts.get(a.key)
                if layout is None or decided is None or mesh is None:
                    continue
                if layout.simplified(mesh).dims != decided.simplified(mesh).dims:
                    owner = self.owners.get(a.key)
                    of = "" if owner is None else f", as in @{owner.name}"
                    warn(
                        f.op,
                        f"expected {a.key} in one layout, {decided}{of}, got {layout} in "
                        f"@{f.name}: it is redistributed at each call of one after the other; "
                        "annotate both alike",
                    )


def _retained(f: FuncOp) -> Iterator[tuple[Argument, SSAValue]]:
    """Yield the parameters and states of a function."""
    for a, v in zip(arguments(f), f.body.block.args, strict=True):
        if a.is_retained:
            yield a, v


def _stepped(functions: Sequence[Function]) -> set[str]:
    """Return the names of the functions of which steps are requested."""
    ops = functions[0].module.body.ops if functions else ()
    return {op.function.string_value() for op in ops if isinstance(op, StepOp)}
