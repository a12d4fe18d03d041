"""Steps in stages on real ranks: as one device, by torch."""

import json
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.device import on_cpu
from support.extent import LONG, extent, long_form
from torch import nn
from xdsl.dialects.func import CallOp, FuncOp

import shardir
from shardir.algebra.schedules import schedule
from shardir.analysis.functions import mesh_of
from shardir.backend.runs import Options
from shardir.backend.torch.launch.report import Progress, run_and_check
from shardir.backend.torch.launch.start import read_plan
from shardir.cost.stages import microbatches_held
from shardir.dialects import train

FAST = (
    "levels [node = 2 {bandwidth = 1e12, latency = 1e-9}], memory = 1000000000 {bandwidth = 1e9}, "
    "flops {f64 = 1e8}"
)
"""A cluster on which a search splits tensors of any size."""

SLOW = (
    "levels [node = 4 {bandwidth = 1e6, latency = 1e-6}], memory = 1000000000 {bandwidth = 1e9}, "
    "flops {f64 = 1e8}"
)
"""A cluster on which it is faster to send the results of a layer than to split it."""

VOCABULARY, WIDTH, LENGTH, BATCH, MICROBATCHES = 24, 16, 8, 4, 4
STEPS = extent(3, 5)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.qkv(self.norm(x)).split(WIDTH, -1)
        q, k, v = (y.unflatten(-1, (4, -1)).transpose(1, 2) for y in parts)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(nn.functional.gelu(y.transpose(1, 2).flatten(2)))


class Gpt(nn.Module):
    """A GPT whose embedding is the head too, and is added to what the head reads."""

    def __init__(self, layers: int, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.norm, self.dropout = nn.LayerNorm(WIDTH), dropout

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        embedded = self.embedding(tokens)
        x = embedded + self.positions(torch.arange(LENGTH))
        for block in self.blocks:
            x = nn.functional.dropout(block(x), self.dropout, self.training)
        return self.norm(x + embedded) @ self.embedding.weight.T


def _loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _model(layers: int, dropout: float = 0.0) -> nn.Module:
    return Gpt(layers, dropout).double()


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4)


def _compiled(model: nn.Module, **options: Any) -> Any:
    tokens = torch.zeros(BATCH, LENGTH, dtype=torch.long)
    options.setdefault("accumulate", f"tokens, microbatches = {MICROBATCHES}")
    return shardir.compile(
        model, tokens, labels=tokens, loss=_loss, optimizer=_optimizer(model),
        clip="norm, max = 1.0", **options,
    )  # fmt: skip


