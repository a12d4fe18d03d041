"""lower-to-spmd: global view -> local view: local shapes, and redistributions as collectives.

    %z = dist.redistribute %y : (tensor<8x6xf32, #dist.layout<@m, [{d}, {}]>>)
                              -> tensor<8x6xf32, #dist.layout<@m, [{}, {}]>>
 -> %z = dist.all_gather %y dim 0 over <d> : (tensor<2x6xf32, #dist.local<@m, [{d}, {}]>>)
                                           -> tensor<8x6xf32, #dist.local<@m, [{}, {}]>>

1. Requires every op to be computable with the layouts of its operands; each op that is not is an
   error.
2. A local type has the axes over which the value is split or partial, and the global shape where
   shards are uneven.
3. An op for which devices need elements of other devices becomes the exchange that fetches them.
4. The collectives of a redistribution have its `fusion` index, and its mark for `recompute`.
5. Sharding groups and propagation barriers are erased; otherwise functions without layouts are not
   changed.
6. The function of an `dist.manual` is inlined; a private one that is called nowhere else is erased.
7. A custom op without a rule is computed unsharded on every device, with one warning for each
   name, and so is a loop `nn.while`, with a warning where its operands are gathered.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from xdsl.dialects.builtin import ModuleOp, SymbolRefAttr

from shardir.algebra.mesh import Mesh
from shardir.diagnostics import Located, coded
from shardir.dialects.blocks import of_kind, ops_in
from shardir.dialects.dist import RedistributeOp
from shardir.dialects.dist.manual import ManualOp
from shardir.dialects.nn.base import TensorOp, layout_mismatch
from shardir.dialects.nn.control import WhileOp
from shardir.dialects.nn.custom import CustomOp
from shardir.dialects.signatures import SignatureMemo
from shardir.rewriting.bases import Function, GlobalPass
from shardir.rewriting.functions import update_signature
from shardir.rewriting.lowering import lower
from shardir.rewriting.marks import resolve_markers
from shardir.rewriting.placement import layout_at
from shardir.rewriting.rewriter import erase
from shardir.syntax.source import warn


@dataclass(frozen=True)
class LowerToSpmd(GlobalPass):
    """Turns global values into one device's shards, and redistributions into collectives."""

    name = "lower-to-spmd"

    def check(self, f: Function) -> Iterable[Located]:
        if not f.has_layouts:
            return ()
        return list(f.without_layout()) or _not_computable(f)

    def rewrite_all(self, functions: Sequence[Function]) -> None:
        _warn_of_replicated(functions)
        inlined = {op.function: None for f in functions for op in of_kind(f.ops, ManualOp)}
        super().rewrite_all(functions)
        named = _named_symbols(functions[0].module) if inlined else set()
        for callee in inlined:
            if callee.sym_visibility is not None and callee.sym_name.data not in named:
                erase(callee)

    def rewrite(self, f: Function) -> None:
        if f.mesh is None or not f.has_layouts:
            resolve_markers(f.block, None)
            return
        resolve_markers(f.block, f.mesh)
        lower(f.block, f.mesh)
        update_signature(f.op)


def _named_symbols(module: ModuleOp) -> set[str]:
    """Return all symbols that ops of a module name."""
    properties = (a for op in ops_in(module) for a in op.properties.values())
    return {a.string_value() for a in properties if isinstance(a, SymbolRefAttr)}


def _not_computable(f: Function) -> Iterator[Located]:
    """Yield an error for each op that is not computable with the layouts of its operands and
    results."""
    assert f.mesh is not None
    for op in of_kind(f.ops, TensorOp):
        message = _mismatches.of_op(op, partial(_mismatch, op, f.mesh), f.mesh)
        if message:
            yield op, coded("T3", f"{op.name}: {message}", use="")


_mismatches = SignatureMemo()


def _mismatch(op: TensorOp, mesh: Mesh) -> str | None:
    """Return why an op is not computable with its layouts; None if it is."""
    operands = tuple([layout_at(v) for v in op.operands])
    results = tuple([layout_at(v) for v in op.results])
    return layout_mismatch(op.factors(), operands, results, mesh, op.MULTILINEAR)


def _warn_of_replicated(functions: Sequence[Function]) -> None:
    """Warn of custom ops that every device computes unsharded, once for each name, and of each loop
    for which they communicate."""
    first: dict[str, CustomOp] = {}
    for f in functions:
        if f.mesh is None or f.mesh.size == 1 or not f.has_layouts:
            continue
        for op in of_kind(f.ops, CustomOp):
            if not op.has_rule:
                first.setdefault(op.callee.data, op)
    for name, op in first.items():
        warn(
            op,
            f'no rule is registered for the op "{name}", so every device gathers its operands and '
            f'computes all of it; use shardir.register_custom_op("{name}", rule=...)',
        )
    for f in functions:
        for op in of_kind(f.ops, WhileOp):
            if any(isinstance(v.owner, RedistributeOp) for v in op.operands):
                warn(op, "every device gathers the operands of nn.while and computes all of it")
