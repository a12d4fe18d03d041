"""The mesh that a search declares in a program, the devices that it is for, and the check that the
program's annotations hold on any mesh."""

from itertools import count

from xdsl.dialects.builtin import ModuleOp, StringAttr, SymbolRefAttr
from xdsl.dialects.func import FuncOp
from xdsl.ir import Operation

from shardir.algebra.cluster import Cluster
from shardir.algebra.mesh import Mesh, axes_text
from shardir.algebra.strategy import Strategy
from shardir.analysis.functions import is_local_body, name_of, named, values
from shardir.cost.clusters import load
from shardir.diagnostics import Failure, Located, ShardirError
from shardir.dialects.dist import ClusterAttr, ClusterOp, MeshAttr, MeshOp, sharding_of
from shardir.dialects.nn.base import TensorOp
from shardir.dialects.train import arguments
from shardir.rewriting.functions import bodies


def devices_of(
    name: str, devices: int, cluster: str, declared: Mesh | None
) -> tuple[str, int, Cluster | None]:
    """Return the name of the mesh, the number of devices, and their cluster.

    Args:
        name: of the pass.
        devices, cluster: its options; 0 and empty where they are open.

    Raises:
        Failure: the number is unknown, or there is no such cluster.
    """
    try:
        found = load(cluster) if cluster else None
    except ShardirError as e:
        raise Failure(str(e)) from None
    if found is None and declared is not None:
        found = declared.cluster
    devices = devices or (found.units[-1] if found is not None else 0)
    devices = devices or (declared.size if declared is not None else 0)
    if not devices:
        message = "expected a number of devices, a cluster or a mesh, got none of them"
        raise Failure(f"{message}; write {name}{{devices=8}}")
    return declared.name if declared else "m", devices, found


def declare(module: ModuleOp, mesh: Mesh) -> None:
    """Declare a mesh and its cluster, in place of the declared ones."""
    block = module.body.block
    declared = next((o for o in block.ops if isinstance(o, MeshOp)), None)
    if declared is None:
        declared = MeshOp.create(properties={"sym_name": StringAttr(mesh.name)})
        if block.first_op:
            block.insert_op_before(declared, block.first_op)
        else:
            block.add_op(declared)
    declared.properties["axes"] = MeshAttr(mesh.axes)
    if mesh.cluster is None:
        return
    if declared.cluster is None:
        taken = {o.sym_name.data for o in block.ops if isinstance(o, FuncOp | MeshOp | ClusterOp)}
        name = next(n for i in count() if (n := f"cluster_{i}" if i else "cluster") not in taken)
        cluster = ClusterOp.create(properties={"sym_name": StringAttr(name)})
        block.insert_op_before(cluster, declared)
        declared.properties["cluster"] = SymbolRefAttr(name)
    else:
        name = declared.cluster.string_value()
    for o in block.ops:
        if isinstance(o, ClusterOp) and o.sym_name.data == name:
            o.properties["devices"] = ClusterAttr(mesh.cluster)


FIX = "use a number of slices, or leave the annotation out"


def check(module: ModuleOp) -> None:
    """Raise Failure if annotations hold on one mesh only."""
    meshes = [o for o in module.body.ops if isinstance(o, MeshOp)]
    errors: list[Located] = [
        (o, f"expected at most one mesh, got {len(meshes)}; remove this one") for o in meshes[1:]
    ]
    for f, block in bodies(module):
        if is_local_body(block):
            message = "expected the global view, got the local view, which has one mesh"
            errors.append((f, f"@{name_of(f)}: {message}; run search-mesh before lower-to-spmd"))
        for v in values(block):
            sharding = sharding_of(v)
            if sharding is None:
                continue
            if axes := (*sharding.layout.used, *sharding.replicated):
                op = v.owner if isinstance(v.owner, Operation) else f
                message = f"expected no axes in the layout of {named(v)}, got {axes_text(axes)}"
                errors.append((op, f"{message}; {FIX}"))
        for v, argument in zip(block.args, arguments(f), strict=True):
            if (layout := argument.state_layout) is not None and layout.used:
                axes, what = axes_text(layout.used), f"the states of {named(v)}"
                message = f"expected no axes in the layout of {what}, got {axes}"
                errors.append((f, f"{message}; {FIX}"))
        for op in block.ops:
            strategy = op.strategy if isinstance(op, TensorOp) else None
            if strategy is not None and names_axes(strategy.data):
                errors.append((op, f"expected no axes in a strategy, got {strategy.data}; {FIX}"))
    if errors:
        raise Failure(errors)


def names_axes(s: Strategy) -> bool:
    """Whether a strategy names axes, and not only numbers of slices."""
    cuts = [cut for side in (s.operands, s.results or ()) for dims in side for cut in dims]
    return bool(s.partial) or any(cut for cut in cuts if not isinstance(cut, int))
