"""The cost model: predicted and measured steps of many strategies of three models, on 4 ranks.

The probes of shard-calibrate and all programs run in one start of 4 Gloo ranks, in turns; the time
of each is the median of its turns. The time model is fitted to the probes alone, to no strategy.
The relative model, whose four coefficients are per byte, is fitted to every third strategy.
"""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from rich.markup import escape

from bench.program_text import NORMAL, Text, tensor
from bench.programs import mlp, transformer
from shardir.algebra.cluster import Cluster
from shardir.api.compilation import compile
from shardir.api.compiled import Compiled
from shardir.backend.runs import Options, RankCalls
from shardir.backend.torch.launch.measure import times
from shardir.cost import relative, report
from shardir.cost.fit import fit_relative
from shardir.tools.calibrate import fit_cluster, initial_cluster, medians, working
from shardir.tools.fitted_cluster import Calibration
from shardir.tools.probes import Probe, module, probes

RANKS = 4
MAX_PROBE_BYTES = 1 << 22
"""The bytes of the largest value of a probe."""
PROBES: Callable[[int, int], list[Probe]] = probes
ROUNDS = 17
"""The turns of each program."""
TURN, TIMEOUT = 0.01, 120.0
"""The shortest turn of a program, and the longest wait for a rank, in seconds."""
MEMORY = 1 << 32
"""The bytes of a device."""

Mesh = tuple[int, int]
DATA, TENSOR, BOTH = (4, 1), (1, 4), (2, 2)

REPLICATED = {"l?_w?": "{}, {}", "l?_fc?": "{}, {}", "l?_b?": "{}"}
"""The layouts of a transformer's weights."""

MLP: dict[str, tuple[Mesh, dict[str, str]]] = {
    "data": (DATA, {}),
    "repeated": (TENSOR, {"w*": "{}, {}"}),
    "data over 2, repeated": (BOTH, {"w*": "{}, {}"}),
    "zero": (DATA, {"w*": "{dp}, {}"}),
    "columns": (TENSOR, {"w*": "{}, {tp}"}),
    "rows": (TENSOR, {"w*": "{tp}, {}"}),
    "megatron": (TENSOR, {}),
    "data x megatron": (BOTH, {}),
    "zero x megatron": (BOTH, {"w1*": "{dp}, {tp}", "w2*": "{tp}, {dp}"}),
    "2d": (BOTH, {"x": "{}, {}", "target": "{}, {}", "w*": "{dp}, {tp}"}),
    "data x columns": (BOTH, {"w*": "{}, {tp}"}),
}
TRANSFORMER: dict[str, tuple[Mesh, dict[str, str]]] = {
    "data": (DATA, {}),
    "repeated": (TENSOR, REPLICATED),
    "data over 2, repeated": (BOTH, REPLICATED),
    "zero": (DATA, {}),
    "megatron": (TENSOR, {}),
    "data x megatron": (BOTH, {}),
    "zero x megatron": (BOTH, {}),
    "sequence": (TENSOR, {"x": "{}, {tp}, {}", "target": "{}, {tp}, {}", **REPLICATED}),
    "data x sequence": (BOTH, {"x": "{dp}, {tp}, {}", "target": "{dp}, {tp}, {}", **REPLICATED}),
    "attention split": (TENSOR, {"l?_fc?": "{}, {}", "l?_b?": "{}"}),
    "mlp split": (TENSOR, {"l?_w?": "{}, {}"}),
    "columns": (TENSOR, {"l?_w?": "{}, {tp}", "l?_fc?": "{}, {tp}", "l?_b?": "{tp}"}),
}
RECOMMENDER: dict[str, tuple[Mesh, dict[str, str]]] = {
    "data": (DATA, {}),
    "repeated": (TENSOR, {}),
    "data over 2, repeated": (BOTH, {}),
    "table by rows": (DATA, {"table": "{dp}, {}"}),
    "table by columns": (DATA, {"table": "{}, {dp}"}),
    "table by rows, data over 2": (BOTH, {"table": "{tp}, {}"}),
    "table by columns, data over 2": (BOTH, {"table": "{}, {tp}"}),
    "table by rows and columns": (BOTH, {"table": "{dp}, {tp}"}),
    "zero": (DATA, {"table": "{dp}, {}", "w?": "{dp}, {}"}),
    "table and w1 by columns": (
        TENSOR, {"table": "{}, {tp}", "w1": "{}, {tp}", "w2": "{tp}, {}"},
    ),
    "table by rows, data x columns": (BOTH, {"table": "{dp}, {}", "w1": "{}, {tp}"}),
}  # fmt: skip


