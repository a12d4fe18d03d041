"""search-stages: a number of devices -> the mesh, the stages and the microbatches of a fast step.

    dist.mesh @m <d = 2048> on @pod2048
    train.step @step of @loss <adam, lr = 0.001>
 -> dist.mesh @m <a = 16, b = 8> on @pod2048
    train.step @step of @loss <adam, lr = 0.001>
        accumulate <mean, microbatches = 32> pipeline <zb-h1, ranks = 16>

It runs before all passes that decide on layouts: `search-stages{cluster=pod2048},auto`.

1. Enumerated are the numbers of ranks that divide the devices, with 1: no stages; the meshes of the
   devices of one stage, as in search-mesh; the numbers of microbatches that divide the batch; up to
   `chunks` stages on a rank; and the named schedules. The bounds of shardir/search/stages/joint.py
   rule out most of them.
2. Layouts come from search-strategies, within the memory of the stages of a rank. Of equal blocks
   of the model, three are searched and count for all.
3. The split into stages is the best one between repeated blocks (assign-stages); the ops get marks.
4. Programs of at most `lowered` ops are lowered and measured, without overlap; for others the
   estimate decides.
5. A batch is divided only where the step stays the same: shardir/rewriting/microbatching.py. If a
   step accumulates, the numbers of microbatches are multiples of its own. A step with a pipeline
   keeps it, except a schedule `search`; only the open choices are searched.
6. Calls are inlined. Annotations must hold on any mesh, as in search-mesh, and no op has a stage.
7. The result is reported on stderr, with a bound.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf

from xdsl.context import Context
from xdsl.dialects.builtin import ModuleOp

from shardir.algebra.mesh import Mesh
from shardir.analysis.functions import name_of
from shardir.cost.functions import functions
from shardir.cost.report import cost_of_function
from shardir.diagnostics import Failure, ShardirError, report_progress
from shardir.dialects import train
from shardir.dialects.blocks import ops_of
from shardir.dialects.dist import MeshOp
from shardir.dialects.train import stage_attrs, stage_of
from shardir.rewriting.copying import copied
from shardir.rewriting.microbatching import BatchDimensions, divide_batch, divisors
from shardir.rewriting.options import Bytes, PassOptions
from shardir.rewriting.registry import run_pipeline
from shardir.rewriting.stages import ops_of_model
from shardir.search.meshes.declared_mesh import check, declare, devices_of
from shardir.search.meshes.meshes import mesh_candidates
from shardir.search.stages.joint import JointSearch, Space, StageCandidate, StepMeasure
from shardir.search.stages.shortened import Shortened
from shardir.search.stages.stage_costs import UNLIMITED, UnitCosts, unit_costs
from shardir.search.stages.stages import candidate_cuts, cuts_of_blocks
from shardir.syntax.source import collect_warnings

PROGRAM = (
    "distributed-autodiff,search-strategies{{memory={memory} overlap=false}},"
    "insert-redistributions,recompute,lower-to-spmd,simplify-communication,choose-recompute,"
    "split-stages,fuse-communication"
)
"""How the program of a candidate is made to be measured."""


@dataclass(frozen=True)
class SearchStages(PassOptions):
    """Chooses the mesh, the stages, the microbatches and the schedule of a step."""

    name = "search-stages"
    devices: int = 0
    """The number of devices; 0: all of the cluster, or as many as the mesh has."""
    axes: int = 2
    """The number of axes of the mesh of a stage, at most."""
    cluster: str = ""
    """A ready-made cluster, or a file with one."""
    memory: Bytes = 0
    """The memory of a device in bytes; 0: of the cluster's devices, if known."""
    chunks: int = 1
    """The number of stages on a rank, at most."""
    divide: bool = True
    """Whether the batch may be divided into microbatches."""
    searches: int = 32
    """The number of searches for layouts, about; 0: as many as bounds leave."""
    lowered: int = 150
    """The number of ops of a function up to which programs are lowered and measured."""

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        search = self.search(ctx, op, self.report)
        assert search.best is not None
        candidate, estimate, (seconds, need) = search.best
        self.report(search.summary)
        self.report(
            f"{candidate}: {seconds:.6g} s, {need:.0f} B on a device; no other below "
            f"{search.bound:.6g} s"
        )
        write(op, step_of(op), candidate, estimate.cuts)

    def search(
        self, ctx: Context, module: ModuleOp, report: Callable[[str], object]
    ) -> JointSearch:
        """Inline the calls of a module, and search; return the search after its end.

        Raises:
            Failure: nothing keeps to the memory, or the module has no step to search for.
        """
        check(module)
        with collect_warnings():  # the compilation repeats them
            run_pipeline("inline-calls", ctx, module)
            trials = _Trials(self, ctx, module, step_of(module))
            space = self.space(module, step_of(module), trials)
            limit = self.memory or space.meshes[0][0].cluster_or_default.memory or inf
            search = JointSearch(
                space, trials.costs, trials.cuts, limit,
                trials.measure if trials.size <= self.lowered else None, report,
                self.searches,
            )  # fmt: skip
            search.run()
        return search

    def report(self, line: str) -> None:
        print(f"{self.name}: {line}", file=sys.stderr)

    def space(self, module: ModuleOp, request: train.StepOp, trials: "_Trials") -> Space:
        """Return the candidates.

        Raises:
            Failure: the number of devices is unknown, or no mesh has so many.
        """
        declared = next((o.mesh for o in module.body.ops if isinstance(o, MeshOp)), None)
        name, devices, cluster = devices_of(self.name, self.devices, self.cluster, declared)
        given, own = request.pipeline, request.microbatches
        ranks = [p for p in divisors(devices) if p <= trials.most_stages]
        if given is not None:
            ranks = [given.values["ranks"]]
        meshes, errors = list[tuple[Mesh, int]](), list[ShardirError]()
        for p in ranks:
            try:
                if devices % p:
                    message = f"expected a number of devices that {p} ranks divide, got {devices}"
                    raise ShardirError(message)
                meshes += [(m, p) for m in mesh_candidates(name, devices // p, self.axes, cluster)]
            except ShardirError as e:
                errors.append(e)
        if not meshes:
            raise Failure(str(errors[0]))
        fixed = given is not None and given.kind != train.SEARCH
        return Space(
            meshes, [own * k for k in divisors(trials.most_parts)],
            [given.values["chunks"]] if given is not None else range(1, self.chunks + 1),
            [given.kind] if given is not None and fixed else (),
            trials.most_stages if given is None else inf,
        )  # fmt: skip


def step_of(module: ModuleOp) -> train.StepOp:
    """Return the step of a module.

    Raises:
        Failure: there is none, or several; it is synchronised every few steps, or has stages.
    """
    steps = [op for op in module.body.ops if isinstance(op, train.StepOp)]
    if len(steps) != 1:
        raise Failure(f"search-stages: expected one train.step, got {len(steps)}; use search-mesh")
    (step,) = steps
    if step.sync is not None:
        raise Failure([(step, "expected no `sync`, got one; use search-mesh, for one replica")])
    for op in step.find().body.block.ops:
        if stage_of(op) is not None:
            message = f"expected no marks of stages, got {train.STAGE} on {op.name}; remove them"
            raise Failure([(op, message)])
    return step


class _Trials:
    """The costs and programs of a step on meshes, of copies of its module."""

    def __init__(self, options: SearchStages, ctx: Context, module: ModuleOp, step: train.StepOp):
        self.options, self.ctx, self.module = options, ctx, module
        f = step.find()
        ops = list(ops_of_model(f))
        self.ops, self.own, self.size = ops, step.microbatches, len(ops_of(f.body.block))
        self.most_parts = 1
        try:
            if options.divide:
                self.most_parts = BatchDimensions.of(step).divisor
        except ShardirError as e:
            options.report(f"the batch is not divided: {e}")
        self.most_stages = 1 + len(cuts_of_blocks(ops))
        """Stages are not cut within blocks of the model, where blocks repeat."""
        self.short = copied(module)
        self.shortened = Shortened.shorten(step_of(self.short).find())
        self.known: dict[tuple[Mesh, int, int], UnitCosts] = {}

    def cuts(self, stages: int, chunks: int) -> Sequence[int]:
        """Return the cuts between ops that are considered."""
        return [0, len(self.ops)] if stages == 1 else candidate_cuts(self.ops, stages, chunks)

    def costs(self, mesh: Mesh, microbatches: int, memory: int) -> UnitCosts:
        """Return the costs of all ops on a mesh, from the costs of the shortened program."""
        memory = 0 if memory >= UNLIMITED else memory
        key = mesh, microbatches, memory
        if key not in self.known:
            report_progress(f"{self.options.name}: {mesh}, {microbatches} microbatches")
            trial = copied(self.short)
            declare(trial, mesh.without_memory)
            step = step_of(trial)
            divide_batch(step, microbatches)
            f, name = step.find(), step.sym_name.data
            costs, _ = unit_costs(trial, f, name, list(ops_of_model(f)), True, memory)
            self.known[key] = self.shortened.costs(costs)
        return self.known[key]

    def measure(self, candidate: StageCandidate, cuts: Sequence[int]) -> StepMeasure:
        """Return the figures of the lowered program of a candidate."""
        report_progress(f"{self.options.name}: {candidate}")
        trial = copied(self.module)
        step = step_of(trial)
        name = step.sym_name.data
        write(trial, step, candidate, cuts)
        run_pipeline(PROGRAM.format(memory=self.options.memory), self.ctx, trial)
        ((f, mesh),) = ((f, m) for f, m in functions(trial) if name_of(f) == name)
        cost = cost_of_function(f, mesh)
        return StepMeasure(cost.seconds, cost.memory.peak)


def write(
    module: ModuleOp, step: train.StepOp, candidate: StageCandidate, cuts: Sequence[int]
) -> None:
    """Write a candidate into a program: the mesh, the clauses of the step, and marks of stages."""
    declare(module, candidate.mesh)
    ops = list(ops_of_model(step.find()))
    divide_batch(step, candidate.microbatches)
    if not candidate.schedule:
        return
    numbers = f"ranks = {candidate.ranks}, chunks = {candidate.chunks}"
    step.properties["pipeline"] = train.PipelineAttr.read(f"{candidate.schedule}, {numbers}")
    for stage, (begin, end) in enumerate(pairwise(cuts)):
        for op in ops[begin:end]:
            op.attributes |= stage_attrs(stage)
