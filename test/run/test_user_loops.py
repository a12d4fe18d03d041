"""The loops that docs/examples/loops has for users, equal to the same loops in plain torch."""

import ast
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from copy import deepcopy
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from loops import (
    accumulate,
    curriculum,
    distill,
    early_stop,
    elastic,
    ema,
    gan,
    lion,
    lora,
    muon,
    plain,
)
from support.extent import extent, long_form
from support.forked import run_ranks, started
from torch import nn, optim
from torch.nn.functional import cross_entropy
from torch.utils.data import DistributedSampler, TensorDataset

LOOPS = Path(plain.__file__).parent
RANK = Path(__file__).parent / "loop_rank.py"
SECONDS = 100
"""The longest wait."""


def equal(values: Any, expected: Any) -> None:
    """Check tensors, or trees of them, to a part in 1e10."""
    torch.testing.assert_close(values, expected, rtol=1e-10, atol=1e-12)


def states(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach() for name, value in module.state_dict().items()}


def stepped(optimizer: optim.Optimizer, loss: torch.Tensor) -> float:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def trained(model: nn.Module, optimizer: optim.Optimizer, batches: Iterable[Any]) -> list[float]:
    return [stepped(optimizer, cross_entropy(model(x), labels)) for x, labels in batches]


def test_plain() -> None:
    model, optimizer = plain.build()
    expected = []
    for i, tokens in enumerate(plain.batches(20, seed=1)):
        loss = stepped(optimizer, plain.loss(model, tokens))
        if i % 10 == 9:
            with torch.no_grad():
                valid = [plain.loss(model, x).item() for x in plain.batches(2, seed=2)]
                text = [0]
                for _ in range(5):
                    text.append(int(model(torch.tensor(text[-1])).argmax()))
            expected.append((loss, sum(valid) / 2, text))

    outputs = run_ranks(RANK, 4, [LOOPS / "plain.py", _port()], 100, compared=False)
    for rank, out in enumerate(outputs):
        lines = [x.split(maxsplit=5) for x in out.splitlines() if x.startswith(f"rank {rank}: ")]
        assert [words[2] for words in lines] == ["10", "20"], out
        for words, (loss, valid, text) in zip(lines, expected, strict=True):
            assert [float(x) for x in words[3:5]] == pytest.approx([loss, valid], rel=1e-10)
            assert words[5] == str(text)