MODELS = {"mlp": MLP, "transformer": TRANSFORMER, "recommender": RECOMMENDER}


def few_probes(ranks: int, most: int) -> list[Probe]:
    """Some probes of each kind, for smoke forms."""
    kinds: dict[str, list[Probe]] = {}
    for probe in probes(ranks, most):
        kinds.setdefault(probe.about, []).append(probe)
    return [p for about, every in kinds.items() for p in (every[::16] if about else every)]


def small(model: str, mesh: Mesh, layouts: dict[str, str], zero: bool = False) -> str:
    """Return the program of a small MLP, for smoke forms."""
    return mlp(layers=2, batch=8, dim=8, hidden=8, mesh=mesh, layouts=layouts)


def assumed(
    given: Sequence[Probe], probing: Compiled, seconds: object, start: Cluster, at_work: object
) -> Calibration:
    """The start values in place of a fit, for smoke forms; test/cost/test_calibrate.py fits."""
    return Calibration(start, None, {})


SMOKE = {
    "RANKS": 2, "ROUNDS": 1, "TURN": 0.0, "MAX_PROBE_BYTES": 1 << 8, "EVERY": 2,
    "PROBES": few_probes, "fit_cluster": assumed, "text": small,
    "MODELS": {"mlp": {"data": ((2, 1), {}), "megatron": ((1, 2), {})}},
}  # fmt: skip


def programs() -> Iterator[tuple[str, str, str]]:
    """Yield the model, the strategy and the text of each program."""
    for model, strategies in MODELS.items():
        for name, (mesh, layouts) in strategies.items():
            yield model, name, text(model, mesh, layouts, "zero" in name)


def text(model: str, mesh: Mesh, layouts: dict[str, str], zero: bool = False) -> str:
    """Return the program of a model with these layouts; `zero`: a transformer's parameters are
    split over dp too."""
    match model:
        case "mlp":
            return mlp(layers=2, batch=256, dim=512, hidden=1024, mesh=mesh, layouts=layouts)
        case "transformer":
            return transformer(layers=2, hidden=128, heads=4, mesh=mesh, fsdp=zero, layouts=layouts)
        case _:
            return recommender(mesh, layouts)


def recommender(mesh: Mesh, layouts: dict[str, str]) -> str:
    """Return a train step of a small DLRM: 8 ids of a sample are looked up in a table [50000, 64],
    the vectors of each two multiplied, and the products and the vectors go through w1, relu and w2.
    Samples are split over dp, and parameters are replicated, unless `layouts` has others."""
    rows, columns, fields, batch, hidden = 50_000, 64, 8, 512, 512
    t = Text(dict(zip(("dp", "tp"), mesh, strict=True)), layouts=layouts)
    t.indices("ids", [batch, fields], "{dp}, {}", rows)
    t.argument("target", [batch, 1], "{dp}, {}", "train.input = " + NORMAL.format(1))
    t.parameter("table", [rows, columns], "{}, {}", NORMAL.format(0.1))
    pairs, all = fields * fields, fields * columns
    t.parameter("w1", [pairs + all, hidden], "{}, {}", NORMAL.format((pairs + all) ** -0.5))
    t.parameter("w2", [hidden, 1], "{}, {}", NORMAL.format(hidden**-0.5))
    vectors, products = [batch, fields, columns], [batch, fields, fields]
    t.op("rows", "nn.gather %table, %ids axis 0", ["table", "ids"], tensor(vectors))
    t.op("pairs", 'nn.einsum "bie,bje->bij" %rows, %rows', ["rows", "rows"], tensor(products))
    t.op("flat_pairs", "nn.reshape %pairs", ["pairs"], tensor([batch, pairs]))
    t.op("flat_rows", "nn.reshape %rows", ["rows"], tensor([batch, all]))
    features, wide = ["flat_pairs", "flat_rows"], tensor([batch, hidden])
    t.op("x", "nn.concat %flat_pairs, %flat_rows axis 1", features, tensor([batch, pairs + all]))
    t.op("h", "nn.matmul %x, %w1", ["x", "w1"], wide)
    t.op("a", "nn.relu %h", ["h"], wide)
    t.op("y", "nn.matmul %a, %w2", ["a", "w2"], tensor([batch, 1]))
    t.squared_error("y", [batch, 1])
    return t.step(0.1)


