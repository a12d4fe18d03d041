"""Recompute: seconds against bytes of a GPT's training step, by policies and within budgets.

For each budget, a part of the peak without recompute: the set of `choose-recompute`, and those of
torch's solvers for `activation_memory_budget` (greedy, dp and ilp, of
torch._functorch._activation_checkpointing.knapsack) for the bytes and seconds of the same values.
These keep to a sum of bytes that are kept, not to a peak; they get the largest sum for which the
peak is within the budget. All are simulated by the same time model and memory. `optimum` is that of
a mixed-integer program (recompute_milp.py) for HiGHS, on programs that are small enough.

The programs of ours and of the policies also run on 4 Gloo ranks, in turns: the peak of the bytes
of tensors, the step's time, and whether losses and parameters are equal bit by bit.
"""

import json
import statistics
import tempfile
from argparse import ArgumentParser
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torch._functorch._activation_checkpointing import knapsack

from bench.programs import gpt, mlp
from bench.recompute_milp import optimum
from bench.started import run
from shardir.api.compilation import compile
from shardir.cost.functions import functions
from shardir.cost.report import cost_of_function
from shardir.search.recompute.activations import Activations
from shardir.search.recompute.repetition_choice import choose
from shardir.search.recompute.repetition_policies import StepBlocks, is_product
from shardir.search.recompute.repetitions import Repetitions, Simulator

RANKS, MESH, ROUNDS, LIMIT, TIMEOUT = 4, (2, 2), 11, 60.0, 900

LOWERED = (
    "inline-calls,propagate-strategies,insert-redistributions,distributed-autodiff,recompute,"
    "lower-to-spmd,simplify-communication"
)

GPT: dict[str, Any] = {
    "layers": 4, "batch": 16, "seq": 128, "hidden": 256, "heads": 4, "vocab": 512,
}  # fmt: skip
SMALL: dict[str, Callable[[], str]] = {
    "mlp, 4 layers": lambda: mlp(layers=4, batch=256, dim=64, hidden=256, mesh=MESH),
    "gpt, 1 layer": lambda: gpt(mesh=MESH, **(GPT | {"layers": 1})),
}
"""Programs for which HiGHS is tried."""

PARTS = (0.9, 0.8, 0.7, 0.6, 0.5, 0.45)
"""The budgets, as parts of the peak without recompute."""

SOLVERS = {
    "torch, greedy": knapsack.greedy_knapsack,
    "torch, dp": knapsack.dp_knapsack_sliding_hirschberg,
    "torch, ilp": knapsack.ilp_knapsack,
}

CAPACITIES = 64
"""The sums of bytes that are tried for torch's solvers."""

TOGETHER = (1, 2, 3, 4)

SMOKE = {
    "ROUNDS": 1, "LIMIT": 0.5, "CAPACITIES": 2, "PARTS": (0.9,),
    "RANKS": 2, "MESH": (1, 2),
    "GPT": {"layers": 1, "batch": 4, "seq": 16, "hidden": 16, "heads": 4, "vocab": 32},
    "SMALL": {"mlp": lambda: mlp(layers=2, batch=8, dim=8, hidden=8, mesh=MESH)},
}  # fmt: skip


def add_options(parser: ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="the steps of each program")
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds of HiGHS for a program")


def computes(op: Any) -> bool:
    return not op.name.startswith("dist.")


class Step:
    """A training step before the passes that fuse and start collectives."""

    def __init__(self, text: str, repeats: Callable[[Any], bool] = computes):
        ((f, mesh),) = functions(compile(text, LOWERED).module)
        self.simulator = Simulator(Activations(f, mesh, repeats))
        self.blocks = StepBlocks(self.simulator)
        self.base = cost_of_function(f, mesh).seconds
        self.peak = self.simulator.run(()).peak

    def ours(self, limit: int) -> tuple[Repetitions, float]:
        starts = [self.blocks.full(k) for k in TOGETHER]
        found = choose(self.simulator, limit, starts, self.blocks.groups())
        return found.found, found.bound

    def knapsack(self, solver: Callable[..., Any], limit: int) -> Repetitions | None:
        """The fastest set of a solver of torch whose peak is within the limit."""
        groups = self.simulator.groups
        sizes = {n: sum(a.bytes for a in groups[n].activations) for n in self.simulator.needed}
        items = [n for n, size in sizes.items() if size]
        total = sum(sizes.values())
        memory, seconds = [sizes[n] / total for n in items], [groups[n].seconds for n in items]
        found = list[Repetitions]()
        for k in range(CAPACITIES + 1):
            _, _, again = solver(memory, seconds, k / CAPACITIES)
            repetitions = self.simulator.run([items[i] for i in again])
            if repetitions.peak <= limit:
                found.append(repetitions)
        return min(found, key=lambda r: r.seconds, default=None)