def _batches(steps: int = STEPS) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Microbatches with other numbers of labels that count, in one none."""
    random = torch.Generator().manual_seed(1)
    shape = (BATCH, LENGTH)
    found = [(torch.randint(VOCABULARY, shape, generator=random),
              torch.randint(VOCABULARY, shape, generator=random))
             for _ in range(steps * MICROBATCHES)]  # fmt: skip
    for k, (_, labels) in enumerate(found):
        labels.view(-1)[k % MICROBATCHES * BATCH * LENGTH // (MICROBATCHES - 1) :] = -100
    return found


def _trained(
    program: Any, folder: Path, first: int = 0, **options: Any
) -> tuple[list[float], dict[str, Any]]:
    dump, batches = folder / "dump.npz", iter(_batches()[first * MICROBATCHES :])
    report = program.run(batches, steps=STEPS, dump=dump, timeout=60, **options)
    with np.load(dump) as found:
        return report.losses["step"], {n: found[n] for n in found if n.startswith("states/")}


def _by_torch(model: nn.Module) -> tuple[torch.optim.Optimizer, list[float]]:
    optimizer, losses, batches = _optimizer(model), [], _batches()
    for step in range(STEPS):
        optimizer.zero_grad()
        x, y = map(torch.cat, zip(*batches[step * MICROBATCHES :][:MICROBATCHES], strict=True))
        loss = _loss(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return optimizer, losses


CASES = [
    (2, "1f1b, ranks = 2", {"mesh": "dp = 2", "plan": 'values "blocks.1.*" : stage = 1\nfsdp'}),
    (4, "zbv, ranks = 2, chunks = 2", {"mesh": "tp = 2", "plan": "megatron(tp)"}),
    (2, "search", {"cluster": SLOW, "devices": 4}),
    (2, "1f1b, ranks = 2", {"mesh": "d = 2", "mode": "auto", "cluster": FAST}),
    *((layers, "1f1b, ranks = 4", {}) for layers in (4, 8)),
    *((layers, "1f1b, ranks = 2", {"mesh": "tp = 2", "plan": "megatron(tp)"}) for layers in (4, 8)),
    *((layers, "1f1b, ranks = 2", {"mesh": "dp = 2", "plan": "ddp"}) for layers in (4, 8)),
    (4, "1f1b, ranks = 2", {"mesh": "dp = 2, tp = 2", "plan": "megatron(tp) * fsdp(dp)"}),
    (8, "1f1b, ranks = 2", {"mesh": "dp = 2, tp = 2", "plan": "megatron(tp) * zero1(dp)"}),
    (8, "1f1b, ranks = 8", {}),
    (4, "1f1b, ranks = 4", {"mesh": "dp = 2", "plan": "zero1"}),
    (4, "interleaved, ranks = 2, chunks = 2", {"mesh": "tp = 2", "plan": "megatron(tp)"}),
    (8, "interleaved, ranks = 4, chunks = 2", {}),
    (8, "interleaved, ranks = 4, chunks = 2", {"mesh": "dp = 2", "plan": "ddp"}),
    (8, "looped-bfs, ranks = 2, chunks = 4", {"mesh": "dp = 2", "plan": "ddp"}),
    (4, "gpipe, ranks = 2", {"mesh": "dp = 2, tp = 2", "plan": "megatron(tp) * fsdp(dp)"}),
    (4, "eager-1f1b, ranks = 4", {}),
    (4, "zb-h1, ranks = 2", {"mesh": "tp = 2", "plan": "megatron(tp)"}),
    (4, "zb-h2, ranks = 4", {}),
    (4, "interleaved-zb, ranks = 2, chunks = 2", {"mesh": "dp = 2", "plan": "fsdp"}),
    (8, "zbv, ranks = 4, chunks = 2", {}),
    (8, "zbv, ranks = 4, chunks = 2", {"mesh": "tp = 2", "plan": "megatron(tp)"}),
    (8, "zbv, ranks = 2, chunks = 2", {"mesh": "dp = 2, tp = 2", "plan": "megatron(tp) * ddp(dp)"}),
    (4, "v-half, ranks = 2, chunks = 2", {"mesh": "dp = 2", "plan": "ddp"}),
    (8, "v-min, ranks = 4, chunks = 2", {}),
    (4, "dualpipev, ranks = 2, chunks = 2", {"mesh": "dp = 2", "plan": "zero1"}),
    (4, "search, ranks = 2, chunks = 2", {"mesh": "d = 2", "mode": "auto", "cluster": FAST}),
    (4, "search, ranks = 4", {"mesh": "dp = 2", "plan": "fsdp"}),
    (4, "zb-h1, ranks = 2", {"mesh": "dp = 2", "plan": "zero2"}),
    (4, "interleaved, ranks = 2, chunks = 2", {"mesh": "dp = 2", "plan": "zero3"}),
    (4, "1f1b, ranks = 2", {"mesh": "tp = 2", "plan": "megatron+sequence(tp)"}),
    (4, "zbv, ranks = 2, chunks = 2", {"loss_scale": "static, factor = 1024.0"}),
    (4, "1f1b, ranks = 4", {"loss_scale": "dynamic, initial = 1024.0, interval = 2"}),
    (4, "zbv, ranks = 2, chunks = 2", {"recompute": 0.8}),
    (4, "1f1b, ranks = 2", {"recompute": 0.8}),
]
"""The last ones have parts of gradients, and of parameters, on each rank; split sequences; scaled
losses; and less memory, for which values are recomputed."""


@pytest.fixture(scope="module")
def first() -> Any:
    """The program of the first case."""
    layers, pipeline, options = CASES[0]
    return _compiled(_model(layers), stages=pipeline, **options)


@pytest.mark.parametrize(("layers", "pipeline", "options"), extent(CASES[:1], CASES))
def test_stages_are_one_device(
    layers: int, pipeline: str, options: dict[str, Any], first: Any, tmp_path: Path
) -> None:
    """The averages of AdamW are those of all gradients."""
    model = _model(layers)
    is_first = (layers, pipeline, options) == CASES[0]
    program = first if is_first else _compiled(model, stages=pipeline, **options)
    program.reset()
    losses, states = _trained(program, tmp_path)
    optimizer, expected = _by_torch(model)
    np.testing.assert_allclose(losses, expected, rtol=1e-9)
    for name, w in model.named_parameters():
        np.testing.assert_allclose(states[f"states/{name}"], w.detach(), rtol=0, atol=1e-9)
        average = optimizer.state[w]["exp_avg"]
        np.testing.assert_allclose(states[f"states/{name}.exp_avg"], average, rtol=0, atol=1e-9)
    if LONG:
        plan = read_plan(program.save(tmp_path / "out"), None)
        progress = Progress("", STEPS, STEPS, StringIO())
        _, differences = run_and_check(plan, Options(steps=STEPS, timeout=120), progress)
        assert all(d.agrees for d in differences) and differences


class Layers(nn.Module):
    """A table and products."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, VOCABULARY)
        self.blocks = nn.ModuleList(nn.Linear(VOCABULARY, VOCABULARY) for _ in range(4))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x).tanh()
        return x


