"""A training step in stages on 4 ranks: ours and torch.distributed.pipelining's.

Each program of ours runs in the same four processes as torch's schedules, in turns, so that the
ratios hold while the machine's speed drifts. Two models:

gpt       8 layers, 8 microbatches of one sample, AdamW. Ranks share the cores of the machine, so
          the work counts more than the waits. Every loss agrees with that of one process.
sleeping  stages that sleep: F, I and W NAP seconds for all stages of a rank together, with messages
          of the size of the GPT's. Cores do not count; the minimum possible time of a step is
          3 * 8 * NAP, without any wait. `bound` is the lower bound with these stages. They are
          equal but in `split`: there each sleeps for the layers, of LAYERS equal ones, that it has
          by the split that assign-stages searches for. torch's ZBV runs on these stages too.

Both run on Gloo and on shm, each in four processes of its own: ratios are within a backend.
`ratio` is that of our median to torch's with the same schedule; of `searched` and `split`, which
torch does not have, to its fastest. `cpu ratio` is that of the processor seconds of all ranks in
the same steps, which depends less on what else the machine does.
"""

import json
import statistics
import tempfile
from collections.abc import Callable, Sequence
from math import inf
from pathlib import Path
from typing import Any

import torch

import shardir
from bench import pipeline_models
from bench.started import run
from shardir.algebra.cluster import Cluster, Level
from shardir.algebra.mesh import Mesh
from shardir.algebra.schedules import (
    PipelineCosts,
    SearchedSchedule,
    lower_bound,
    schedule,
    search,
)
from shardir.search.stages.chunk_shares import searched_split
from shardir.search.stages.stage_costs import UnitCosts, costs_of_stages

RANKS, MICROBATCHES, NAP, ROUNDS, TIMEOUT = 4, pipeline_models.BATCH, 0.02, 9, 900
OVERHEAD, TRANSFER = 0.6e-3, 0.4e-3
"""The seconds beside the nap of a part, and of a message, that the search of a schedule reckons
with."""
LAYERS = 24
"""The layers of `sleeping`, of which `split` makes stages."""
SCHEDULES = {"1f1b": 1, "interleaved": 2, "zbv": 2}
"""Those that torch has too, with the stages of a rank."""
SEARCHED, SPLIT = "searched", "split"
NAMES = {"gpt": (*SCHEDULES, SEARCHED), "sleeping": (*SCHEDULES, SEARCHED, SPLIT)}
"""The rows of each model."""
BACKENDS: tuple[str, ...] = ("gloo", "shm")
SIZES = (512, 128, 2048, 8)
"""The width of the models, the tokens of a sample, the words of the vocabulary, and the layers of
the GPT."""
SMOKE = {
    "RANKS": 2, "NAP": 0.001, "ROUNDS": 1, "SIZES": (16, 4, 8, 4), "BACKENDS": ("gloo",),
    "NAMES": {"gpt": ("1f1b",), "sleeping": ()},
}  # fmt: skip


def _stages(name: str) -> tuple[str, int]:
    """The request of a schedule, and the stages of each rank."""
    chunks = SCHEDULES.get(name, 2)
    request = name if name in SCHEDULES else "zbv"
    return f"{request}, ranks = {RANKS}, chunks = {chunks}", chunks


def _naps(name: str) -> list[float]:
    """The seconds for which F, I and W of each stage sleep."""
    stages = RANKS * _stages(name)[1]
    if name != SPLIT:
        return [NAP * RANKS / stages] * stages
    nap = NAP * RANKS / LAYERS
    each = [nap] * LAYERS
    layers = UnitCosts([3 * nap] * LAYERS, [], [], [0] * LAYERS, [0] * (LAYERS + 1), each, each)
    mesh = Mesh("m", (("d", 1),), Cluster((Level("device", 1, 1e9, TRANSFER),)))
    smallest = schedule("v-min", RANKS, MICROBATCHES, 2)
    cuts = searched_split(layers, mesh, range(LAYERS + 1), smallest, inf).cuts
    assert cuts is not None
    return list(costs_of_stages(layers, mesh, cuts).forward)


def _costs(naps: Sequence[float], overhead: float, transfer: float) -> PipelineCosts:
    """The costs of stages that sleep: the first has no gradient of inputs, and both naps in W."""
    each = [nap + overhead for nap in naps]
    moved = (transfer,) * (len(each) - 1)
    return PipelineCosts(
        tuple(each), (0.0, *each[1:]), (naps[0] + each[0], *each[1:]), moved, tuple(naps),
        overhead=overhead,
    )  # fmt: skip