LAID_OUT = "propagate-strategies,insert-redistributions,distributed-autodiff"
EVERY = 3
"""The relative model's coefficients are fitted to every third strategy."""


def records(log: Callable[[str], object]) -> list[dict[str, Any]]:
    """Return one record per model and strategy: model, strategy, predicted_ms, measured_ms, fitted;
    spearman, of all strategies that were not fitted, and spearman_model, of the model's. Then the
    same of the relative model: relative_ms, relative_fitted, relative_spearman and
    relative_spearman_model."""
    every_probe = PROBES(RANKS, MAX_PROBE_BYTES)
    probing = compile(module(every_probe, RANKS), "")
    found = list(programs())
    compiled = [compile(text) for _, _, text in found]
    traces = list[list[RankCalls]]()
    with tempfile.TemporaryDirectory() as folder:
        folders = [c.save(Path(folder) / str(i)) for i, c in enumerate([probing, *compiled])]
        log(f"{len(found)} programs and {len(every_probe)} probes compiled")
        measured, *steps = times(
            folders, ROUNDS, TURN, Options(timeout=TIMEOUT),
            lambda done: log(f"round {done}/{ROUNDS}"), traces.extend,
            [True, *[False] * len(found)],
        )  # fmt: skip
    by_probe = medians(every_probe, probing, measured, traces[0])
    at_work = working(probing, measured, traces[0])
    calibration = fit_cluster(
        every_probe, probing, by_probe, initial_cluster(RANKS, MEMORY), at_work
    )
    log(f"fitted to the probes: {escape(str(calibration.cluster))}")
    seconds = [median(step["step"]) for step in steps]
    terms = [relative(compile(text, LAID_OUT).module)[0].terms for _, _, text in found]
    by_terms = fit_relative(terms[::EVERY], seconds[::EVERY])
    log(f"fitted to every third strategy: {by_terms}")
    out = [
        {
            "model": model, "strategy": strategy,
            "predicted_ms": report(c.module, calibration.cluster)[0].seconds * 1e3,
            "measured_ms": s * 1e3, "fitted": False,
            "relative_ms": t.cost(by_terms) * 1e3, "relative_fitted": i % EVERY == 0,
        }
        for i, ((model, strategy, _), c, s, t) in enumerate(
            zip(found, compiled, seconds, terms, strict=True)
        )
    ]  # fmt: skip
    for r in out:
        same = [o for o in out if o["model"] == r["model"]]
        for kind, by, but in (
            ("spearman", "predicted_ms", "fitted"),
            ("relative_spearman", "relative_ms", "relative_fitted"),
        ):
            r[kind] = rank_correlation(out, by, but)
            r[f"{kind}_model"] = rank_correlation(same, by, but)
    return out


def rank_correlation(records: list[dict[str, Any]], by: str, but: str) -> float:
    """Return Spearman's rank correlation of predicted and measured times, without the fitted
    ones."""
    from scipy.stats import spearmanr  # a second; tests need the programs of this file only

    counted = [r for r in records if not r[but]]
    found: Any = spearmanr([r[by] for r in counted], [r["measured_ms"] for r in counted])
    return float(found.statistic)