def test_a_plan_says_of_which_stage_a_block_is() -> None:
    """Without it, stages have as many blocks each."""
    plan = 'values "blocks.1*" : stage = 1'
    program = _compiled(Layers(), stages="1f1b, ranks = 2", plan=plan)
    parts = {f.sym_name.data: f for f in program.module.body.ops if isinstance(f, FuncOp)}
    for stage, blocks in ((0, "0"), (1, "123")):
        names = {x.name_hint or "" for x in parts[f"step_forward_{stage}"].args}
        assert {name.split(".")[1] for name in names if name.startswith("blocks")} == {*blocks}
    again = _compiled(Layers(), stages="1f1b, ranks = 2", plan=program.plan)
    assert again.text == program.text


def _mixed(name: str, ranks: int, microbatches: int, folder: Path) -> str:
    """The pipeline of a named schedule with B in place of I and W of every other microbatch."""
    chunks = 2 if name == "zbv" else 1
    orders = "\n".join(
        ",".join(
            str(a._replace(kind="B")) if a.kind == "I" and (a.microbatch or 0) % 2 else str(a)
            for a in order if a.kind != "W" or (a.microbatch or 0) % 2 == 0
        )
        for order in schedule(name, ranks, microbatches, chunks).orders
    )  # fmt: skip
    file = folder / "mixed.csv"
    file.write_text(orders)
    return f'train{{schedule="{file}"}}'


