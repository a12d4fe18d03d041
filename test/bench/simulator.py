"""The simulator: predicted and measured steps, exposed communication and ops, on 4 ranks.

The strategies are those of `cost-model`, for each of its models. The probes of shard-calibrate, all
programs, and calls of them with the times of their lines, run in one start of 4 ranks on each
backend, in turns; figures are medians. The model is fitted to the probes alone. `error` is that of
a time, relative to the measured one; `halves` is Spearman's correlation of the measured times of
every other round with those of the rounds between, which no prediction can be expected to exceed.
The log has the kinds of ops that are predicted worst, in all programs of a model.
"""

import tempfile
from argparse import ArgumentParser, ArgumentTypeError
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from rich.markup import escape

from bench.cost_model import (
    MAX_PROBE_BYTES,
    MEMORY,
    RANKS,
    ROUNDS,
    TIMEOUT,
    TURN,
    assumed,
    few_probes,
    programs,
    small,
)
from bench.kept_rounds import Rounds, digest, folder_of, read, write
from shardir.algebra.cluster import Cluster
from shardir.api.compilation import compile
from shardir.api.compiled import Compiled
from shardir.backend.runs import Options, RankCalls
from shardir.backend.torch.launch.measure import times
from shardir.backend.torch.measured import ProgramLines
from shardir.backend.torch.traces import Differences, MeasuredTrace
from shardir.diagnostics import ShardirError
from shardir.tools.calibrate import fit_cluster, initial_cluster, medians, working
from shardir.tools.probes import module, probes

BACKENDS: tuple[str, ...] = ("gloo", "shm")
WORST = 8
"""The number of kinds of ops of a model that are logged."""
SMOKE = {
    "RANKS": 2, "ROUNDS": 2, "TURN": 0.0, "MAX_PROBE_BYTES": 1 << 8, "BACKENDS": ("gloo",),
    "fit_cluster": assumed, "probes": few_probes,
    "programs": lambda: ((x, x, small("mlp", (1, 2), {})) for x in ("mlp", "again")),
}  # fmt: skip


def number_of_rounds(text: str) -> int:
    value = int(text)
    if value < 0:
        raise ArgumentTypeError(f"expected 0 rounds or more, got {text}")
    return value


def add_options(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--rounds", type=number_of_rounds, default=ROUNDS, help=f"turns of each program ({ROUNDS})"
    )
    parser.add_argument("--backends", nargs="+", choices=BACKENDS, default=BACKENDS)
    parser.add_argument(
        "--measured", type=Path, metavar="FOLDER",
        help="keep what is measured in a folder, and add rounds to those that it has; "
        "--rounds 0 measures nothing",
    )  # fmt: skip


def records(
    log: Callable[[str], object], rounds: int = ROUNDS, backends: Sequence[str] = BACKENDS,
    measured: Path | None = None,
) -> list[dict[str, Any]]:  # fmt: skip
    """Return one record per backend, model and strategy: the predicted and the measured step and
    exposed communication in ms, with the error of each; and then Spearman's correlations, those
    of two halves of the rounds, and median errors, of all strategies and of the model's."""
    if measured is not None:
        folder_of(measured)
    every_probe = probes(RANKS, MAX_PROBE_BYTES)
    probing = compile(module(every_probe, RANKS), "")
    found = list(programs())
    compiled = [compile(text) for _, _, text in found]
    out = list[dict[str, Any]]()
    with tempfile.TemporaryDirectory() as folder:
        folders = [c.save(Path(folder) / str(i)) for i, c in enumerate([probing, *compiled])]
        log(f"{len(found)} programs and {len(every_probe)} probes compiled")
        known = digest(folders)
        before = {b: read(measured / f"{b}.json", known) for b in backends if measured}
        every = dict[str, Rounds]()
        for b in backends:
            every[b] = _rounds(folders, b, rounds, before.get(b, Rounds([], [])), log)
            if measured and rounds:
                write(measured / f"{b}.json", known, every[b])
    for backend, each in every.items():
        seconds = medians(every_probe, probing, each.seconds[0], each.calls[0])
        at_work = working(probing, each.seconds[0], each.calls[0])
        calibration = fit_cluster(
            every_probe, probing, seconds, initial_cluster(RANKS, MEMORY), at_work
        )
        log(f"{backend}, fitted to the probes: {escape(str(calibration.cluster))}")
        out += _compared(found, compiled, each, calibration.cluster, backend, log)
    return out


