"""The search for strategies: seconds until it ends, what it proves of the plan, how both grow.

`seconds` are those of the pass search-strategies, wall time; `cpu` the processor's, of which
`graph` goes into the sum of costs and `solve` into the least of it; `before` are the processor's of
parsing and differentiation. `objective`, `bound` and `megatron` are modelled seconds of one step:
of the plan, of what no plan takes less than, and of Megatron's plan, all by the same model.

gpt-2 is the step of `bytes` with two layers, on Gloo's ranks (no cluster); Megatron's plan is what
the annotations of `programs.gpt` give. PanGu-alpha, its products in f16, is on a part of the
cluster pod2048, with a sample for each device and no limit of memory. Nothing is annotated. The
growth is that of PanGu's 2.6B: with layers on 64 devices, and with devices at 8 layers; `exponent`
is the e of that cpu = c size ^ e which fits best.
"""

import re
import time
from collections.abc import Callable
from dataclasses import replace
from math import log, prod
from typing import Any
from unittest import mock

import numpy as np
from programs import PANGU, gpt, pangu
from xdsl.context import Context
from xdsl.dialects.builtin import ModuleOp

from shardir.analysis.functions import mesh_of
from shardir.dialects.dist import ClusterAttr, ClusterOp
from shardir.passes import PASSES, search_strategies
from shardir.passes.search_strategies import offers as offers_of
from shardir.pipelines import build
from shardir.rewriting.functions import bodies
from shardir.rewriting.marks import found_by_search
from shardir.syntax.parser import parse

STATED = re.compile(r", #dist\.layout<[^>]*>")
Record = dict[str, Any]


def applied(text: str, pipeline: str) -> ModuleOp:
    """The module of a text after the passes."""
    module = parse(text)
    for p in build(pipeline):
        p.apply(Context(), module)
    return module


def seconds(module: ModuleOp) -> float:
    """The modelled seconds of the only function, laid out, with its redistributions."""
    ((f, block),) = bodies(module)
    mesh = mesh_of(f, module)
    assert mesh is not None
    offers = offers_of(mesh)
    return offers.seconds(block)


ANNOTATED = "propagate-strategies,insert-redistributions,distributed-autodiff"


class Clock:
    """Seconds since it was made."""

    def __init__(self) -> None:
        self.wall, self.processor = time.perf_counter(), time.process_time()

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.wall

    @property
    def cpu(self) -> float:
        return time.process_time() - self.processor


def searched(model: str, text: str, mesh: dict[str, int], before: str) -> Record:
    """The record of one search; `before`: the passes before it."""
    clock = Clock()
    module = applied(text, before)
    prepared = clock.cpu
    for op in module.body.ops:
        if isinstance(op, ClusterOp):
            op.properties["devices"] = ClusterAttr(replace(op.devices.data, memory=None))
    ((f, block),) = bodies(module)
    ops = sum(1 for _ in block.ops)
    solve, solving = search_strategies.solve, [0.0]

    def timed(*given: Any, **named: Any) -> Any:
        inner = Clock()
        try:
            return solve(*given, **named)
        finally:
            solving[0] += inner.cpu

    with mock.patch.object(search_strategies, "solve", timed):
        clock = Clock()
        PASSES["search-strategies"]()().apply(Context(), module)
        seconds, cpu = clock.seconds, clock.cpu
    return {
        "model": model, "devices": prod(mesh.values()),
        "axes": ",".join(f"{a}={n}" for a, n in mesh.items()), "ops": ops,
        "seconds": seconds, "cpu": cpu, "graph": cpu - solving[0], "solve": solving[0],
        "before": prepared, **found_by_search(f),
    }  # fmt: skip


def searched_gpt(layers: int) -> Record:
    annotated = gpt(layers=layers, mesh=(2, 4))
    record = searched(
        f"gpt-{layers}", STATED.sub("", annotated), {"dp": 2, "tp": 4},
        "distributed-autodiff",
    )  # fmt: skip
    return {**record, "megatron": seconds(applied(annotated, ANNOTATED))}


def searched_pangu(size: str, *axes: int, **sizes: int) -> Record:
    """PanGu-alpha on axes of these sizes, with other `sizes` than the published, if any."""
    mesh = dict(zip("abc", axes, strict=False))
    sizes = {**PANGU[size], **sizes, "batch": prod(axes)}
    text = pangu(**sizes, mesh=mesh, cluster="pod2048")
    model = f"pangu-{size}-{sizes['layers']}"
    return searched(model, text, mesh, "mixed-precision{compute=f16},distributed-autodiff")


LAYERS = (1, 2, 4, 8, 16)
SCALES = (("2.6B", 8, 8), ("13.1B", 64, 8), ("207B", 64, 4, 8))
DEPTHS = (2, 4, 8, 16, 32, 64)
WIDTHS = ((2, 4), (4, 8), (16, 8), (64, 8), (256, 8))


def exponent(found: list[Record], sizes: list[int]) -> float:
    """The e of the cpu = c size ^ e with the least squares of logarithms."""
    return float(np.polyfit([log(n) for n in sizes], [log(r["cpu"]) for r in found], 1)[0])


def records(log: Callable[[str], object]) -> list[Record]:
    """One record per model, mesh and depth: model, devices, axes, ops, seconds, cpu, graph, solve,
    before, objective, bound, gap, and of GPT megatron; of growth, the exponent."""

    def said(record: Record) -> Record:
        log(
            f"{record['model']} on {record['axes']}: {record['seconds']:.1f} s, "
            f"{record['cpu']:.1f} of the processor, gap {record['gap']:.1e}"
        )
        return record

    out = [said(searched_gpt(layers)) for layers in LAYERS]
    out += [said(searched_pangu(size, *axes)) for size, *axes in SCALES]
    deep = [said(searched_pangu("2.6B", 8, 8, layers=n)) for n in DEPTHS]
    wide = [said(searched_pangu("2.6B", *axes, layers=8)) for axes in WIDTHS]
    grown = [
        {"model": "growth with layers", "exponent": exponent(deep, list(DEPTHS))},
        {"model": "growth with devices", "exponent": exponent(wide, [r["devices"] for r in wide])},
    ]
    return out + deep + wide + grown
