"""`sdy.all_reduce` and `sdy.reduce_scatter`: sums of what devices have.

    %0 = stablehlo.dot_general %x, %y     contracts a dimension that "d" splits
    %1 = sdy.all_reduce {"d"} %0          the devices' parts of the sum: in the global view, %0

    %1 = sdy.all_reduce {"d"} %x          %x is the same on all devices along "d": n times %x

An op has no communication of its own. So an axis that splits an operand, but not the result, is one
along which the result is still to be reduced.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from xdsl.dialects.builtin import SymbolRefAttr
from xdsl.ir import Operation, OpResult, SSAValue

from shardir.algebra.layout import Layout, replicated
from shardir.algebra.mesh import Axes, Axis, Mesh
from shardir.algebra.sharding import Sharding
from shardir.algebra.strategy import Strategy
from shardir.build import Value
from shardir.dialects import dist
from shardir.dialects.dist import MeshAttr, StrategyAttr
from shardir.dialects.dist.manual import ManualOp
from shardir.dialects.nn.base import TensorOp
from shardir.dialects.nn.types import unsharded_type
from shardir.frontends.stablehlo.folding import FoldingBuilder
from shardir.frontends.stablehlo.manual import ManualBuilder
from shardir.frontends.stablehlo.translation import Refused
from shardir.rewriting.functions import update_signature

AXIS = re.compile(r'"([^"]+)"(?::\((\d+)\)(\d+))?')
KIND = re.compile(r"\b(sum|max|min)\b", re.IGNORECASE)


def axes_from_sdy(text: str) -> Axes:
    """Return the axes of a list of Shardy, or of a list of such lists, in their order."""
    return tuple(Axis(n, int(pre or 1), int(size or 0)) for n, pre, size in AXIS.findall(text))


def kind_from_sdy(text: str | None) -> str:
    """Return the reduction of a text, `#sdy<reduction_op max>`; a sum by default. Raises Refused
    for another one."""
    if text is None:
        return "sum"
    m = KIND.search(text)
    if m is None:
        raise Refused(f"the reduction {text}")
    return m[1].lower()


@dataclass(frozen=True)
class DeviceContents:
    """How the parts of a value differ between devices.

    Attributes:
        varying: the axes along which they may differ.
        kinds: the reductions that may be left to be done.
    """

    varying: Axes = ()
    kinds: frozenset[str] = frozenset()

    def unreduced(self, value: SSAValue, mesh: Mesh) -> Axes:
        """Return the axes over which a value with these contents is to be reduced."""
        return _without(self.varying, _split(value), mesh)

    def after(
        self, value: SSAValue, result: SSAValue, mesh: Mesh, reduced: Axes = ()
    ) -> "DeviceContents":
        """Return the contents of the result of a collective, which reduces over axes a value with
        these contents, or has it in another layout."""
        left = _without(self.unreduced(value, mesh), reduced, mesh)
        own = _contents(result, [], mesh)
        kinds = own.kinds | self.kinds if left else own.kinds
        return DeviceContents(mesh.union(left, own.varying), kinds)


def contents_of(
    value: SSAValue, mesh: Mesh, known: Mapping[SSAValue, DeviceContents]
) -> DeviceContents:
    """Return the contents of a value; `known` has those of the results of reductions."""
    memo = dict(known)
    stack = [value]
    while stack:
        v = stack[-1]
        op = v.owner
        is_known = isinstance(op, ManualOp)  # its layouts say what its results are
        operands = [*op.operands] if isinstance(op, Operation) and not is_known else []
        if left := [o for o in operands if o not in memo]:
            stack += left
            continue
        stack.pop()
        if v in memo:
            continue
        if isinstance(op, dist.PropagationBarrierOp):  # in another layout
            memo[v] = memo[op.value].after(op.value, v, mesh)
        else:
            memo[v] = _contents(v, [memo[o] for o in operands], mesh)
    return memo[value]


def _contents(v: SSAValue, operands: list[DeviceContents], mesh: Mesh) -> DeviceContents:
    varying, kinds = _split(v), frozenset(k for o in operands for k in o.kinds)
    for o in operands:
        varying = mesh.union(varying, o.varying)
    if (sharding := dist.sharding_of(v)) is not None and (layout := sharding.layout).partial:
        varying, kinds = mesh.union(varying, layout.partial), frozenset((layout.reduction,))
    elif isinstance(v.owner, TensorOp) and (factors := v.owner.factors()).reduced:
        kinds = frozenset((factors.reduction,))
    return DeviceContents(varying, kinds)


def _split(v: SSAValue) -> Axes:
    """Return the axes that split a value."""
    if (sharding := dist.sharding_of(v)) is not None:
        return sharding.layout.complete.used
    if isinstance(v, OpResult) and isinstance(v.owner, ManualOp):
        return tuple(a for axes in v.owner.cuts[1][v.index] for a in axes)
    return ()


def _without(axes: Axes, removed: Axes, mesh: Mesh) -> Axes:
    return tuple(a for a in mesh.cut(axes, removed) if not any(mesh.overlap(a, r) for r in removed))


def is_reduction_of_parts(
    value: SSAValue, contents: DeviceContents, kind: str, axes: Axes, mesh: Mesh
) -> bool:
    """Whether a reduction completes one that ops before it have left to be done; otherwise devices
    have the same numbers along its axes.

    Raises:
        Refused: it does so along some axes, or that reduction is another one.
    """
    left = contents.unreduced(value, mesh)
    others = _without(axes, left, mesh)
    if len(others) == len(mesh.cut(axes, left)):
        if clash := [a for a in axes if any(mesh.overlap(a, b) for b in _split(value))]:
            raise Refused(f"a reduction over {clash[0]}, which splits the value")
        return False
    if others:
        raise Refused(f"a reduction along {others[0]} of equal numbers, and along others of parts")
    if contents.kinds != {kind}:
        have = ", ".join(sorted(contents.kinds)) or "no reduction"
        raise Refused(f"a {kind} over devices of a value whose parts are those of {have}")
    return True


def add_reduction(
    function: FoldingBuilder, value: Value, kind: str, axes: Axes, body: ManualBuilder
) -> Value:
    """Add the reduction of what each device has of a value to a function; return its result.

    Args:
        body: an empty function, for the computation of a device.
    """
    mesh = body.mesh
    layout = _whole(dist.sharding_of(value.ssa), value.shape, mesh)
    shard = body.shard("x", value.shape, value.dtype, layout)
    body.returns(body.assemble(body.all_reduce(shard, kind, axes), layout))
    body.finish()
    update_signature(body.func)
    call = ManualOp.create(
        operands=[value.ssa], result_types=[unsharded_type(value.ssa)],
        properties={
            "callee": SymbolRefAttr(body.name), "manual_axes": MeshAttr(mesh.axes),
            "strategy": StrategyAttr(Strategy(None, (layout.dims,), (layout.dims,))),
        },
        location=function.location(),
    )  # fmt: skip
    function.block.add_op(call)
    return Value(function, call.results[0])


def _whole(sharding: Sharding | None, shape: tuple[int, ...], mesh: Mesh) -> Layout:
    """Return the layout of a sharding, without what a manual computation can't take: sub-axes, and
    shards of different sizes."""
    layout = replicated(mesh.name, len(shape))
    if sharding is None:
        return layout
    for d, (n, axes) in enumerate(zip(shape, sharding.layout.dims, strict=True)):
        if not any(a.size for a in axes) and n % prod(mesh.extent((a,)) for a in axes) == 0:
            layout = layout.with_dim(d, axes)
    return layout