PIPELINES = [
    "1f1b, ranks = 2", "zbv, ranks = 2, chunks = 2", "interleaved, ranks = 2, chunks = 2",
]  # fmt: skip


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A program with dropout whose backward part is one function for some microbatches, and two for
    others."""
    order = _mixed("zbv", 2, MICROBATCHES, tmp_path_factory.mktemp("order"))
    return _compiled(_model(4, 0.2), stages=PIPELINES[1], pipeline=order)


@pytest.mark.parametrize("pipeline", extent(["mixed"], ["mixed", *PIPELINES]))
def test_random_values_do_not_depend_on_stages(pipeline: str, mixed: Any, tmp_path: Path) -> None:
    """The key of dropout passes from microbatch to microbatch, and from stage to stage."""
    model = partial(_model, 2 if pipeline == PIPELINES[0] else 4, 0.2)
    mixed.reset()
    staged = mixed if pipeline == "mixed" else _compiled(model(), stages=pipeline)
    found = [
        _trained(program, tmp_path) for program in (staged, _compiled(model(), mode="stand_alone"))
    ]
    np.testing.assert_allclose(found[0][0], found[1][0], rtol=1e-12)
    for name, w in found[1][1].items():
        np.testing.assert_allclose(found[0][1][name], w, rtol=0, atol=1e-12)


@long_form
@pytest.mark.parametrize("pipeline", PIPELINES)
def test_half_precision_and_metrics_do_not_depend_on_stages(pipeline: str, tmp_path: Path) -> None:
    """Products in bf16 are the same on each stage, and the norm of all gradients is a sum over the
    stages."""
    options = {"pipeline": "mixed-precision{compute=bf16},train", "metrics": "gradient_norm"}
    reports, losses = [], []
    layers = 4 if "chunks" in pipeline else 2
    for staged in ({"stages": pipeline}, {"mesh": "d = 1"}):
        program = _compiled(_model(layers).float(), **options, **staged)
        assert "bf16" in program.text
        reports.append(program.run(iter(_batches()), steps=STEPS, timeout=60))
    for report in reports:
        losses.append([*report.losses["step"], *report.metrics["step"]["gradient_norm"]])
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)


def test_a_run_goes_on_with_other_stages(first: Any, tmp_path: Path) -> None:
    """The tied embedding is on the first and the last stage."""
    program, checkpoints = first, tmp_path / "checkpoints"
    program.reset()
    program.run(_batches(), steps=2, checkpoints=checkpoints, save_every=2)
    model = _model(CASES[0][0])
    optimizer, losses = _by_torch(model)
    states = {f"states/{name}": w.detach() for name, w in model.named_parameters()}
    for name, w in model.named_parameters():
        states[f"states/{name}.exp_avg"] = optimizer.state[w]["exp_avg"]
    others = [{"mesh": "dp = 2"}, {"stages": "1f1b, ranks = 4"}]
    for options in extent(others[:1], others):
        program = _compiled(_model(CASES[0][0]), **options)
        after = _trained(program, tmp_path, first=2, resume=checkpoints)
        np.testing.assert_allclose(after[0], losses[2:], rtol=1e-9)
        for name, w in states.items():
            np.testing.assert_allclose(after[1][name], w, rtol=0, atol=1e-9)


LINES = [
    ("zbv, ranks = 2, chunks = 2", {}),
    ("1f1b, ranks = 2", {"mesh": "dp = 2", "plan": "fsdp"}),
]


@on_cpu("a product there has not the same bits each time")
@pytest.mark.parametrize(("pipeline", "options"), extent(LINES[:1], LINES))
def test_straight_line_form_computes_what_the_table_does(
    pipeline: str, options: dict[str, Any], mixed: Any, tmp_path: Path
) -> None:
    """With a state that passes from microbatch to microbatch, a tied embedding, and a value that
    passes over stages. The ranks do the same in the same order: all bits are equal."""
    program = mixed if pipeline == PIPELINES[1] else _compiled(
        _model(4, 0.2), stages=pipeline, **options
    )  # fmt: skip
    program.reset()
    found: list[dict[str, Any]] = []
    for form in (False, True):
        dump = tmp_path / f"{form}.npz"
        out = program.save(tmp_path / "out", _batches(), straight_line=form)
        assert ("stages.Pipeline(" in (out / "program.py").read_text()) is not form
        shardir.run(out, steps=STEPS, dump=dump, timeout=60)
        with np.load(dump) as arrays:
            found.append({name: arrays[name] for name in arrays})
    assert found[0].keys() == found[1].keys()
    for name, x in found[0].items():
        np.testing.assert_array_equal(x, found[1][name], name)


HELD = """

import json
import weakref

_alive, _most, _received = {}, {}, set()


def _call(run, part, values, _call=_StepRun._call):
    for name, tensors in _alive.items():
        held = {id(x()) for x in tensors.values() if x() is not None}  # a sum is one of all
        _most[name] = max(_most.get(name, 0), len(held))
    return _call(run, part, values)


