"""What a run says: its line, its messages in Python, the rank that the others wait for."""

import argparse
import json
import struct
from dataclasses import fields
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardir
from shardir.backend.runs import LaunchError, Options, RunError, python_words
from shardir.backend.torch.launch.positions import MIN_SAMPLES, WaitSamples
from shardir.backend.torch.launch.report import LineRates, Progress
from shardir.backend.torch.shardir_runtime.collectives.position import BEGUN, COMPLETED, RECORD
from shardir.cost.clusters import load
from shardir.tools.run import parser

EVENT = {
    "event": "steps", "function": "step", "first": 1, "losses": [2.5, 2.25], "seconds": 0.5,
    "memory": 3 << 20, "rates": {"steps": 4.0, "samples": 128.0}, "metrics": {"share": [0.5, 0.75]},
    "share": 0.125, "waits": {"rank": 2, "share": 0.7},
}  # fmt: skip
LINE = ("step: step 2/42  loss 2.25  share 0.75  4 steps/s  128 samples/s  12.50% of peak  3 MiB  "
        "70% wait for rank 2")  # fmt: skip


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True


def test_a_line_stays_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "150")
    monkeypatch.setenv("TERM", "xterm")
    out = Terminal()
    with Progress("", 42, out=out).shown() as progress:
        progress(EVENT)
    # Ten seconds are left for forty steps at four a second.
    assert f"0:10 left {LINE}" in out.getvalue()
    out = StringIO()
    with Progress("", 42, 2, out).shown() as progress:
        progress(EVENT)
    assert out.getvalue().splitlines()[1] == LINE


def test_rates_are_of_the_time_since_the_last_line() -> None:
    """Five steps of 0.1 s, then ten of 0.2 s: a line every five steps, as reports come at 5 and 15;
    the run then starts again from step 11, where steps take 0.1 s."""
    rates = LineRates(0)
    for first, count, seconds, took in ((1, 5, 0.5, 0.1), (6, 10, 2.5, 0.2), (11, 5, 0.5, 0.1)):
        of_step = {"steps": 1 / took, "samples": 8 / took}
        rates.add({"first": first, "losses": [1.0] * count, "seconds": seconds, "rates": of_step})
        for step in range(first + 4, first + count, 5):
            assert rates.until(step) == pytest.approx(of_step)
    rates = LineRates(0)
    for first, seconds in ((1, 0.5), (6, 2.5)):  # one line for steps of 0.1 s and of 0.4 s
        reported = {"steps": 5 / 2.0, "samples": 40 / 2.0}
        rates.add({"first": first, "losses": [1.0] * 5, "seconds": seconds, "rates": reported})
    assert rates.until(10) == pytest.approx({"steps": 4.0, "samples": 32.0})


def test_lines_of_one_of_several_runs_have_one_title() -> None:
    out = StringIO()
    with Progress("one device", 42, 1, out).shown() as progress:
        progress(EVENT)
    title, *lines = out.getvalue().splitlines()
    assert title == "one device:" and len(lines) == 2 and lines[1] == LINE


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.last = nn.Embedding(10, 16), nn.Linear(16, 4)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.last(self.table(tokens).mean(1))


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(1)
    return torch.randint(10, (8, 5), generator=g), torch.arange(8) % 4


@pytest.fixture(scope="module")
def shared_program() -> Any:
    model, (tokens, labels) = Classifier(), batch()
    return shardir.compile(model, tokens, labels=labels, loss=nn.functional.cross_entropy,
                           optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
                           mesh="dp = 2", plan="ddp(dp)")  # fmt: skip


@pytest.fixture
def program(shared_program: Any) -> Any:
    shared_program.reset()
    return shared_program


def test_a_run_from_python_shows_its_lines_on_stderr(program: Any, capfd: Any) -> None:
    program.run(steps=4, log_every=2)
    shown = capfd.readouterr()
    assert [line.split("  ")[0] for line in shown.err.splitlines()] == [
        "step: step 1/4", "step: step 2/4", "step: step 4/4",
    ]  # fmt: skip
    report = program.run(steps=2, check=True, verbose=False)
    assert str(report.checks[0]).endswith("agree")
    assert capfd.readouterr() == ("", "")


def test_an_index_names_its_input_row_and_line(program: Any) -> None:
    tokens, labels = batch()
    labels[6] = 4
    with pytest.raises(RunError) as error:
        program.run([batch(), (tokens, labels)], steps=2, verbose=False)
    first = str(error.value).splitlines()[0]
    assert "labels: expected 0 to 3, got 4 in row 6 of the batch of step 2" in first
    assert "(test_reports.py:" in first
    tokens[5, 3] = -1
    with program.ranks() as trainer, pytest.raises(RunError) as error:
        trainer.step(tokens, batch()[1])
    first = str(error.value).splitlines()[0]
    source = Path(__file__).read_text().splitlines()
    number = 1 + next(i for i, text in enumerate(source) if "self.table(tokens)" in text)
    assert "tokens: expected 0 to 9, got -1 in row 5 of the batch of step 1 at" in first
    assert f"(test_reports.py:{number})" in first


