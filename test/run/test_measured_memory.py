"""The predicted peak of a step is that of the bytes of living tensors on every rank: of models, by
plans, within budgets and in stages; and ZeRO's formula. The measured bytes are torch's."""

import json
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from support.extent import extent
from support.forked import run_ranks
from support.ranks import memory_rank
from support.ranks.memory_rank import RANKS, SECONDS
from torch import nn

import shardir
from shardir.api.compiled import Compiled
from shardir.cost.report import StagedCost
from shardir.syntax.parser import parse
from shardir.tools import bench

programs, models, plans = bench.load("programs"), bench.load("bytes"), bench.load("plans")

ALLOWED, OF_LAYERS = 0.02, 0.005
"""The relative difference; of equal layers, where all that is live is known, a smaller one."""

BUDGET = 0.9
"""Of recompute, relative to the peak without it."""

LIMIT = 0.5
"""Of a search, relative to the peak of the fastest plan."""

Sizes = tuple[int, int]
"""Of the mesh's axes dp and tp."""

LANGUAGE = {"layers": 2, "batch": 8, "seq": 32, "hidden": 64, "heads": 4, "vocab": 256}


class Tagger(nn.Module):
    """An LSTM between a table and a product."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(128, 16), nn.Linear(32, 16)
        self.lstm = nn.LSTM(16, 32)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(self.table(ids.T))[0]).permute(1, 2, 0)


def tagger(mesh: Sizes) -> str:
    """Return the text of a step of a Tagger on random values."""
    model = Tagger()
    ids, labels = torch.randint(128, (128, 6)), torch.randint(16, (128, 6))
    step = shardir.compile(
        model, ids, labels=labels, loss=nn.functional.cross_entropy,
        optimizer=torch.optim.AdamW(model.parameters()),
        mesh=f"dp = {mesh[0]}, tp = {mesh[1]}", pipeline="",
    )  # fmt: skip
    drawn = re.sub(r"#train.init<file[^>]*>", "#train.init<normal, std = 0.1>", step.text)
    return re.sub(r"#train.init<batches[^>]*>", "#train.init<integers, low = 0, high = 15>", drawn)


def recommender(batch: int, rows: int) -> Callable[[Sizes], str]:
    return lambda mesh: programs.dlrm(
        split="rows", devices=mesh[0] * mesh[1], batch=batch, tables=4, rows=rows, width=16,
        dense=8, bottom=(64,), top=(64,),
    )  # fmt: skip


MODELS: dict[str, Callable[[Sizes], str]] = {
    "gpt": lambda mesh: programs.gpt(**LANGUAGE, mesh=mesh, optimizer="adamw"),
    "bert": lambda mesh: programs.bert(**LANGUAGE, mesh=mesh),
    "mlp": lambda mesh: programs.mlp(batch=256, dim=64, hidden=256, mesh=mesh),
    "dlrm": recommender(1024, 50),
    "large tables": recommender(64, 500),
    "resnet": lambda mesh: models.resnet(
        blocks=(1, 1), width=8, batch=8, image=16, classes=16, dp=mesh[0], tp=mesh[1]
    ),
    "lstm": tagger,
}  # fmt: skip


@cache
def bare(model: str, mesh: Sizes = (2, 2)) -> str:
    """Return the text of a model without layouts."""
    return str(plans.bare(parse(MODELS[model](mesh))))


def by(plan: str) -> Callable[[str], Compiled]:
    """Return the compilation of a model by a preset on all axes."""

    def compiled(model: str) -> Compiled:
        axes = re.findall(r"(\w+) = \d", bare(model).partition(">")[0])
        return shardir.compile(bare(model), plan=" * ".join(f"{plan}({axis})" for axis in axes))

    return compiled


def megatron(model: str) -> Compiled:
    plan = "ddp(dp) * megatron(tp)" if "tp = 2" in bare(model) else "megatron(d)"
    return shardir.compile(bare(model), plan=plan)


def in_stages(model: str) -> Compiled:
    """Data parallel, in two stages of two ranks each."""
    clauses = " accumulate <mean, microbatches = 4> pipeline <1f1b, ranks = 2>\n}"
    text = bare(model, (2, 1)).rstrip().removesuffix("}").rstrip()
    return shardir.compile(text + clauses, mode="data")


def within_budget(model: str) -> Compiled:
    """As annotated, within 0.9 of the peak."""
    return shardir.compile(MODELS[model]((2, 2)), recompute=BUDGET)


def within_limit(offload: bool) -> Callable[[str], Compiled]:
    """Return the compilation by the search for layouts, and with them of ZeRO, together with
    recompute and copies to hosts, within a limit of memory."""

    def compiled(model: str) -> Compiled:
        peak = shardir.compile(bare(model), mode="auto").cost().memory.peak
        return shardir.compile(
            bare(model), mode="auto", recompute=int(LIMIT * peak), offload=offload
        )

    return compiled


PLANS = {
    "data": by("ddp"), "zero1": by("zero1"), "fsdp": by("fsdp"), "megatron": megatron,
    "stages": in_stages, "recompute": within_budget,
    "joint": within_limit(False), "joint, hosts": within_limit(True),
}  # fmt: skip
CASES = extent(
    [("mlp", "fsdp"), ("large tables", "stages")],
    [
        (m, p)
        for m in MODELS
        for p in PLANS
        if (p != "recompute" or m not in ("lstm", "large tables"))
        and (not p.startswith("joint") or m in ("gpt", "mlp"))
    ],
)
"""To compute a gate of an LSTM again takes as much memory as to keep it; large tables are not
computed."""

LAYERS, WIDTH = extent(12, 36), 64
PARAMETERS = LAYERS * WIDTH**2
BUCKET = 2 * WIDTH**2
"""The bytes of one layer in bf16."""

ALL = 2 * PARAMETERS
"""The bytes of the gradients of all layers in bf16."""

LEVELS = {
    0: ("ddp", 1 << 26, 16, 16, BUCKET),
    1: ('"w*" : [{d}], uses []\nddp', 1 << 26, 12 / 4 + 2, 12 / 4 + 2 + 2, ALL),
    2: ('"w*" : [{d}], uses []\nddp', BUCKET, 12 / 4 + 2, 12 / 4 + 2 + 2 / 4, BUCKET),
    3: ("fsdp", BUCKET, 12 / 4 + 2 / 4, 12 / 4 + 2 / 4 + 2 / 4, BUCKET),
}
"""By level of ZeRO (Rajbhandari et al., 2020): the plan, the maximum bytes of a bucket, the minimum
and maximum bytes for each parameter, and the bytes of the largest bucket. Of the maximum, 2 are of
weights in bf16, 2 of their gradients and 12 of f32 weights and AdamW's states; of the minimum, no
gradient is there with the weights that are not needed any more."""


def layers(level: int) -> Compiled:
    """Return equal layers, whose activations are small beside them, by a level of ZeRO on 4
    ranks."""
    x, w = f"tensor<8x{WIDTH}xf32>", f"tensor<{WIDTH}x{WIDTH}xf32>"
    init = "train.init = #train.init<normal, std = 0.1>"
    arguments = [f"%x: {x} {{train.input = #train.init<normal>}}"]
    body, last = list[str](), "%x"
    for i in range(LAYERS):
        arguments.append(f'%w{i}: {w} {{train.parameter = "w{i}", {init}}}')
        body += [f"  %h{i} = nn.matmul {last}, %w{i} : ({x}, {w}) -> {x}"]
        body += [f"  %a{i} = nn.tanh %h{i} : ({x}) -> {x}"]
        last = f"%a{i}"
    text = (
        f"dist.mesh @m <d = {RANKS}>\n"
        f"func.func private @loss({', '.join(arguments)}) -> tensor<f32> {{\n"
        + "\n".join(body)
        + f"\n  %loss = nn.reduce <mean> {last} dims <0, 1> : ({x}) -> tensor<f32>\n"
        "  func.return %loss : tensor<f32>\n}\ntrain.step @step of @loss <adamw, lr = 0.001>\n"
    )
    plan, bucket, *_ = LEVELS[level]
    pipeline = f"mixed-precision{{compute=bf16}},train{{max-bytes={bucket}}}"
    return shardir.compile(text, pipeline=pipeline, plan=plan)


def predicted(compiled: Compiled) -> list[tuple[int, int]]:
    """Return the peaks of each rank, on its device and on the host."""
    cost = compiled.cost()
    if isinstance(cost, StagedCost):
        each = RANKS // len(cost.memories)
        return [(use.peak, use.host) for use in cost.memories for _ in range(each)]
    return [(cost.memory.peak, cost.memory.host)] * RANKS


def test_the_predicted_peak_is_measured_on_every_rank(tmp_path: Path) -> None:
    compiled = {f"{model} {plan}": PLANS[plan](model) for model, plan in CASES}
    compiled |= {f"level {level}": layers(level) for level in extent([3], [*LEVELS])}
    for name, each in compiled.items():
        each.save(tmp_path / name)
    output = run_ranks(Path(memory_rank.__file__), RANKS, [tmp_path], SECONDS)
    assert (tmp_path / "found.json").exists(), output
    found = json.loads((tmp_path / "found.json").read_text())
    assert found.keys() == compiled.keys()
    for name, each in compiled.items():
        expected = predicted(each)
        allowed = OF_LAYERS if name.startswith("level") else ALLOWED
        for there, peaks in zip(found[name], expected, strict=True):
            for bytes_, peak in zip(there, peaks, strict=True):
                assert abs(bytes_ - peak) <= allowed * peak, (name, found[name], expected)
    measured = {name: [on_device for on_device, _ in there] for name, there in found.items()}
    for level in extent([3], [*LEVELS]):
        *_, low, high, bucket = LEVELS[level]
        for bytes_ in measured[f"level {level}"]:
            assert (1 - ALLOWED) * low * PARAMETERS <= bytes_, level
            assert bytes_ <= (1 + ALLOWED) * high * PARAMETERS + bucket, level
    for name in (name for name in measured if name.endswith("recompute")):
        peak = shardir.compile(MODELS[name.removesuffix(" recompute")]((2, 2))).cost().memory.peak
        assert max(measured[name]) <= (1 + ALLOWED) * BUDGET * peak, name
    for name in (name for name in measured if " joint" in name):
        peak = shardir.compile(bare(name.partition(" ")[0]), mode="auto").cost().memory.peak
        assert max(measured[name]) <= (1 + ALLOWED) * LIMIT * peak, name
