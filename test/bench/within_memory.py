"""PanGu-alpha within the memory of its devices: the step with each feature on and off.

13.1B on 512 devices of 32 GB, and 207B on 2,048 (pod2048), with 2,048 samples in a step, products
in f16 and Adam; nothing is annotated. `auto` is the search with all that it has: layouts (ZeRO for
each parameter among them), recompute, overlap. The other rows leave something out, or are written
plans with recompute within the same memory. `step` is the simulated step in seconds, with overlap,
`in turn` that without; `repeated` the part of it that is computed again; `cpu` the CPU seconds of
search-strategies, and of all passes.
"""

import time
import warnings
from argparse import ArgumentParser
from collections.abc import Callable
from contextlib import redirect_stderr
from dataclasses import dataclass
from io import StringIO
from math import prod
from typing import Any

from xdsl.context import Context

from bench.programs import PANGU, pangu
from shardir.cost.report import report
from shardir.diagnostics import ShardirError
from shardir.pipelines import build, with_plan
from shardir.syntax.parser import parse

BATCH, CLUSTER = 2048, "pod2048"

NARROW = "mixed-precision{compute=f16}"


@dataclass(frozen=True)
class Row:
    """A row: a pipeline, and a plan in which `data` stands for the axes of the batch, and `model`
    for the innermost one."""

    name: str
    pipeline: str
    plan: str | None = None


RECOMPUTED = "train{recompute=32GB recompute-collectives=true nearest=true}"

ROWS = (
    Row("auto", "auto"),
    Row("auto, no recompute", "auto{recompute=off}"),
    Row("auto, full recompute", "auto{recompute=full}"),
    Row("auto, no presets", "auto{overlap=false}"),
    Row("megatron, no ZeRO", RECOMPUTED, "ddp(data) * megatron(model)"),
    Row("megatron, ZeRO-1", RECOMPUTED, "zero1(data) * megatron(model)"),
    Row("megatron, sequence, ZeRO-1", RECOMPUTED, "zero1(data) * megatron + sequence(model)"),
    Row("megatron, sequence, ZeRO-3", RECOMPUTED, "fsdp(data) * megatron + sequence(model)"),
    Row("megatron, sequence, ZeRO-1 on hosts", RECOMPUTED,
        '"*" : states [{data}] on host\nzero1(data) * megatron + sequence(model)'),
)  # fmt: skip

MODELS = {"13.1B": {"a": 64, "b": 8}, "207B": {"a": 64, "b": 4, "c": 8}}
LAYERS = 0
SMOKE = {
    "MODELS": {"2.6B": {"a": 1, "b": 2}}, "BATCH": 4, "LAYERS": 1,
    "ROWS": (ROWS[0], ROWS[4]),
}  # fmt: skip


def add_options(parser: ArgumentParser) -> None:
    parser.add_argument("--model", choices=[*MODELS], help="one model alone")
    parser.add_argument("--row", help="one row alone")
    parser.add_argument(
        "--layers", type=int, default=LAYERS, help="so many layers; 0: as published"
    )


def records(
    log: Callable[[str], object], model: str | None = None, row: str | None = None, layers: int = 0
) -> list[dict[str, Any]]:
    """One record per model and row: model, devices, plan, step, in turn, repeated, GB, fits, cpu;
    of a plan that is not found the error."""
    out = []
    for name, mesh in MODELS.items():
        if model not in (None, name):
            continue
        text = pangu(**PANGU[name] | ({"layers": layers} if layers else {}), batch=BATCH,
                     mesh=mesh, cluster=CLUSTER)  # fmt: skip
        for each in ROWS:
            if row is None or row == each.name:
                found = {"model": name, "devices": prod(mesh.values()), "plan": each.name}
                out.append(found | compiled(text, each, mesh))
                log(str(out[-1]))
    return out


def compiled(text: str, row: Row, mesh: dict[str, int]) -> dict[str, Any]:
    """Return the cost of a program by a row."""
    *data, last = mesh
    plan = row.plan and row.plan.replace("data", ", ".join(data)).replace("model", last)
    module, spent = parse(text), dict[str, float]()
    try:
        with warnings.catch_warnings(), redirect_stderr(StringIO()):
            warnings.simplefilter("ignore")
            for p in with_plan(build(f"{NARROW},{row.pipeline}"), plan):
                begin = time.process_time()
                p.apply(Context(), module)
                spent[p.name] = spent.get(p.name, 0.0) + time.process_time() - begin
    except ShardirError as e:
        return {"fits": False, "error": str(e).splitlines()[0]}
    (cost,) = report(module)
    again = cost.recomputed
    holds = cost.mesh.cluster_or_default.memory
    return {
        "step": cost.seconds, "in turn": sum(c.seconds for c in cost.ops),
        "repeated": again.seconds if again else 0.0, "GB": cost.memory.peak / 1e9,
        "fits": holds is None or cost.memory.peak <= holds,
        "search cpu": spent.get("search-strategies", 0.0), "cpu": sum(spent.values()),
    }  # fmt: skip
