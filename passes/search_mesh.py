"""search-mesh: a number of devices -> the mesh on which the program is fastest.

    dist.mesh @m <d = 8> on @c
 -> dist.mesh @m <a = 2, b = 4> on @c

It runs before all passes that decide on layouts: `search-mesh{devices=8},auto`. The order of the
axes decides which axis is on which level of the cluster, since neighbouring ranks share the units
of the innermost level.

1. Candidates are the factorisations of the number of devices into at most `axes` sizes, in every
   order. A mesh that another one refines is left out: its plans are plans of the other.
2. On each, search-strategies finds a plan of the forward and backward part together, first to a
   gap of 3% and without a limit of memory; then to its end, in the order of these plans, if the
   bound is below the best plan so far.
3. The cluster is `cluster`, by name or file, or that of the module's mesh; the first `devices` of
   it are used, or all. Without a cluster there are `devices`, or as many as the mesh has.
4. Annotations must hold on any mesh: numbers of slices may be annotated, names of axes may not. A
   mesh with an error is left out: of uneven slices, or if no plan keeps to the memory.
5. The estimated time on each mesh is reported on stderr.
"""

import sys
from dataclasses import dataclass, replace
from itertools import count
from math import inf
from typing import Protocol

from xdsl.context import Context
from xdsl.dialects.builtin import ModuleOp, StringAttr, SymbolRefAttr
from xdsl.dialects.func import FuncOp
from xdsl.ir import Operation

from shardir.algebra.cluster import Cluster
from shardir.algebra.mesh import Mesh, axes_text
from shardir.algebra.strategy import Strategy
from shardir.analysis.functions import is_local_body, name_of, named, values
from shardir.cost.clusters import load
from shardir.diagnostics import Failure, Located, ShardirError, report_progress
from shardir.dialects.dist import ClusterAttr, ClusterOp, MeshAttr, MeshOp, sharding_of
from shardir.dialects.nn.base import TensorOp
from shardir.dialects.train import arguments
from shardir.rewriting import nested
from shardir.rewriting.copying import copied
from shardir.rewriting.functions import bodies
from shardir.rewriting.marks import found_by_search
from shardir.rewriting.options import Bytes, PassOptions
from shardir.search.meshes import MeshEstimate, fastest_mesh, mesh_candidates
from shardir.search.solver import DEFAULT_GAP, MAX_TABLE_ENTRIES
from shardir.syntax.source import collect_warnings

BOUND_GAP = 0.03
"""The gap at which the first search on a mesh stops."""


@dataclass(frozen=True)
class SearchMesh(PassOptions):
    """Chooses the mesh on which a program is fastest: its axes, and the level of each."""

    name = "search-mesh"
    devices: int = 0
    """The number of devices; 0: all of the cluster, or as many as the mesh has."""
    axes: int = 2
    """The number of axes of the mesh, at most."""
    cluster: str = ""
    """A ready-made cluster, or a file with one."""
    entries: int = MAX_TABLE_ENTRIES
    """The entries of the solver's largest table, as of search-strategies."""
    memory: Bytes = 0
    """The bytes that a device holds, as of search-strategies."""

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        check(op)
        declared = next((o.mesh for o in op.body.ops if isinstance(o, MeshOp)), None)
        program = copied(op)

        def bound(mesh: Mesh) -> MeshEstimate:
            report_progress(f"{self.name}: {mesh}")
            unlimited = mesh.cluster and replace(mesh.cluster, memory=None)
            return self.estimate(ctx, program, replace(mesh, cluster=unlimited), BOUND_GAP, 0)

        def plan(mesh: Mesh) -> MeshEstimate:
            return self.estimate(ctx, program, mesh, DEFAULT_GAP, self.memory)

        def report(line: str) -> None:
            print(f"{self.name}: {line}", file=sys.stderr)

        with collect_warnings():  # those of the program come when it is compiled on the mesh
            nested.run("inline-calls,distributed-autodiff", ctx, program)
            mesh = fastest_mesh(self.candidates(declared), bound, plan, report)
        declare(op, mesh)

    def candidates(self, declared: Mesh | None) -> list[Mesh]:
        """Return the meshes to try.

        Raises:
            Failure: the number of devices is unknown, the cluster has fewer, or so few axes do not
                make up its units.
        """
        try:
            name, devices, cluster = devices_of(self, declared)
            return mesh_candidates(name, devices, self.axes, cluster)
        except ShardirError as e:
            raise Failure(str(e)) from None

    def estimate(
        self, ctx: Context, program: ModuleOp, mesh: Mesh, gap: float, memory: int
    ) -> MeshEstimate:
        """Return the result of search-strategies on a mesh."""
        trial = copied(program)
        declare(trial, mesh)
        try:
            options = f"entries={self.entries} gap={gap:.12f} memory={memory} overlap=false"
            nested.run(f"search-strategies{{{options}}}", ctx, trial)
        except Failure as e:
            return MeshEstimate(inf, -inf, e)
        figures = [n for f, _ in bodies(trial) if (n := found_by_search(f))]
        objective, bound = (sum(n[k] for n in figures) for k in ("objective", "bound"))
        return MeshEstimate(objective, bound)


class MeshOptions(Protocol):
    """The options of a search for a mesh."""

    name: str

    @property
    def devices(self) -> int: ...
    @property
    def cluster(self) -> str: ...


def devices_of(options: MeshOptions, declared: Mesh | None) -> tuple[str, int, Cluster | None]:
    """Return the name of the mesh, the number of devices, and their cluster.

    Raises:
        Failure: the number is unknown, or there is no such cluster.
    """
    try:
        cluster = load(options.cluster) if options.cluster else None
    except ShardirError as e:
        raise Failure(str(e)) from None
    if cluster is None and declared is not None:
        cluster = declared.cluster
    devices = options.devices or (cluster.units[-1] if cluster is not None else 0)
    devices = devices or (declared.size if declared is not None else 0)
    if not devices:
        message = "expected a number of devices, a cluster or a mesh, got none of them"
        raise Failure(f"{message}; write {options.name}{{devices=8}}")
    return declared.name if declared else "m", devices, cluster


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
