"""`--explain-redistributions`: the edge of each redistribution, its plan and its cost.

@net: %y, tensor<8x8xf32>
  from %y = nn.matmul at net.ir:22
  for %z = nn.matmul at net.ir:23, operand 0
  device matrix [4], tensor map [0, -1] -> device matrix [4], tensor map [-1, -1]
  [@m, [{d}, {}]] -> [@m, [{}, {}]]
    all_gather dim 0 over {d} -> [@m, [{}, {}]]
    receives 192 B (at least 192 B), peak 320 B
@net: 1 redistribution, receives 192 B (at least 192 B)
"""

from collections.abc import Iterator
from textwrap import indent

from xdsl.dialects.builtin import ModuleOp
from xdsl.ir import Operation, SSAValue

from shardir.algebra.mesh import Mesh
from shardir.algebra.redistribution import Redistribution, plan_redistribution
from shardir.analysis.functions import name_of
from shardir.dialects import dist
from shardir.dialects.locations import describe_maker, describe_op, location_suffix
from shardir.dialects.nn.types import unsharded_type
from shardir.dialects.train import BackwardOp
from shardir.rewriting.functions import bodies


def explain(module: ModuleOp) -> list[str]:
    """Return a paragraph for each redistribution of each function, in order, and their sum."""
    meshes = dist.meshes_of(module)
    found: list[str] = []
    for f, block in bodies(module):
        name, plans = f"@{name_of(f)}", []
        part = ""
        order = {op: i for i, op in enumerate(block.ops)}
        for op in order:
            if isinstance(op, BackwardOp):
                part = " (backward)"
            elif isinstance(op, dist.RedistributeOp):
                plans.append(plan_of(op, meshes))
                at = location_suffix(op, short=True)
                found.append(f"{name}{part}{at}: {_paragraph(op, plans[-1], order)}")
        if plans:
            received = sum(p.received_bytes for p in plans)
            bound = sum(p.bound_bytes for p in plans)
            count = f"{len(plans)} redistribution{'s' * (len(plans) > 1)}"
            found.append(f"{name}: {count}, receives {received} B (at least {bound} B)")
    return found


def plan_of(op: dist.RedistributeOp, meshes: dict[str, Mesh]) -> Redistribution:
    """Return the plan of a redistribution."""
    type = unsharded_type(op.value)
    source, target = dist.layout_of(op.value), dist.layout_of(op.out)
    assert source is not None and target is not None
    mesh, dtype = meshes[source.mesh], str(type.element_type)
    return plan_redistribution(type.get_shape(), dtype, mesh, source, target)


def _paragraph(op: dist.RedistributeOp, plan: Redistribution, order: dict[Operation, int]) -> str:
    name = f"%{op.value.name_hint}, " if op.value.name_hint else ""
    maps = [layout.tensor_map(plan.mesh) for layout in (plan.source, plan.target)]
    lines = [
        f"from {describe_maker(op.value, short=True)}",
        *_readers(op.out, order),
        " -> ".join(maps),
        str(plan),
    ]
    return f"{name}{unsharded_type(op.value)}\n" + indent("\n".join(lines), "  ")


def _readers(v: SSAValue, order: dict[Operation, int]) -> Iterator[str]:
    uses = [(use.operation, use.index) for use in v.uses]
    for op, i in sorted(uses, key=lambda use: (order[use[0]], use[1])):
        yield f"for {describe_op(op, short=True)}, operand {i}"
    if not uses:
        yield "for no op: it has no users"
