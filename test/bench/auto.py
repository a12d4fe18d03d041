"""The mode auto against hand-written plans: modelled and measured steps, on 4 ranks.

The models are those of `cost-model`, and so are most of the hand-written plans, at least 12 of each
model. The time model is first fitted to the probes of shard-calibrate, and the search has the
program without annotations, on that cluster. Then the steps of all plans run in one start of 4 Gloo
ranks, in turns, and each figure is the median of its turns. `ratio` is the searched plan's time
divided by the fastest of the others': modelled by the report of the lowered programs, and
measured.
"""

import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from bench.cost_model import (
    BOTH,
    MAX_PROBE_BYTES,
    MEMORY,
    MODELS,
    RANKS,
    TENSOR,
    TIMEOUT,
    Mesh,
    assumed,
    few_probes,
    small,
    text,
)
from bench.plans import bare
from shardir.algebra.cluster import Cluster
from shardir.api.compilation import compile
from shardir.backend.runs import Options, RankCalls
from shardir.backend.torch.launch.measure import times
from shardir.cost import report
from shardir.syntax.parser import parse
from shardir.tools.calibrate import fit_cluster, initial_cluster, medians, working
from shardir.tools.probes import module, probes

MORE: dict[str, dict[str, tuple[Mesh, dict[str, str]]]] = {
    "mlp": {
        "data over 2, zero": (BOTH, {"w*": "{dp}, {}"}),
        "one layer split": (TENSOR, {"w?_1": "{}, {}"}),
    },
    "transformer": {"data x mlp split": (BOTH, {"l?_w?": "{}, {}"})},
    "recommender": {
        "w1 by columns": (TENSOR, {"w1": "{}, {tp}", "w2": "{tp}, {}"}),
        "zero over 2": (BOTH, {"table": "{dp}, {}", "w?": "{dp}, {}"}),
    },
}

ROUNDS, TURN = 51, 0.05
"""The numbers of turns, and the seconds of each. On a busy machine single turns of a program differ
by a sixth: with that many its median is within 3%."""

PROBING = 17, 0.01
SMOKE = {
    "RANKS": 2, "BOTH": (1, 2), "ROUNDS": 1, "PROBING": (1, 0.0), "MAX_PROBE_BYTES": 1 << 8,
    "MODELS": {"mlp": {"megatron": ((1, 2), {})}}, "MORE": {"mlp": {}},
    "fit_cluster": assumed, "probes": few_probes, "text": small,
}  # fmt: skip


def calibrated() -> Cluster:
    """Return the cluster of this machine's ranks, fitted to the probes."""
    given = probes(RANKS, MAX_PROBE_BYTES)
    probing = compile(module(given, RANKS), "")
    with tempfile.TemporaryDirectory() as folder:
        folder_of_probes = probing.save(Path(folder) / "probes")
        traces = list[list[RankCalls]]()
        (measured,) = times(
            [folder_of_probes], *PROBING, Options(timeout=TIMEOUT), on_traces=traces.extend
        )
    seconds = medians(given, probing, measured, traces[0])
    at_work = working(probing, measured, traces[0])
    return fit_cluster(given, probing, seconds, initial_cluster(RANKS, MEMORY), at_work).cluster


def on(cluster: Cluster, program: str) -> str:
    """Return the program with its mesh on the cluster."""
    mesh = re.sub(r"(dist\.mesh @m <[^>]*>)", r"\1 on @here", program, count=1)
    return f"dist.cluster @here <{cluster}>\n{mesh}"


def records(log: Callable[[str], object]) -> list[dict[str, Any]]:
    """One record per model and plan: model, plan, predicted_ms, measured_ms; and of the plan `auto`
    predicted_ratio and measured_ratio."""
    cluster = calibrated()
    log(f"fitted to the probes: {cluster}".replace("[", "("))
    found = []
    for model, strategies in MODELS.items():
        searched = bare(parse(on(cluster, text(model, BOTH, {}))))
        found.append((model, "auto", compile(searched, mode="auto")))
        for name, (mesh, layouts) in {**strategies, **MORE[model]}.items():
            program = on(cluster, text(model, mesh, layouts, "zero" in name))
            found.append((model, name, compile(program)))
    with tempfile.TemporaryDirectory() as folder:
        folders = [c.save(Path(folder) / str(i)) for i, (*_, c) in enumerate(found)]
        log(f"{len(found)} programs compiled")
        steps = times(
            folders, ROUNDS, TURN, Options(timeout=TIMEOUT),
            lambda done: log(f"round {done}/{ROUNDS}"),
        )  # fmt: skip
    out: list[dict[str, Any]] = [
        {
            "model": model, "plan": plan,
            "predicted_ms": report(c.module)[0].seconds * 1e3,
            "measured_ms": median(step["step"]) * 1e3,
        }
        for (model, plan, c), step in zip(found, steps, strict=True)
    ]  # fmt: skip
    for r in out:
        if r["plan"] == "auto":
            others = [o for o in out if o["model"] == r["model"] and o is not r]
            for kind in ("predicted", "measured"):
                r[f"{kind}_ratio"] = r[f"{kind}_ms"] / min(o[f"{kind}_ms"] for o in others)
    return out
