"""The search for strategies: the time it needs, the bound it proves, and how the time grows.

`seconds` is the wall time of the pass search-strategies; `cpu` its CPU seconds, of which `graph`
for the cost graph and `solve` for its minimum; `before` the CPU seconds of parsing and
differentiation. `objective`, `bound` and `megatron` are estimated seconds of one step: of the plan,
the lower bound of all plans, and of Megatron's plan, all by the same time model.

gpt-2 is the step of `bytes` with two layers, on Gloo's ranks (no cluster); Megatron's plan is that
of the annotations of `programs.gpt`. PanGu-alpha, with products in f16, is on a part of the cluster
pod2048, with a sample for each device and no limit of memory. Nothing is annotated. The growth is
that of PanGu's 2.6B: with layers on 64 devices, and with devices at 8 layers; and that of a gated
recurrence with its steps, which are unrolled. `exponent` is the e of the best fit
cpu = c size ^ e.
"""

import re
import time
from collections.abc import Callable
from dataclasses import replace
from math import log, prod
from typing import Any
from unittest import mock

import numpy as np
from xdsl.context import Context
from xdsl.dialects.builtin import ModuleOp

from bench.programs import PANGU, gpt, pangu, recurrent
from shardir.analysis.functions import mesh_of
from shardir.analysis.updates import after_update
from shardir.dialects.dist import ClusterAttr, ClusterOp, RedistributeOp
from shardir.passes import PASSES
from shardir.pipelines import build
from shardir.rewriting.functions import bodies
from shardir.rewriting.marks import found_by_search
from shardir.search.graph.bucket_prices import TransferPrices
from shardir.search.graph.buckets import LateTransfer, Positions, shared_seconds
from shardir.search.graph.candidates import CandidateSource
from shardir.search.graph.transfer_costs import transfer_of
from shardir.search.plans import plan
from shardir.syntax.parser import parse

LAYOUT = re.compile(r", #dist\.layout<[^>]*>")
Record = dict[str, Any]


def applied(text: str, pipeline: str) -> ModuleOp:
    """Return the module of a text after the passes."""
    module = parse(text)
    for p in build(pipeline):
        p.apply(Context(), module)
    return module


def seconds(module: ModuleOp) -> float:
    """Return the estimated time of the only function, whose values have layouts. What the update
    uses is redistributed in buckets, all at the same moment."""
    ((f, block),) = bodies(module)
    mesh = mesh_of(f, module)
    assert mesh is not None
    late, source = after_update([*block.ops]), CandidateSource(mesh)
    together = [
        op for op in block.ops
        if isinstance(op, RedistributeOp) and late([use.operation for use in op.out.uses])
    ]  # fmt: skip
    transfers = [LateTransfer(transfer_of(op), Positions(0, 0, 0, 0)) for op in together]
    alone = sum(source.seconds(op) for op in block.ops if op not in together)
    return alone + shared_seconds(transfers, TransferPrices(mesh))[0]


ANNOTATED = "propagate-strategies,insert-redistributions,distributed-autodiff"


class Stopwatch:
    """The seconds since it was started, of the wall clock and of the processor."""

    def __init__(self) -> None:
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._wall

    @property
    def cpu(self) -> float:
        return time.process_time() - self._cpu


def searched(model: str, text: str, mesh: dict[str, int], before: str) -> Record:
    """Return the record of one search; `before`: the passes before it."""
    watch = Stopwatch()
    module = applied(text, before)
    prepared = watch.cpu
    for op in module.body.ops:
        if isinstance(op, ClusterOp):
            op.properties["devices"] = ClusterAttr(replace(op.devices.data, memory=None))
    ((f, block),) = bodies(module)
    ops = sum(1 for _ in block.ops)
    solve, solving = plan.solve, [0.0]

    def timed(*args: Any, **kwargs: Any) -> Any:
        inner = Stopwatch()
        try:
            return solve(*args, **kwargs)
        finally:
            solving[0] += inner.cpu

    with mock.patch.object(plan, "solve", timed):
        watch = Stopwatch()
        PASSES["search-strategies"]()().apply(Context(), module)
        seconds, cpu = watch.seconds, watch.cpu
    return {
        "model": model, "devices": prod(mesh.values()),
        "axes": ",".join(f"{a}={n}" for a, n in mesh.items()), "ops": ops,
        "seconds": seconds, "cpu": cpu, "graph": cpu - solving[0], "solve": solving[0],
        "before": prepared, **found_by_search(f),
    }  # fmt: skip


