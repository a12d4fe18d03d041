"""A step with collectives that overlap with computation, against one without, on 4 ranks.

Three models by three plans, lowered by `train` with `overlap-communication` and without it. Their
steps run in one start of 4 Gloo ranks, in turns, and each figure is the median of its turns;
`ratio` is with / without, measured and modelled, on the ready-made cluster `gloo`. Where no
collective is started both programs are the same, and the difference of their ratio from 1 is noise.
"""

import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from bench.plans import PLANS, without_overlap
from bench.programs import gpt, mlp, transformer
from shardir.api.compilation import compile
from shardir.backend.runs import Options
from shardir.backend.torch.launch.measure import times
from shardir.cost import report
from shardir.dialects.dist import is_started
from shardir.syntax.parser import parse

MESH = (2, 2)
MODELS: dict[str, Callable[[], str]] = {
    "gpt": lambda: gpt(layers=2, mesh=MESH),
    "mlp": lambda: mlp(mesh=MESH),
    "transformer": lambda: transformer(layers=2, mesh=MESH),
}
CHOSEN = ("annotated", "data", "zero-3")
ROUNDS, TURN, TIMEOUT = 7, 1.0, 300
SMOKE = {"ROUNDS": 1, "TURN": 0.0, "MODELS": {"mlp": lambda: mlp(hidden=16, mesh=MESH)}}


def records(log: Callable[[str], object]) -> list[dict[str, Any]]:
    """One record per model and plan: model, plan, started (number of collectives), without_ms,
    with_ms, ratio, predicted_ratio."""
    found = []
    for model, text in MODELS.items():
        for plan in CHOSEN:
            module = PLANS[plan](parse(text()))
            found.append(
                (model, plan, compile(module, without_overlap("train")), compile(module, "train"))
            )
    programs = [c for *_, without, beside in found for c in (without, beside)]
    with tempfile.TemporaryDirectory() as folder:
        folders = [c.save(Path(folder) / str(i)) for i, c in enumerate(programs)]
        log(f"{len(programs)} programs compiled")
        steps = times(
            folders, ROUNDS, TURN, Options(timeout=TIMEOUT),
            lambda done: log(f"round {done}/{ROUNDS}"),
        )  # fmt: skip
    measured = [median(step["step"]) * 1e3 for step in steps]
    out = []
    for i, (model, plan, without, beside) in enumerate(found):
        before, after = measured[2 * i : 2 * i + 2]
        predicted = [report(c.module)[0].seconds for c in (without, beside)]
        out.append({
            "model": model, "plan": plan,
            "started": sum(map(is_started, beside.module.walk())),
            "without_ms": before, "with_ms": after, "ratio": after / before,
            "predicted_ratio": predicted[1] / predicted[0],
        })  # fmt: skip
    return out
