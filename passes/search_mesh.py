"""search-mesh: so many devices -> the mesh on which the program takes least.

    dist.mesh @m <d = 8> on @c
 -> dist.mesh @m <a = 2, b = 4> on @c

In front of all that lays values out: `search-mesh{devices=8},auto`. The mesh also says which axis
lies on which level of the cluster, since neighbouring ranks share the units of the innermost.

1. Candidates are the products of at most `axes` sizes that make up the devices, in every order. One
   that another refines is left out: what can be said with it can be said with the other.
2. On each, search-strategies finds the plan of forward and backward part together; in full only
   where its bound does not show that another mesh takes less.
3. The cluster is `cluster`, by name or file, or that of the module's mesh; the first `devices` of
   it are used, or all. Without a cluster there are `devices`, or as many as the mesh has.
4. What the text states holds on any mesh: numbers of slices may stand, names of axes may not. A
   mesh on which that can't be is left out, and one on which no plan keeps to the memory.
5. What each mesh takes is said on stderr.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate, count
from math import inf
from operator import mul
from string import ascii_lowercase
from typing import NamedTuple

from xdsl.context import Context
from xdsl.dialects.builtin import ModuleOp, StringAttr, SymbolRefAttr
from xdsl.dialects.func import FuncOp
from xdsl.ir import Operation

from shardir.algebra.mesh import Mesh, axes_text
from shardir.algebra.strategy import Strategy
from shardir.analysis.functions import is_local_body, name_of, named, values
from shardir.cost.clusters import load
from shardir.diagnostics import Failure, Located, ShardirError, report_progress
from shardir.dialects.dist import ClusterAttr, ClusterOp, MeshAttr, MeshOp, sharding_of
from shardir.dialects.nn.base import TensorOp
from shardir.rewriting import nested
from shardir.rewriting.functions import bodies
from shardir.rewriting.marks import found_by_search
from shardir.rewriting.options import Bytes, PassOptions
from shardir.search.elimination import DEFAULT_GAP, MAX_TABLE_ENTRIES

Shape = tuple[int, ...]

BOUND_GAP = 0.03
"""The gap at which the first search on a mesh ends."""


@dataclass(frozen=True)
class SearchMesh(PassOptions):
    """Chooses the mesh on which a program takes least: its axes, and on which level each lies."""

    name = "search-mesh"
    devices: int = 0
    """How many; 0: all of the cluster, or as many as the mesh has."""
    axes: int = 2
    """How many axes the mesh may have."""
    cluster: str = ""
    """A ready-made cluster, or a file with one."""
    entries: int = MAX_TABLE_ENTRIES
    """As of search-strategies."""
    memory: Bytes = 0
    """As of search-strategies."""

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        check(op)
        have = next((o.mesh for o in op.body.ops if isinstance(o, MeshOp)), None)
        program = op.clone()
        nested.run("inline-calls,distributed-autodiff", ctx, program)
        rough: list[tuple[Found, Mesh]] = []
        for mesh in self.candidates(have):
            free = mesh.cluster and replace(mesh.cluster, memory=None)
            unbound = replace(self, memory=0)
            report_progress(f"{self.name}: {mesh}")
            found = unbound.searched(ctx, program, replace(mesh, cluster=free), BOUND_GAP)
            rough.append((found, mesh))
        best: tuple[Found, Mesh] | None = None
        errors: list[Failure] = []
        for found, mesh in sorted(rough, key=lambda f: f[0].objective):
            if best is not None and found.bound >= best[0].objective:
                _say(f"{mesh} takes {found.bound:.6g} s or more")
                continue
            found = found if found.error else self.searched(ctx, program, mesh, DEFAULT_GAP)
            if found.error is not None:
                errors.append(found.error)
                _say(f"{mesh} is left out: {found.error}")
                continue
            _say(f"{mesh} takes {found.objective:.6g} s")
            if best is None or found.objective < best[0].objective:
                best = found, mesh
        if best is None:
            raise errors[0]
        declare(op, best[1])

    def candidates(self, have: Mesh | None) -> list[Mesh]:
        """The meshes that are tried.

        Raises:
            Failure: nobody says how many devices, the cluster has not so many, or its units are
                not made up of so few axes.
        """
        try:
            cluster = load(self.cluster) if self.cluster else have and have.cluster
            devices = self.devices or (cluster and cluster.units[-1]) or (have and have.size)
            if not devices:
                raise ShardirError("of how many devices? search-mesh{devices=8}")
            part = cluster and cluster.part(devices)
            name, error = have.name if have else "m", None
            found: dict[Shape, Mesh] = {}
            for shape in shapes(devices, self.axes):
                mesh = Mesh(name, tuple(zip(ascii_lowercase, shape or (1,), strict=False)), part)
                try:
                    mesh.check_cluster()
                    found[shape] = mesh
                except ShardirError as e:
                    error = e
            if not found:
                raise error or ShardirError("a mesh has an axis or more: search-mesh{axes=2}")
        except ShardirError as e:
            raise Failure(str(e)) from None
        return [m for s, m in found.items() if not any(refines(other, s) for other in found)]

    def searched(self, ctx: Context, program: ModuleOp, mesh: Mesh, gap: float) -> "Found":
        """What the program takes on a mesh."""
        trial = program.clone()
        declare(trial, mesh)
        try:
            options = f"entries={self.entries} gap={gap:.12f} memory={self.memory}"
            nested.run(f"search-strategies{{{options}}}", ctx, trial)
        except Failure as e:
            return Found(inf, -inf, e)
        numbers = [n for f, _ in bodies(trial) if (n := found_by_search(f))]
        objective, bound = (sum(n[k] for n in numbers) for k in ("objective", "bound"))
        return Found(objective, bound)


class Found(NamedTuple):
    """The seconds of a program's plan on a mesh, and what no plan takes less than; or why there is
    none."""

    objective: float
    bound: float
    error: Failure | None = None


def shapes(devices: int, axes: int) -> Iterator[Shape]:
    """The sizes above 1, at most `axes` of them, that make up so many devices, in every order."""
    if devices == 1:
        yield ()
    elif axes == 1:
        yield (devices,)
    elif axes > 1:
        for first in range(2, devices + 1):
            if devices % first == 0:
                yield from ((first, *rest) for rest in shapes(devices // first, axes - 1))


def refines(one: Shape, other: Shape) -> bool:
    """Whether a shape is another with axes that are split further."""
    return set(accumulate(one, mul)) > set(accumulate(other, mul))


def declare(module: ModuleOp, mesh: Mesh) -> None:
    """Declares the mesh, and the cluster that it is on, in the place of those that are declared."""
    block = module.body.block
    have = next((o for o in block.ops if isinstance(o, MeshOp)), None)
    if have is None:
        have = MeshOp.create(properties={"sym_name": StringAttr(mesh.name)})
        block.insert_op_before(have, block.first_op) if block.first_op else block.add_op(have)
    have.properties["axes"] = MeshAttr(mesh.axes)
    if mesh.cluster is None:
        return
    if have.cluster is None:
        taken = {o.sym_name.data for o in block.ops if isinstance(o, FuncOp | MeshOp | ClusterOp)}
        name = next(n for i in count() if (n := f"cluster_{i}" if i else "cluster") not in taken)
        block.insert_op_before(ClusterOp.create(properties={"sym_name": StringAttr(name)}), have)
        have.properties["cluster"] = SymbolRefAttr(name)
    else:
        name = have.cluster.string_value()
    for o in block.ops:
        if isinstance(o, ClusterOp) and o.sym_name.data == name:
            o.properties["devices"] = ClusterAttr(mesh.cluster)


LACKS = "which other meshes lack; state a number of slices instead, or leave it to the search"


def check(module: ModuleOp) -> None:
    """Raises Failure where the text states what holds on one mesh only."""
    meshes = [o for o in module.body.ops if isinstance(o, MeshOp)]
    errors: list[Located] = [
        (o, "one mesh is searched for, and the module has several; keep one") for o in meshes[1:]
    ]
    for f, block in bodies(module):
        if is_local_body(block):
            errors.append((f, f"@{name_of(f)} is in the local view, which is that of one mesh"))
        for v in values(block):
            stated = sharding_of(v)
            if stated is not None and (axes := (*stated.layout.used, *stated.replicated)):
                op = v.owner if isinstance(v.owner, Operation) else f
                errors.append((op, f"the layout of {named(v)} names {axes_text(axes)}, {LACKS}"))
        for op in block.ops:
            if (
                isinstance(op, TensorOp)
                and op.strategy is not None
                and names_axes(op.strategy.data)
            ):
                errors.append((op, f"the strategy {op.strategy.data} names axes, {LACKS}"))
    if errors:
        raise Failure(errors)


def names_axes(s: Strategy) -> bool:
    """Whether a strategy names axes, and not only numbers of slices."""
    cuts = [cut for side in (s.operands, s.results or ()) for dims in side for cut in dims]
    return bool(s.partial) or any(cut for cut in cuts if not isinstance(cut, int))


def _say(line: str) -> None:
    print(f"search-mesh: {line}", file=sys.stderr)