def _found(name: str) -> SearchedSchedule:
    """The schedule that is searched for."""
    return search(RANKS, MICROBATCHES, _costs(_naps(name), OVERHEAD, TRANSFER))


def _compiled(model: torch.nn.Module, name: str, folder: Path, **options: Any) -> Any:
    """A program of ours: with a named schedule, or one that is searched for."""
    if name not in SCHEDULES:
        file = folder / f"{name}.csv"
        file.write_text(_found(name).schedule.csv())
        options["pipeline"] = f'train{{schedule="{file}"}}'
    optimizer = pipeline_models.optimizer(list(model.parameters()))
    return shardir.compile(
        model, optimizer=optimizer, stages=_stages(name)[0],
        accumulate=f"tokens, microbatches = {MICROBATCHES}", **options,
    )  # fmt: skip


def _gpt(name: str, folder: Path) -> Path:
    x, y = pipeline_models.data()
    chunks = _stages(name)[1]
    each = pipeline_models.LAYERS // (RANKS * chunks)
    marks = "\n".join(
        f'values "layers.{i * each}.*" : stage = {i}' for i in range(1, RANKS * chunks)
    )
    (model,) = pipeline_models.gpt()
    program = _compiled(
        model, name, folder, inputs=x[:1], labels=y[:1], loss=pipeline_models.loss, plan=marks
    )
    batches = [(x[i : i + 1], y[i : i + 1]) for i in range(MICROBATCHES)]
    return program.save(folder / f"gpt-{name}", batches)


def _sleeping(name: str, folder: Path) -> Path:
    count = RANKS * _stages(name)[1]
    x = torch.zeros(1, pipeline_models.SEQ, pipeline_models.HIDDEN)
    marks = "\n".join(f'values "layers.{i}.*" : stage = {i}' for i in range(1, count))
    program = _compiled(
        pipeline_models.Slights(count), name, folder, inputs=x, loss=torch.mean, plan=marks
    )
    return program.save(folder / f"sleeping-{name}", [x] * MICROBATCHES)


MADE = {"gpt": _gpt, "sleeping": _sleeping}
"""The models, with what compiles each."""


def add_options(parser: Any) -> None:
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="steps of each variant")
    parser.add_argument("--backends", nargs="+", choices=BACKENDS, default=BACKENDS)
    parser.add_argument("--models", nargs="+", choices=list(MADE), default=list(MADE))


def records(
    log: Callable[[str], object], rounds: int, models: list[str], backends: Sequence[str]
) -> list[dict[str, Any]]:
    """One record per model, schedule and backend: median_ms of ours and of torch, their ratio, that
    of processor seconds, loss_error (relative, against one process), bound_ms."""
    pipeline_models.resize(*SIZES)
    found = []
    for model in models:
        for name in NAMES[model]:
            log(f"{model} {name}")
            with tempfile.TemporaryDirectory() as folder:
                found += _measured(model, name, Path(folder), rounds, backends)
    return found


def _measured(
    model: str, name: str, folder: Path, rounds: int, backends: Sequence[str]
) -> list[dict[str, Any]]:
    """The records of a program of ours, with all of torch's schedules: one start for each backend,
    one after the other."""
    given, out = folder / "programs.json", folder / "out.json"
    naps = _naps(name) if model == "sleeping" else None
    programs = {f"{model} {name}": (str(MADE[model](name, folder)), naps)}
    given.write_text(json.dumps(programs))
    found = []
    for backend in backends:
        words = [*map(str, (given, out, rounds, NAP, backend, *SIZES))]
        run("pipeline_step_rank.py", words, RANKS, TIMEOUT)
        found.append({"backend": backend} | _record(json.loads(out.read_text()), model, name))
    return found


def _record(found: dict[str, Any], model: str, name: str) -> dict[str, Any]:
    def median(key: str, of: str = "seconds") -> float:
        return 1e3 * statistics.median(found[key][of])

    ours, begin = f"{model} {name}", f"{model} torch {name if name in SCHEDULES else ''}"
    theirs = min((key for key in found if key.startswith(begin)), key=median)
    record = {
        "model": model, "schedule": name, "shardir ms": median(ours), "torch ms": median(theirs),
        "ratio": median(ours) / median(theirs),
        "cpu ratio": median(ours, "cpu") / median(theirs, "cpu"),
        "loss_error": found[ours]["loss_error"],
    }  # fmt: skip
    if model == "sleeping":
        if name in SCHEDULES:
            placement = schedule(name, RANKS, MICROBATCHES, SCHEDULES[name]).placement
        else:
            placement = _found(name).schedule.placement
        costs = _costs(_naps(name), 0.0, 0.0)
        record["bound ms"] = 1e3 * lower_bound(placement, MICROBATCHES, costs)
    return record
