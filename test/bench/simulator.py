"""The simulator: predicted and measured steps, exposed communication and ops, on 4 ranks.

The strategies are those of `cost-model`, for each of its models. The probes of shard-calibrate, all
programs, and calls of them with the times of their lines, run in one start of 4 Gloo ranks, in
turns; figures are medians. The model is fitted to the probes alone. `error` is that of a time,
relative to the measured one. The log has the kinds of ops that are predicted worst, in all programs
of a model.
"""

import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from cost_model import (
    MAX_PROBE_BYTES,
    MEMORY,
    RANKS,
    ROUNDS,
    TIMEOUT,
    TURN,
    programs,
)
from rich.markup import escape

from shardir.api import compile
from shardir.backend.runs import Options, RankCalls
from shardir.backend.torch.launch.measure import times
from shardir.backend.torch.measured import ProgramLines
from shardir.backend.torch.traces import Differences, MeasuredTrace
from shardir.tools.calibrate import fitted, medians, unmeasured
from shardir.tools.probes import module, probes

WORST = 8
"""The number of kinds of ops of a model that are logged."""


def records(log: Callable[[str], object]) -> list[dict[str, Any]]:
    """Return one record per model and strategy: the predicted and the measured step and exposed
    communication in ms, with the error of each; and then Spearman's correlations and median errors,
    of all strategies and of the model's."""
    every_probe = probes(RANKS, MAX_PROBE_BYTES)
    probing = compile(module(every_probe, RANKS), "")
    found = list(programs())
    compiled = [compile(text) for _, _, text in found]
    traces: list[list[RankCalls]] = []
    with tempfile.TemporaryDirectory() as folder:
        folders = [c.save(Path(folder) / str(i)) for i, c in enumerate([probing, *compiled])]
        log(f"{len(found)} programs and {len(every_probe)} probes compiled")
        measured, *steps = times(
            folders, ROUNDS, TURN, Options(timeout=TIMEOUT),
            lambda done: log(f"round {done}/{ROUNDS}"), traces.extend,
            ["processor", *["wall"] * len(found)],
        )  # fmt: skip
    seconds = medians(probing, measured, traces[0])
    calibration = fitted(every_probe, probing, seconds, unmeasured(RANKS, MEMORY))
    log(f"fitted to the probes: {escape(str(calibration.cluster))}")
    out, parts = [], defaultdict[str, list[Differences]](list)
    for (model, strategy, _), c, step, ranks in zip(
        found, compiled, steps, traces[1:], strict=True
    ):
        (differs,) = MeasuredTrace(ProgramLines(c.module), ranks, calibration.cluster).differences()
        parts[model].append(differs)
        out.append({
            "model": model, "strategy": strategy,
            **_beside("step", differs.predicted, median(step["step"])),
            **_beside("exposed", *differs.exposed),
        })  # fmt: skip
    for model, of_model in parts.items():
        for line in worst(of_model):
            log(f"{model}: {escape(line)}")
    for r in out:
        same = [o for o in out if o["model"] == r["model"]]
        for what in ("step", "exposed"):
            for name, of in ((what, out), (f"{what}_model", same)):
                r[f"{name}_spearman"] = rank_correlation(of, what)
                r[f"{name}_median_error"] = median(o[f"{what}_error"] for o in of)
    return out


def tables(records: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of two tables: of strategies, in ms; and of all of them and each model's."""
    strategies, figures = list[dict[str, Any]](), list[dict[str, Any]]()
    for r in records:
        row = {"model": r["model"], "strategy": r["strategy"]}
        for what in ("step", "exposed"):
            row[what] = r[f"{what}_measured_ms"]
            row[f"{what} predicted"] = r[f"{what}_predicted_ms"]
            row[f"{what} error"] = r[f"{what}_error"]
        strategies.append(row)
    models = {r["model"]: (r, "_model") for r in records}
    for model, (r, of) in {"all": (records[0], ""), **models}.items():
        figures.append({
            "model": model,
            **{
                f"{what} {shown}": r[f"{what}{of}_{figure}"]
                for what in ("step", "exposed")
                for figure, shown in (("spearman", "Spearman"), ("median_error", "median error"))
            },
        })  # fmt: skip
    return {"strategies": strategies, "Spearman and median error": figures}


def _beside(what: str, predicted: float, measured: float) -> dict[str, float]:
    return {
        f"{what}_predicted_ms": predicted * 1e3, f"{what}_measured_ms": measured * 1e3,
        f"{what}_error": abs(predicted / measured - 1) if measured else 0.0,
    }  # fmt: skip


def worst(of_model: Sequence[Differences]) -> list[str]:
    """Return the kinds of ops whose times differ most, in all programs of a model."""
    sums = defaultdict[tuple[str, str], list[float]](lambda: [0.0, 0.0])
    for differs in of_model:
        for d in differs.parts:
            both = sums[d.what, d.kind]
            both[0] += d.predicted
            both[1] += d.measured
    ordered = sorted(sums.items(), key=lambda item: -abs(item[1][1] - item[1][0]))
    return [
        f"{what} {kind}: predicted {a * 1e3:.1f} ms, measured {b * 1e3:.1f} ms"
        for (what, kind), (a, b) in ordered[:WORST]
    ]


def rank_correlation(records: Sequence[dict[str, Any]], what: str) -> float:
    """Return Spearman's rank correlation of predicted and measured times."""
    from scipy.stats import spearmanr  # a second; tests need the programs of this file only

    columns = [[r[f"{what}_{side}_ms"] for r in records] for side in ("predicted", "measured")]
    found: Any = spearmanr(*columns)
    return float(found.statistic)