@pytest.mark.parametrize(
    ("of_commands", "of_python"),
    [
        ("use a lower rate, or --allow-nan", "use a lower rate, or allow_nan=True"),
        ("--device cpu: expected --backend gloo or shm",
         'device="cpu": expected backend="gloo" or shm'),
        ("(--resume /tmp/x), or move it", '(resume="/tmp/x"), or move it'),
        ("give the same --data and --last, or", "give the same data= and last=, or"),
        ("expected --seed 0, with which", "expected seed=0, with which"),
        ("--last wrap: no rows; give --mode=auto", 'last="wrap": no rows; give mode="auto"'),
        ("torchrun --nproc-per-node 4 --steps", "torchrun --nproc-per-node 4 steps="),
        ("a - b -- c", "a - b -- c"),
        ("2 ranks, for mesh @m <dp = 2>, got 4", '2 ranks, for mesh="dp = 2", got 4'),
    ],
)  # fmt: skip
def test_messages_have_the_words_of_python(of_commands: str, of_python: str) -> None:
    assert python_words(of_commands) == of_python


def test_errors_of_python_calls_name_no_flags(program: Any, tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r'^device="cuda": expected backend="gloo" or nccl'):
        program.run(backend="shm", device="cuda")
    with pytest.raises(LaunchError, match=r"check=True: expected files of data=, or .*batches"):
        program.run([batch()], check=True)
    program.run(steps=2, checkpoints=tmp_path, verbose=False)
    with pytest.raises(RunError, match=r"^steps=2: expected more than 2, which .*step-00000002"):
        program.run(steps=2, resume=tmp_path, verbose=False)
    with (
        program.ranks(seed=1) as trainer,
        pytest.raises(shardir.ShardirError, match="expected seed=0, with which it was made, got 1"),
    ):
        trainer.load(tmp_path)


IN_PYTHON = {
    "program": "shardir.run(program), CompiledModel.run", "nproc": "ranks(count)",
    "export": "save_weights", "max_shard_size": "save_weights(max_shard_size=)",
    "pass_pipeline": "compile(pipeline=)", "mode": "compile", "plan": "compile",
    "save_strategies": "compile", "arena": "compile", "import": "Python's import",
    "hosts": "commands of several machines", "slurm": "commands of several machines",
    "start": "commands of several machines", "version": "shardir.__version__", "help": "help()",
    "color": "NO_COLOR and FORCE_COLOR",
}  # fmt: skip
"""Arguments of shard-run that are no options of a run, and their places in Python."""

OF_PYTHON = {"callback", "verbose", "parameters", "python"}


def test_commands_and_python_have_the_same_options() -> None:
    actions = parser()._actions
    flags = {action.dest for action in actions if not isinstance(action, argparse._HelpAction)}
    options = {f.name for f in fields(Options)}
    assert options - flags == OF_PYTHON
    assert flags - options == IN_PYTHON.keys() - {"help"}
    documented = shardir.api.compiled.Compiled.run.__doc__ or ""
    assert not [name for name in options if f"{name}: " not in documented]
    assert "--" not in documented


def test_the_share_of_peak_is_that_of_the_products(tmp_path: Path) -> None:
    model, x = nn.Linear(64, 128, bias=False), torch.randn(32, 64)
    program = shardir.compile(model, x, loss=lambda y: y.square().mean(), mesh="dp = 2",
                              optimizer="sgd, lr = 0.1", cluster="h200")  # fmt: skip
    plan = json.loads((program.save(tmp_path / "out") / "plan.json").read_text())
    of_products = 2 * 2 * (16 * 64 * 128)  # of a rank: forward, and the gradient of the weight
    found = plan["functions"]["step"]["at_peak"] * dict(load("h200").flops)["f32"]
    assert of_products < found < 1.1 * of_products


def record(begun: int, completed: int) -> bytes:
    words = [0] * (RECORD // 8)
    words[0], words[BEGUN], words[COMPLETED] = 1, begun, completed
    return struct.pack(f"{len(words)}Q", *words)


def test_samples_tell_the_rank_that_the_others_wait_for() -> None:
    samples = WaitSamples(2)  # of two stages
    at_work, waiting, late, done = record(7, 7), record(8, 7), record(7, 7), record(8, 8)
    for _ in range(MIN_SAMPLES):
        samples.add([at_work, at_work, late, waiting])
        samples.add([waiting, waiting, waiting, waiting])
    assert samples.most() == (2, 0.5)
    samples.add([bytes(RECORD)] * 4)  # no rank trains yet
    assert samples.count == 2 * MIN_SAMPLES
    for _ in range(4 * MIN_SAMPLES):  # read while the ranks move on
        samples.add([late, done, at_work, at_work])
    assert samples.most() is None


def test_a_slow_rank_is_named(program: Any, tmp_path: Path) -> None:
    path = program.save(tmp_path / "out") / "program.py"
    head, _, rest = path.read_text().partition("def step(")
    signature, _, body = rest.partition("):\n")
    slow = "    if mesh.rank == 1:\n        import time\n\n        time.sleep(0.04)\n"
    path.write_text(f"{head}def step({signature}):\n{slow}{body}")
    report = shardir.run(path.parent, steps=80, verbose=False)
    assert report.waits is not None
    assert report.waits.rank == 1
    assert "of the time for rank 1" in repr(report)