def _rounds(
    folders: Sequence[Path], backend: str, rounds: int, before: Rounds,
    log: Callable[[str], object],
) -> Rounds:  # fmt: skip
    """Return the rounds of the programs in some folders: those before, and those measured now."""
    if not rounds and not len(before):
        raise ShardirError(
            f"expected rounds to measure, or kept ones of {backend}, got none; use --rounds"
        )
    if not rounds:
        return before
    traces: list[list[RankCalls]] = []
    seconds = times(
        folders, rounds, TURN, Options(backend=backend, timeout=TIMEOUT),
        lambda done: log(f"{backend}: round {done}/{rounds}"), traces.extend,
    )  # fmt: skip
    return before + Rounds(seconds, traces)


def _compared(
    found: Sequence[tuple[str, str, str]], compiled: Sequence[Compiled], rounds: Rounds,
    cluster: Cluster, backend: str, log: Callable[[str], object],
) -> list[dict[str, Any]]:  # fmt: skip
    """Return the records of a backend."""
    out, parts = list[dict[str, Any]](), defaultdict[str, list[Differences]](list)
    halves = [rounds.half(which) for which in range(2)] if len(rounds) > 1 else []
    for i, ((model, strategy, _), c) in enumerate(zip(found, compiled, strict=True), 1):
        lines = ProgramLines(c.module)
        all, *of_halves = (
            MeasuredTrace(lines, of.calls[i], cluster).differences()[0] for of in (rounds, *halves)
        )
        parts[model].append(all)
        r = {
            "backend": backend, "model": model, "strategy": strategy,
            **_beside("step", all.predicted, step := median(rounds.seconds[i]["step"])),
            **_beside("exposed", all.exposed[0], all.beyond(step)),
        }  # fmt: skip
        for number, (half, differs) in enumerate(zip(halves, of_halves, strict=True)):
            step = median(half.seconds[i]["step"])
            r[f"step_half{number}_ms"] = step * 1e3
            r[f"exposed_half{number}_ms"] = differs.beyond(step) * 1e3
        out.append(r)
    for model, of_model in parts.items():
        for line in worst(of_model):
            log(f"{backend}, {model}: {escape(line)}")
    for r in out:
        same = [o for o in out if o["model"] == r["model"]]
        for what in ("step", "exposed"):
            for name, of in ((what, out), (f"{what}_model", same)):
                r[f"{name}_spearman"] = rank_correlation(of, what)
                r[f"{name}_halves"] = (
                    rank_correlation(of, what, ("half0", "half1")) if halves else None
                )
                r[f"{name}_median_error"] = median(o[f"{what}_error"] for o in of)
    return out


def tables(records: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of two tables: of strategies, in ms; and of all of them and each model's."""
    strategies, figures = list[dict[str, Any]](), list[dict[str, Any]]()
    for r in records:
        row = {"backend": r["backend"], "model": r["model"], "strategy": r["strategy"]}
        for what in ("step", "exposed"):
            row[what] = r[f"{what}_measured_ms"]
            row[f"{what} predicted"] = r[f"{what}_predicted_ms"]
            row[f"{what} error"] = r[f"{what}_error"]
        strategies.append(row)
    shown = (("spearman", "Spearman"), ("halves", "halves"), ("median_error", "median error"))
    for backend in dict.fromkeys(r["backend"] for r in records):
        mine = [r for r in records if r["backend"] == backend]
        models = {r["model"]: (r, "_model") for r in mine}
        for model, (r, of) in {"all": (mine[0], ""), **models}.items():
            figures.append({
                "backend": backend, "model": model,
                **{
                    f"{what} {name}": r[f"{what}{of}_{figure}"]
                    for what in ("step", "exposed") for figure, name in shown
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


def rank_correlation(
    records: Sequence[dict[str, Any]], what: str, sides: Sequence[str] = ("predicted", "measured")
) -> float:
    """Return Spearman's rank correlation of predicted and measured times, or of other two sides."""
    from scipy.stats import spearmanr  # a second; tests need the programs of this file only

    columns = [[r[f"{what}_{side}_ms"] for r in records] for side in sides]
    found: Any = spearmanr(*columns)
    return float(found.statistic)