def records(
    log: Callable[[str], object], rounds: int = 11, limit: float = 60.0
) -> list[dict[str, Any]]:
    """One record per program and budget: `seconds` of repetitions, and their part of the step;
    `bound`, a lower bound on it; `predicted`, the peak, and `measured`, that of the rank that has
    most, as parts of the peak without recompute; `ratio`, the median of the ratios of a step's
    time to that without recompute; `equal`, whether all results are equal bit by bit."""
    found = [*_simulated(log, limit)]
    measured = _measured(log, rounds)
    return found + measured


def _simulated(log: Callable[[str], object], limit: float) -> Iterator[dict[str, Any]]:
    texts = {"gpt, 4 layers": lambda: gpt(mesh=MESH, **GPT), **SMALL}
    for name, text in texts.items():
        step = Step(text())
        for solver, part, r, bound in _sets(step, limit if name in SMALL else 0.0):
            yield {
                "program": name, "solver": solver, "budget": part,
                "recomputed": None if r is None else r.seconds / step.base,
                "bound": None if bound is None else bound / step.base,
                "predicted": None if r is None else r.peak / step.peak,
            }  # fmt: skip
        log(f"{name}: {len(step.simulator.needed)} groups, {step.peak} B")


Found = tuple[str, float | None, Repetitions | None, float | None]
"""A solver, a budget, what it repeats, and its bound."""


def _sets(step: Step, limit: float) -> Iterator[Found]:
    """Yield what each solver repeats; HiGHS within seconds, if there are any."""
    simulator = step.simulator
    dots = [n for n in simulator.needed if not any(map(is_product, simulator.groups[n].ops))]
    yield "full", None, simulator.run(step.blocks.full()), None
    yield "dots", None, simulator.run(dots), None
    for part in PARTS:
        bytes_ = int(part * step.peak)
        ours, bound = step.ours(bytes_)
        within = ours if ours.peak <= bytes_ else None
        yield "shardir", part, within, None if within is None else bound
        for solver, solve in SOLVERS.items():
            yield solver, part, step.knapsack(solve, bytes_), None
        if limit:
            best = optimum(simulator, bytes_, limit)
            found = None if best.groups is None else simulator.run(best.groups)
            yield "optimum", part, found, best.bound


def _measured(log: Callable[[str], object], rounds: int) -> list[dict[str, Any]]:
    text = gpt(mesh=MESH, **GPT)
    wanted: list[str | float] = ["", "full", "dots", *PARTS]
    with tempfile.TemporaryDirectory() as folder:
        peaks = dict[str, int]()
        for i, recompute in enumerate(wanted):
            compiled = compile(text, name="gpt.ir", recompute=recompute)
            compiled.save(Path(folder) / f"{i} {recompute}".strip())
            peaks[f"{i} {recompute}".strip()] = compiled.cost().memory.peak
        log(f"{len(wanted)} programs compiled")
        out = Path(folder) / "records.json"
        run("recompute_rank.py", [folder, str(out), str(rounds)], RANKS, TIMEOUT)
        found = json.loads(out.read_text())
    names = [*peaks]
    base, peak, most = found[names[0]]["seconds"], peaks[names[0]], found[names[0]]["peak"]
    return [
        {
            "program": "gpt, on ranks", "solver": str(recompute or "nothing"),
            "predicted": peaks[name] / peak, "measured": found[name]["peak"] / most,
            "bytes": peaks[name], "measured_bytes": found[name]["peak"],
            "ratio": statistics.median(
                a / b for a, b in zip(found[name]["seconds"], base, strict=True)
            ),
            "equal": found[name]["equal"],
        }
        for name, recompute in zip(names, wanted, strict=True)
    ]  # fmt: skip
