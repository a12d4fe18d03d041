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
3. The cluster is `cluster`, by name or file, or the cluster of the module's mesh; its first
   `devices` are used, or all. Without a cluster there are `devices`, or as many as the mesh has.
4. Annotations must hold on any mesh: numbers of slices may be annotated, names of axes may not. A
   mesh with an error is left out: of uneven slices, or if no plan keeps to the memory.
5. The estimated time on each mesh is reported on stderr.
"""

import sys
from dataclasses import dataclass
from math import inf

from xdsl.context import Context
from xdsl.dialects.builtin import ModuleOp

from shardir.algebra.mesh import Mesh
from shardir.diagnostics import Failure, ShardirError, report_progress
from shardir.dialects.dist import MeshOp
from shardir.rewriting.copying import copied
from shardir.rewriting.functions import bodies
from shardir.rewriting.marks import found_by_search
from shardir.rewriting.options import Bytes, PassOptions
from shardir.rewriting.registry import run_pipeline
from shardir.search.meshes.declared_mesh import check, declare, devices_of
from shardir.search.meshes.meshes import MeshEstimate, fastest_mesh, mesh_candidates
from shardir.search.problem.solver import DEFAULT_GAP, MAX_TABLE_ENTRIES
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
    """The memory of a device in bytes, as in search-strategies."""

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        check(op)
        declared = next((o.mesh for o in op.body.ops if isinstance(o, MeshOp)), None)
        program = copied(op)

        def bound(mesh: Mesh) -> MeshEstimate:
            report_progress(f"{self.name}: {mesh}")
            return self.estimate(ctx, program, mesh.without_memory, BOUND_GAP, 0)

        def plan(mesh: Mesh) -> MeshEstimate:
            return self.estimate(ctx, program, mesh, DEFAULT_GAP, self.memory)

        def report(line: str) -> None:
            print(f"{self.name}: {line}", file=sys.stderr)

        with collect_warnings():  # the compilation on the chosen mesh repeats them
            run_pipeline("inline-calls,distributed-autodiff", ctx, program)
            mesh = fastest_mesh(self.candidates(declared), bound, plan, report)
        declare(op, mesh)

    def candidates(self, declared: Mesh | None) -> list[Mesh]:
        """Return the meshes to try.

        Raises:
            Failure: the number of devices is unknown, the cluster has fewer, or so few axes do not
                make up its units.
        """
        try:
            name, devices, cluster = devices_of(self.name, self.devices, self.cluster, declared)
            return mesh_candidates(name, devices, self.axes, cluster)
        except ShardirError as e:
            raise Failure(str(e)) from None

    def estimate(
        self, ctx: Context, program: ModuleOp, mesh: Mesh, gap: float, memory: int
    ) -> MeshEstimate:
        """Return the estimate of search-strategies on a mesh."""
        trial = copied(program)
        declare(trial, mesh)
        try:
            options = f"entries={self.entries} gap={gap:.12f} memory={memory} overlap=false"
            run_pipeline(f"search-strategies{{{options}}}", ctx, trial)
        except Failure as e:
            return MeshEstimate(inf, -inf, e)
        figures = [n for f, _ in bodies(trial) if (n := found_by_search(f))]
        objective, bound = (sum(n[k] for n in figures) for k in ("objective", "bound"))
        return MeshEstimate(objective, bound)