def searched_gpt(layers: int) -> Record:
    annotated = gpt(layers=layers, mesh=(2, 4))
    record = searched(
        f"gpt-{layers}", LAYOUT.sub("", annotated), {"dp": 2, "tp": 4},
        "distributed-autodiff",
    )  # fmt: skip
    return {**record, "megatron": seconds(applied(annotated, ANNOTATED))}


def searched_pangu(size: str, *axes: int, **sizes: int) -> Record:
    """Return the record of PanGu-alpha on axes of these sizes; `sizes` replace the published
    ones."""
    mesh: dict[str, int] = dict(zip("abc", axes, strict=False))
    sizes = {**PANGU[size], **sizes, "batch": prod(axes)}
    text = pangu(**sizes, mesh=mesh, cluster="pod2048")
    model = f"pangu-{size}-{sizes['layers']}"
    return searched(model, text, mesh, "mixed-precision{compute=f16},distributed-autodiff")


def searched_recurrence(steps: int) -> Record:
    """Return the record of a recurrence of so many steps."""
    text = LAYOUT.sub("", recurrent(steps=steps, batch=64, dim=256, mesh=RECURRENT))
    mesh = dict(zip(("dp", "tp"), RECURRENT, strict=True))
    return searched(f"recurrence-{steps}", text, mesh, "distributed-autodiff")


LAYERS: tuple[int, ...] = (1, 2, 4, 8, 16)
SCALES = (("2.6B", 8, 8), ("13.1B", 64, 8), ("207B", 64, 4, 8))
DEPTHS, DEEP = (2, 4, 8, 16, 32, 64), (8, 8)
"""Numbers of layers, and the axes on which they are searched."""
WIDTHS = ((2, 4), (4, 8), (16, 8), (64, 8), (256, 8))
WIDE = 8
"""The layers of the model that is searched on more and more devices."""
STEPS, RECURRENT = (8, 16, 32), (2, 4)
"""The steps of a recurrence, and the axes on which they are searched."""
SMOKE = {
    "LAYERS": (), "SCALES": (), "DEPTHS": (1,), "DEEP": (2,), "WIDTHS": (),
    "STEPS": (1,), "RECURRENT": (1, 2), "exponent": lambda found, sizes: len(found),
}  # fmt: skip


def exponent(found: list[Record], sizes: list[int]) -> float:
    """Return the e of cpu = c size ^ e, fitted by least squares of the logarithms."""
    return float(np.polyfit([log(n) for n in sizes], [log(r["cpu"]) for r in found], 1)[0])


def records(log: Callable[[str], object]) -> list[Record]:
    """Return one record per model, mesh and depth: model, devices, axes, ops, seconds, cpu, graph,
    solve, before, objective, bound, gap, and of GPT megatron; of growth, the exponent."""

    def logged(record: Record) -> Record:
        log(
            f"{record['model']} on {record['axes']}: {record['seconds']:.1f} s, "
            f"{record['cpu']:.1f} CPU s, gap {record['gap']:.1e}"
        )
        return record

    out = [logged(searched_gpt(layers)) for layers in LAYERS]
    out += [logged(searched_pangu(size, *axes)) for size, *axes in SCALES]
    deep = [logged(searched_pangu("2.6B", *DEEP, layers=n)) for n in DEPTHS]
    wide = [logged(searched_pangu("2.6B", *axes, layers=WIDE)) for axes in WIDTHS]
    long = [logged(searched_recurrence(steps)) for steps in STEPS]
    grown = [
        {"model": "growth with layers", "exponent": exponent(deep, list(DEPTHS))},
        {"model": "growth with devices", "exponent": exponent(wide, [r["devices"] for r in wide])},
        {"model": "growth with steps", "exponent": exponent(long, list(STEPS))},
    ]
    return out + deep + wide + long + grown
