"""The search for mesh, stages, microbatches and schedule together, and the plan of a trained model.

PanGu-alpha 207B (Zeng et al., 2021) on the 2,048 devices of the cluster pod2048, with 512 samples
of 1,024 tokens in a step, products in f16, and no recompute. `searched` is what `search-stages`
finds within the memory of a device; `published` has the numbers of MindSpore's model zoo
(pangu_alpha, mode 200B, with optimizer_shard): 16 stages, 8 devices for each op, so 16 for data,
32 microbatches of a sample for each; its layouts are `megatron(tp) * zero1(dp)`, its schedule 1F1B,
its stages the best split. `seconds` and `bytes` of both are by the same estimate: layouts of three
of the equal layers, the split into stages, and the simulated schedule. `cpu` are the CPU seconds of
the search, without parsing.
"""

import time
from collections.abc import Callable
from typing import Any

from xdsl.context import Context
from xdsl.dialects.builtin import ModuleOp

from bench.programs import PANGU, pangu
from shardir.algebra.schedules import schedule
from shardir.analysis.in_flight import in_flight
from shardir.dialects.train import AccumulateAttr, StepOp
from shardir.passes.apply_plan import ApplyPlan
from shardir.passes.search_stages import SearchStages
from shardir.pipelines import build
from shardir.rewriting.copying import copied
from shardir.rewriting.stages import ops_of_model
from shardir.search.stages.joint import step_seconds
from shardir.search.stages.shortened import Shortened
from shardir.search.stages.stage_costs import unit_costs
from shardir.search.stages.stages import Segments, candidate_cuts, split
from shardir.syntax.parser import parse

Record = dict[str, Any]
SIZE, BATCH = "207B", 512
RANKS, TENSOR, DATA, MICROBATCHES = 16, 8, 16, 32
PLAN = "megatron(tp) * zero1(dp)"
LAYERS, CLUSTER = PANGU[SIZE]["layers"], "pod2048"
SEARCHES = True
"""Whether there is a search, beside the published plan: the smallest takes over ten seconds."""
SMOKE = {
    "SIZE": "2.6B", "LAYERS": 2, "BATCH": 4, "CLUSTER": "gloo",
    "SEARCHES": False, "RANKS": 2, "TENSOR": 2,
    "DATA": 2, "MICROBATCHES": 4,
}  # fmt: skip


def made(text: str) -> ModuleOp:
    module = parse(text)
    for p in build("mixed-precision{compute=f16},inline-calls"):
        p.apply(Context(), module)
    return module


def step_of(module: ModuleOp) -> StepOp:
    return next(op for op in module.body.ops if isinstance(op, StepOp))


def searched(sizes: dict[str, int], batch: int, log: Callable[[str], object]) -> Record:
    """Return the record of the search."""
    module = made(pangu(**sizes, batch=batch))
    start = time.process_time()
    search = SearchStages(cluster=CLUSTER).search(Context(), module, log)
    cpu = time.process_time() - start
    assert search.best is not None
    best = search.best
    return {
        "plan": "searched", "found": str(best.candidate), "seconds": best.measured.seconds,
        "bytes": best.measured.bytes, "bound": search.bound, "cpu": cpu,
        "candidates": search.space.size, "layouts": search.searched, "schedules": search.tried,
    }  # fmt: skip


def published(sizes: dict[str, int], batch: int) -> Record:
    """Return the record of the plan with which the model was trained."""
    mesh = {"dp": DATA, "tp": TENSOR}
    module = made(pangu(**sizes, batch=batch // MICROBATCHES, mesh=mesh, cluster=CLUSTER))
    ApplyPlan(plan=PLAN).apply(Context(), module)
    ops = list(ops_of_model(step_of(module).find()))
    short = copied(module)
    step = step_of(short)
    step.properties["accumulate"] = AccumulateAttr.read(f"mean, microbatches = {MICROBATCHES}")
    shortened = Shortened.shorten(step.find())
    few = list(ops_of_model(step.find()))
    found, on = unit_costs(short, step.find(), "step", few, False)
    costs, order = shortened.costs(found), schedule("1f1b", RANKS, MICROBATCHES, 1)
    cuts = candidate_cuts(ops, RANKS, 1)
    stages = split(Segments.of(costs, cuts), order.placement, in_flight(order))
    assert stages.cuts is not None
    at = [cuts[i] for i in stages.cuts]
    seconds = step_seconds(costs, on, at, order, MICROBATCHES)
    found_text = f"{on}, {MICROBATCHES} microbatches, <1f1b, ranks = {RANKS}>, {PLAN}"
    return {
        "plan": "published", "found": found_text, "seconds": seconds, "bytes": stages.need,
    }  # fmt: skip


def records(log: Callable[[str], object]) -> list[Record]:
    """Return a record for each plan: plan, found, seconds, bytes; of the search also bound, cpu,
    and the numbers of candidates, of searches for layouts and of those whose schedules were
    tried."""
    sizes = PANGU[SIZE] | {"layers": LAYERS}
    out = [searched(sizes, BATCH, log)] if SEARCHES else []
    out.append(published(sizes, BATCH))
    for record in out:
        log(f"{record['plan']}: {record['seconds']:.3f} s, {record['bytes'] / 1e9:.1f} GB")
    return out