def _run_in_loop(run, action, _run_in_loop=_StepRun._run_in_loop):
    part, k = action.part, action.microbatch
    def function(mesh, *args):
        for name, x in zip(part.inputs, args):
            if name in _received:
                _alive.setdefault(name, {})[k] = weakref.ref(x)
        made = part.function(mesh, *args)
        for name, x in zip(part.outputs, [made] if isinstance(made, Tensor) else made):
            _alive.setdefault(name, {})[k] = weakref.ref(x)
        return made
    _run_in_loop(run, action._replace(part=part._replace(function=function)))


def _run_events(run, events, _run_events=_StepRun._run_events):
    _run_events(run, events)
    for message, transfer in run.transfers.items():
        if message.target == run.rank:
            name, k = message.value
            _received.add(name)
            _alive.setdefault(name, {})[k] = weakref.ref(transfer.x)


def _run(run, _run=_StepRun.run):
    found = _run(run)
    with open(f"{__file__}.{run.rank}", "w") as file:
        json.dump(_most, file)
    _alive.clear()
    return found


_StepRun._call, _StepRun._run_in_loop = _call, _run_in_loop
_StepRun._run_events, _StepRun.run = _run_events, _run
"""
"""Counts the tensors of each value that are alive while a function runs."""


def _by_the_model(program: Any) -> list[tuple[dict[str, int], set[str]]]:
    """Return of how many microbatches each rank holds a value at most, by the model of memory, and
    the names of the values that it makes itself."""
    step = next(f for f in program.module.body.ops if train.schedule_of(f) is not None)
    mesh = mesh_of(step, program.module)
    assert mesh is not None
    found: list[tuple[dict[str, int], set[str]]] = []
    runs = train.StepRuns(step)
    for rank, held in enumerate(microbatches_held(step, mesh)):
        found.append(({}, set()))
        for v, count in held.items():  # several values may have one name in the source
            name = (v.name_hint or "").replace(".", "_")
            found[-1][0][name] = max(found[-1][0].get(name, 0), count)
            if isinstance(v.owner, CallOp) and runs.rank(v.owner) == rank:
                found[-1][1].add(name)
    return found


HOLDS = [
    ("1f1b", 8, [3, 2, 1]), ("zb-h1", 8, [3, 3, 3]), ("gpipe", 4, [4, 4, 4]),
    ("mixed zb-h1", 8, [3, 3, 2]),
]  # fmt: skip


PIPELINE = "shardir_runtime/stages/pipeline.py"


@pytest.mark.parametrize(("name", "microbatches", "expected"), extent(HOLDS[:1], HOLDS))
def test_a_rank_holds_as_many_microbatches_as_its_schedule_says(
    name: str, microbatches: int, expected: list[int], tmp_path: Path
) -> None:
    """In 1F1B those between its forward and its backward part, which are as many as stages follow;
    in ZB-H1 those before the gradients of weights. Sends are part of it: what a rank has sent is
    there until a gradient comes back, and gradients until a message proves that they have arrived.
    The receive of what a rank reads next is posted before: that of a microbatch more.
    """
    accumulate = f"tokens, microbatches = {microbatches}"
    mixed = {"pipeline": _mixed("zb-h1", 3, microbatches, tmp_path)} if "mixed" in name else {}
    stages = f"{name.removeprefix('mixed ')}, ranks = 3"
    program = _compiled(_model(3), stages=stages, accumulate=accumulate, **mixed)
    out = program.save(tmp_path / "out")
    with (out / PIPELINE).open("a") as file:
        file.write(HELD)
    shardir.run(out, steps=2)
    for rank, (modelled, own) in enumerate(_by_the_model(program)):
        measured = json.loads((out / f"{PIPELINE}.{rank}").read_text())
        both = {name: (n, measured[name]) for name, n in modelled.items() if name in measured}
        assert all(n == other for n, other in both.values()), both
        kept = max(n for name, (n, _) in both.items() if name in own and not name.startswith("d_"))
        assert kept == expected[rank], (rank, both)
        assert max(measured.values()) <= max(expected)