def _port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def test_accumulate() -> None:
    losses, norms, values = accumulate.train()
    model, optimizer = accumulate.build()
    expected, expected_norms = [], []
    for i, (x, labels) in enumerate(accumulate.batches(len(losses))):
        loss = cross_entropy(model(x), labels)
        (loss / accumulate.PARTS).backward()
        expected.append(loss.item())
        if i % accumulate.PARTS == accumulate.PARTS - 1:
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            expected_norms.append(norm.item())
            optimizer.param_groups[0]["lr"] = 0.01 / (1 + i // accumulate.PARTS)
            optimizer.step()
            optimizer.zero_grad()
    equal([losses, norms, values], [expected, expected_norms, states(model)])


def test_gan() -> None:
    losses, values, samples = gan.train()
    model, of_maker, of_critic = gan.build()
    average, expected = deepcopy(model["maker"]), []
    for real, noise in gan.batches(len(losses) // 2):
        expected.append(stepped(of_critic, gan.critic_loss(model, real, noise)))
        expected.append(stepped(of_maker, gan.maker_loss(model, noise)))
        _average(average, model["maker"], gan.DECAY)
    equal([losses, values, samples], [expected, states(model), average(noise).detach()])


@torch.no_grad()
def _average(average: nn.Module, model: nn.Module, decay: float) -> None:
    for a, p in zip(average.parameters(), model.parameters(), strict=True):
        a.lerp_(p, 1 - decay)


def test_ema() -> None:
    losses, last, mean, values = ema.train()
    model, optimizer = ema.build()
    average, expected = deepcopy(model), []
    for x, labels in ema.batches(len(losses), seed=1):
        expected.append(stepped(optimizer, cross_entropy(model(x), labels)))
        _average(average, model, ema.DECAY)
    average.load_state_dict(dict(model.named_buffers()), strict=False)
    of_both = []
    with torch.no_grad():
        for module in (model.eval(), average.eval()):
            of_valid = [cross_entropy(module(x), y) for x, y in ema.batches(2, seed=2)]
            of_both.append(torch.stack(of_valid).mean().item())
    equal([losses, last, mean, values], [expected, *of_both, states(average)])


def test_distill() -> None:
    losses, values = distill.train()
    teacher, student = distill.build()
    models = nn.ModuleDict({"teacher": teacher, "student": student})
    optimizer = optim.AdamW(student.parameters(), lr=0.01)
    expected = [stepped(optimizer, distill.loss(models, *batch)[0]) for batch in distill.batches(5)]
    equal([losses, values], [expected, states(models)])


def test_lora() -> None:
    losses, outputs, merged = lora.train()
    model, optimizer = lora.build()
    expected = trained(model, optimizer, lora.batches(len(losses)))
    *_, (x, _) = lora.batches(len(losses))
    with torch.no_grad():
        equal([losses, outputs, merged(x)], [expected, model(x), model(x)])
    assert not any(isinstance(module, lora.Adapted) for module in merged.modules())


class Lion(optim.Optimizer):
    """Lion as its paper has it, on whole parameters."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for p in self.param_groups[0]["params"]:
            mean, gradient = self.state[p].setdefault("mean", torch.zeros_like(p)), p.grad
            direction = (0.9 * mean + 0.1 * gradient).sign()
            p.sub_(self.param_groups[0]["lr"] * (direction + 0.1 * p))
            mean.mul_(0.99).add_(gradient, alpha=0.01)


def test_lion() -> None:
    losses, values = lion.train()
    model = lion.build()
    optimizer, expected = Lion(model.parameters(), {}), []
    for i, (x, labels) in enumerate(lion.batches(len(losses))):
        optimizer.param_groups[0]["lr"] = 0.01 * (1 - i / len(losses))
        expected.append(stepped(optimizer, cross_entropy(model(x), labels)))
    equal([losses, values], [expected, states(model)])


class Muon(optim.Optimizer):
    """Nesterov's momentum; that of a matrix is orthogonalised."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                mean.mul_(0.9).add_(p.grad)
                x = p.grad + 0.9 * mean
                if p.dim() == 2:
                    x /= torch.linalg.matrix_norm(x)
                    for _ in range(5):
                        a = x @ x.mT
                        x = 3.4445 * x - 4.775 * a @ x + 2.0315 * a @ a @ x
                p.sub_(group["lr"] * x)


def test_muon() -> None:
    losses, values = muon.train()
    model = muon.build()
    matrices, vectors = ([p for p in model.parameters() if p.dim() == n] for n in (2, 1))
    groups: Any = [{"params": matrices, "lr": 0.05}, {"params": vectors, "lr": 0.01}]
    optimizer, expected = Muon(groups, {}), []
    scheduler = optim.lr_scheduler.CosineAnnealingLR(optimizer, len(losses))
    for batch in muon.batches(len(losses)):
        expected += trained(model, optimizer, [batch])
        scheduler.step()
    equal([losses, values], [expected, states(model)])


def test_curriculum() -> None:
    losses, values = curriculum.train()
    model, adam, sgd = curriculum.build()
    expected = []
    for i, (x, labels) in enumerate(curriculum.batches(len(losses))):
        if i < curriculum.WARM:
            expected.append(stepped(adam, curriculum.repeat(model, x)))
        else:
            expected.append(stepped(sgd, curriculum.classify(model, x, labels)))
            sgd.param_groups[0]["lr"] = sgd.param_groups[0]["lr"] * 0.8
    equal([losses, values], [expected, states(model)])


def test_early_stop(tmp_path: Path) -> None:
    history, best, values = early_stop.train(tmp_path)
    model, optimizer = early_stop.build()
    (x, labels), (valid_x, valid_labels) = early_stop.data(1), early_stop.data(2)
    expected, of_steps = [], []
    for _ in history:
        loss = stepped(optimizer, cross_entropy(model(x), labels))
        valid = cross_entropy(model(valid_x), valid_labels).item()
        expected.append((loss, valid))
        of_steps.append(deepcopy(states(model)))
    losses = [valid for _, valid in expected]
    assert best == losses.index(min(losses)) + 1 == len(history) - early_stop.PATIENCE
    equal([history, values], [expected, of_steps[best - 1]])
    assert [p.name for p in tmp_path.iterdir()] == [f"step-{best:08}"]


def wait_for(holds: Callable[[], bool]) -> None:
    """Wait until something holds. Fails after SECONDS."""
    end = time.monotonic() + SECONDS
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.02)


# ---- torchrun on two nodes ----

STEPS, KILLED = extent(14, 40), 8
"""An epoch has six steps: the ranks are killed in the second one, and end in the third."""


def check_steps(outputs: list[str]) -> None:
    """Check the losses of ranks that were killed and went on, step by step."""
    x, labels = elastic.rows()
    model, optimizer = elastic.build()
    expected = list[float]()
    while len(expected) < STEPS:
        epoch = len(expected) * elastic.BATCH // len(x)
        parts = [DistributedSampler(TensorDataset(x), 2, k, seed=2) for k in (0, 1)]
        for part in parts:
            part.set_epoch(epoch)
        for of_step in torch.tensor([list(part) for part in parts]).split(
            elastic.BATCH // 2, dim=1
        ):
            rows = of_step.flatten()
            expected += trained(model, optimizer, [(x[rows], labels[rows])])
    found = [re.findall(r"rank (\d), step (\d+): (\S+)", out) for out in outputs]
    lines = [(int(rank), int(step), float(loss)) for out in found for rank, step, loss in out]
    assert {(rank, step) for rank, step, _ in lines} == set(product(range(4), range(1, STEPS + 1)))
    for _, step, loss in lines:
        assert loss == pytest.approx(expected[step - 1], rel=1e-10), step


def test_elastic(tmp_path: Path) -> None:
    """All ranks are killed; others go on from the last checkpoint, with the batches after it."""
    arguments: list[Any] = [LOOPS / "elastic.py", _port(), tmp_path / "checkpoints", STEPS]
    logs = [tmp_path / f"{rank}.log" for rank in range(4)]
    ranks = list[Any]()
    for rank, log in enumerate(logs):
        with log.open("w") as file:
            ranks.append(started([RANK, *arguments, rank], {"STOPS_AT": f"step {KILLED}:"}, file))
    wait_for(lambda: f"step {KILLED}:" in logs[0].read_text())
    for rank in ranks:
        rank.kill()
    killed = [log.read_text() for log in logs]
    assert f"step {STEPS}:" not in "".join(killed)
    arguments[1] = _port()
    resumed = run_ranks(RANK, 4, arguments, SECONDS, compared=False)
    first = re.search(r"step (\d+):", resumed[0])
    assert first is not None and int(first[1]) >= KILLED
    check_steps([*killed, *resumed])


@long_form
@pytest.mark.parametrize("lost", ["a rank", "all ranks"])
def test_elastic_by_torchrun(lost: str, tmp_path: Path) -> None:
    """Two agents start all ranks again."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    logs = [tmp_path / f"{node}.log" for node in (0, 1)]
    port, agents = _port(), list[subprocess.Popen[bytes]]()
    with ExitStack() as stack:
        for log in logs:
            line = [
                sys.executable, "-m", "torch.distributed.run", "--nnodes=2",
                "--nproc-per-node=2", "--max-restarts=3",
                "--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{port}",
                LOOPS / "elastic.py", tmp_path / "checkpoints", str(STEPS),
            ]  # fmt: skip
            file = stack.enter_context(log.open("w"))
            agents.append(subprocess.Popen(line, env=environment, stdout=file, stderr=file))
            stack.callback(agents[-1].kill)
        wait_for(lambda: f"step {KILLED}:" in logs[0].read_text())
        ranks = [rank for agent in agents for rank in children_of(agent.pid)]
        assert len(ranks) == 4
        for rank in ranks if lost == "all ranks" else ranks[:1]:
            os.kill(rank, signal.SIGKILL)
        assert [agent.wait(SECONDS) for agent in agents] == [0, 0]
    check_steps([log.read_text() for log in logs])


def children_of(process: int) -> list[int]:
    """The processes that a process has started, and that run."""
    tasks = Path(f"/proc/{process}/task").glob("*/children")
    return [int(word) for task in tasks for word in task.read_text().split()]


# ---- a notebook ----


def cells() -> list[str]:
    """The code of the notebook's cells."""
    notebook = json.loads((LOOPS / "notebook.ipynb").read_text())
    return ["".join(c["source"]) for c in notebook["cells"] if c["cell_type"] == "code"]


def check_notebook(losses: list[float], names: dict[str, Any]) -> None:
    """Check the losses of the notebook, by the names of its first cells."""
    model, optimizer = names["build"]()
    for i, loss in enumerate(losses):
        if i == 40:
            optimizer.param_groups[0]["lr"] = 0.01
        equal([loss], trained(model, optimizer, [(names["x"], names["labels"])]))
    assert len(losses) == 60


def test_notebook() -> None:
    """Its cells, one after the other, in this process."""
    matplotlib = import_module("matplotlib")
    matplotlib.use("agg")
    names = dict[str, Any]()
    for cell in cells():
        exec(compile(cell, "notebook.ipynb", "exec"), names)
    check_notebook(names["losses"], names)
    assert names["share"] == 1.0


@long_form
def test_notebook_by_nbclient() -> None:
    """From start to picture, in a kernel."""
    nbclient = import_module("nbclient")
    notebook = import_module("nbformat").read(LOOPS / "notebook.ipynb", 4)
    last = '{"losses": losses}'
    notebook.cells.append(import_module("nbformat.v4").new_code_cell(last))
    nbclient.NotebookClient(notebook, timeout=SECONDS, kernel_name="python3").execute()
    outputs = [o for c in notebook.cells if c.cell_type == "code" for o in c.outputs]
    data = [o.data for o in outputs if "data" in o]
    assert any("<table>" in x.get("text/html", "") for x in data)
    assert any(x.get("image/png") for x in data)
    names = dict[str, Any]()
    for cell in cells()[:2]:
        exec(compile(cell.rpartition("\nprogram")[0] or cell, "notebook.ipynb", "exec"), names)
    check_notebook(ast.literal_eval(data[-1]["text/plain"])["losses"], names)


ENDS: dict[str, Callable[[Any], object]] = {
    "shut down": lambda kernel: kernel.shutdown_kernel(),
    "killed in its loop": lambda kernel: kernel.shutdown_kernel(now=True),
    "restarted in its loop": lambda kernel: kernel.restart_kernel(now=True),
}


@long_form
@pytest.mark.parametrize("end", ENDS)
def test_no_rank_outlives_a_kernel(end: str) -> None:
    manager = import_module("jupyter_client.manager")
    kernel, client = manager.start_new_kernel(kernel_name="python3")
    try:
        for cell in cells()[:4]:
            reply = client.execute_interactive(cell, timeout=SECONDS, output_hook=lambda _: None)
            assert reply["content"]["status"] == "ok"
        ranks = descendants(kernel.provisioner.pid)
        assert len([pid for pid in ranks if command_of(pid).startswith("rank ")]) == 4
        if "loop" in end:
            client.execute("while True: trainer.step(x, labels)")
            time.sleep(0.5)
        client.stop_channels()
        ENDS[end](kernel)
        wait_for(lambda: not any(command_of(pid) for pid in ranks))
    finally:
        kernel.shutdown_kernel(now=True)


def descendants(process: int) -> list[int]:
    children = children_of(process)
    return children + [pid for child in children for pid in descendants(child)]


def command_of(process: int) -> str:
    """The name of a process; "" of one that has ended."""
    try:
        name, _, state = Path(f"/proc/{process}/stat").read_text().rpartition(")")
    except OSError:
        return ""
    return "" if state.split()[0] in "ZX" else name.partition("(")[2]
