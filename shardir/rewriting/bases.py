"""The bases of passes: the functions that a pass concerns, and all errors of a run in one Failure.

    class Strip(GlobalPass):                      # or LocalPass, or FunctionPass for both views
    name = "strip" def check(self, f): ...                   # the errors of each function, then def
    rewrite(self, f): ...                 # each function, where there is none

A pass is a frozen dataclass, whose fields are its options.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from xdsl.context import Context
from xdsl.dialects.builtin import ModuleOp
from xdsl.dialects.func import FuncOp
from xdsl.ir import Block, Operation

from shardir.algebra.mesh import Mesh
from shardir.analysis.functions import (
    first_without_layout,
    has_layouts,
    is_local_body,
    mesh_among,
    name_of,
)
from shardir.diagnostics import Failure, Located, ShardirError
from shardir.dialects.dist import MeshOp, meshes_of
from shardir.dialects.nn.base import TensorOp
from shardir.rewriting.functions import bodies, ops_of_bodies
from shardir.rewriting.options import PassOptions
from shardir.rewriting.rewriter import Rewriter
from shardir.syntax.source import warn


@dataclass(frozen=True, eq=False)
class Function:
    """A function that a pass concerns."""

    op: FuncOp
    ops: Sequence[Operation]
    """Its ops before the pass changes any function."""
    module: ModuleOp
    meshes: Mapping[str, Mesh]
    """The meshes of the module."""

    @property
    def block(self) -> Block:
        return self.op.body.block

    @property
    def name(self) -> str:
        return name_of(self.op)

    @cached_property
    def mesh(self) -> Mesh | None:
        """The mesh of the function. Raises Failure where it does not use one declared mesh."""
        return mesh_among(self.op, self.ops, self.meshes)

    @property
    def has_layouts(self) -> bool:
        """Whether the function has a mesh, and a value of it has a layout."""
        return self.mesh is not None and has_layouts(self.block)

    def rewriter(self) -> Rewriter:
        """Return a rewriter of the function, which places new ops where it has layouts."""
        return Rewriter(self.mesh if self.has_layouts else None)

    def without_layout(self) -> Iterable[Located]:
        """Yield the error of a function with a value without layout."""
        if (op := first_without_layout(self.block)) is not None:
            message = f"expected a layout of each value in @{self.name}, got a value without one"
            yield op, f"{message}; run propagate-strategies"


@dataclass(frozen=True)
class FunctionPass(PassOptions):
    """A pass on functions one by one: all are checked first, then all are rewritten."""

    def concerns(self, f: Function) -> bool:
        """Whether the pass rewrites a function."""
        return True

    def check(self, f: Function) -> Iterable[Located]:
        """Return the errors of a function; if any function has errors, none is rewritten."""
        return ()

    def rewrite(self, f: Function) -> None:
        """Rewrite a function. Raises Failure, or ShardirError for an error of the function."""

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        self.rewrite_all(self.concerned_functions(op))

    def concerned_functions(self, module: ModuleOp) -> list[Function]:
        """Return the functions that the pass concerns, after checking them.

        Raises:
            Failure: the errors of all functions and of their meshes.
        """
        concerned: list[Function] = []

        def add(f: Function) -> None:
            if self.concerns(f):
                concerned.append(f)

        meshes = meshes_of(module)
        functions = [Function(f, ops, module, meshes) for f, ops in ops_of_bodies(module)]
        collect_all(
            lambda: collect_errors(functions, add),
            lambda: self.check_all(concerned),
        )
        return concerned

    def check_all(self, functions: Sequence[Function]) -> None:
        collect_errors(functions, self.check)

    def rewrite_all(self, functions: Sequence[Function]) -> None:
        collect_errors(functions, self.rewrite)


class GlobalPass(FunctionPass):
    """A pass on the functions in the global view."""

    def concerns(self, f: Function) -> bool:
        return not is_local_body(f.block)


class LocalPass(FunctionPass):
    """A pass on the functions in the local view."""

    def concerns(self, f: Function) -> bool:
        return is_local_body(f.block)


def warn_without_mesh(module: ModuleOp) -> None:
    """Warn of a module with tensor ops but no mesh: there is no layout to decide on."""
    if any(isinstance(op, MeshOp) for op in module.ops):
        return
    for f, block in bodies(module):
        if any(isinstance(op, TensorOp) for op in block.ops):
            message = f"expected a mesh for @{name_of(f)}, got none: the program is for one device"
            warn(f, f"{message}; declare dist.mesh @m <dp = 4>, or use the mode stand_alone")
            return


Item = TypeVar("Item", bound=Function | Operation)


def collect_errors(items: Iterable[Item], work: Callable[[Item], Iterable[Located] | None]) -> None:
    """Call `work` on each function or op. A ShardirError is located at the function or op.

    Raises:
        Failure: the errors of all items, returned or raised.
    """
    errors: list[Located] = []
    for item in items:
        try:
            errors += work(item) or ()
        except Failure as e:
            errors += e.errors
        except ShardirError as e:
            errors.append((item.op if isinstance(item, Function) else item, str(e)))
    if errors:
        raise Failure(errors)


def collect_all(*steps: Callable[[], object]) -> None:
    """Run all steps.

    Raises:
        Failure: the errors of all steps.
    """
    errors: list[Located] = []
    for step in steps:
        try:
            step()
        except Failure as e:
            errors += e.errors
    if errors:
        raise Failure(errors)
