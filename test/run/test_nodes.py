"""Runs on several nodes, here agents on one machine, and runs that are started again."""

import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.device import on_cpu
from support.extent import long_form
from support.forked import in_agents, server
from support.ranks import sample

pytest.importorskip("torch")

from support.ranks.nodes import Nodes, states

import shardir
from shardir.backend.runs import Options, Report, RunError
from shardir.backend.torch.launch import rendezvous
from shardir.backend.torch.launch.agent import digests
from shardir.backend.torch.launch.forks import share_forks
from shardir.backend.torch.launch.start import read_plan
from shardir.tools import run as tool

STEPS = 8


def program(folder: Path, lines: str = "pass") -> Path:
    """The sample, whose step runs lines first; `calls` is the number of its calls."""
    body = ("global calls", "calls += 1", *lines.splitlines())
    text = sample.PROGRAM.replace("m1):\n", "m1):\n" + "".join(f"    {x}\n" for x in body), 1)
    head = "import os, signal, time\ncalls = 0\n"
    return sample.write(folder, head + text)


def errors(output: str) -> list[str]:
    return [line for line in output.splitlines() if line.startswith("error: ")]


@pytest.fixture(scope="module")
def one_machine(tmp_path_factory: pytest.TempPathFactory) -> tuple[Report, dict[str, Any]]:
    """The run of all steps by the launcher of one machine."""
    folder = tmp_path_factory.mktemp("one")
    with share_forks(server()):
        dump = folder / "all.npz"
        report = shardir.run(program(folder / "program"), steps=STEPS, dump=dump, timeout=60)
    return report, states(dump)


KILLED = """
with open(f"{FOLDER}/{rt_mesh.rank}", "w") as file:
    file.write(os.environ["GROUP_RANK"] + os.environ["LOCAL_RANK"])
before = os.path.exists(f"{FOLDER}/killed")
if calls == 5 and rt_mesh.rank == 3 and not before:
    while not os.path.exists(f"{FOLDER}/ckpt/step-00000004"):
        time.sleep(0.01)
    open(f"{FOLDER}/killed", "w").close()
    os.kill(os.getpid(), 9)
""".strip()


@on_cpu("a command does not compute there unless it is told to")
def test_a_run_on_two_nodes_goes_on_after_a_rank_is_killed(one_machine, tmp_path):
    """Bit for bit it is the run on one machine. Node 1 comes first."""
    directory = program(tmp_path / "program", KILLED.replace("{FOLDER}", str(tmp_path)))
    dump, folder = tmp_path / "dump.npz", tmp_path / "ckpt"
    nodes = Nodes(directory, f"--steps={STEPS}", "--log-every=1", "--dump", dump,
                  "--log", tmp_path / "log", "--checkpoints", folder,
                  "--save-every=2", "--max-restarts=1")  # fmt: skip
    nodes.start(1)
    time.sleep(0.5)
    nodes.start(0)
    ended = nodes.end()
    (code, shown), (other, silent) = ended[0], ended[1]
    assert (code, other) == (0, 0), shown + silent
    assert (tmp_path / "killed").exists()
    assert {(tmp_path / str(k)).read_text() for k in range(4)} == {"00", "01", "10", "11"}
    assert [(tmp_path / str(k)).read_text()[0] for k in range(4)] == ["0", "0", "1", "1"]
    assert "started again: " in shown
    assert [shown.count(f"step: step {k}/8 ") for k in (1, 5)] == [1, 1], shown
    assert f"step: {STEPS} steps, final loss" in shown
    assert "loss" not in silent
    assert "4 ranks on gloo" in silent
    entries = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    losses = {entry["step"]: entry["loss"] for entry in entries if entry["event"] == "step"}
    assert [losses[k + 1] for k in range(STEPS)] == one_machine[0].losses["step"]
    found, expected = states(dump), one_machine[1]
    assert found.keys() == expected.keys()
    assert all(np.array_equal(found[k], x) for k, x in expected.items())


@long_form
def test_a_node_that_is_killed_ends_the_others(tmp_path):
    directory = program(tmp_path / "program", f"""
open("{tmp_path}/" + str(rt_mesh.rank), "w").close()
time.sleep(0.1)""".strip())  # fmt: skip
    nodes = Nodes(directory, "--steps=600")
    nodes.start(0)
    nodes.start(1)
    until = time.monotonic() + 60
    while not all((tmp_path / str(k)).exists() for k in range(4)) and time.monotonic() < until:
        time.sleep(0.05)
    nodes.kill(1)
    code, output = nodes.end()[0]
    assert code == 1
    assert errors(output) == [
        "error: another node has ended the run: the output of its shard-run says why"
    ], output


ELASTIC = """
dist.mesh @m <dp = 2, tp = 2>
func.func private @loss(
    %x: tensor<12x8xf32> {train.input = #train.init<normal>},
    %t: tensor<12x3xf32> {train.input = #train.init<normal>},
    %w1: tensor<8x6xf32, #dist.layout<@m, [{}, {tp}]>> {train.parameter = "w1", train.init = #train.init<normal, std = 0.5>},
    %w2: tensor<6x3xf32> {train.parameter = "w2", train.init = #train.init<normal, std = 0.5>},
    %key: tensor<i64> {train.state = "key", train.init = #train.init<integers, low = 0, high = 1000>}
) -> (tensor<f32>, tensor<i64> {train.updates = "key"}) {
  %h = nn.matmul %x, %w1 : (tensor<12x8xf32>, tensor<8x6xf32, #dist.layout<@m, [{}, {tp}]>>) -> tensor<12x6xf32>
  %a = nn.dropout %h, %key p 0.25 stream 1 : (tensor<12x6xf32>, tensor<i64>) -> tensor<12x6xf32>
  %y = nn.matmul %a, %w2 : (tensor<12x6xf32>, tensor<6x3xf32>) -> tensor<12x3xf32>
  %d = nn.sub %y, %t : (tensor<12x3xf32>, tensor<12x3xf32>) -> tensor<12x3xf32>
  %s = nn.mul %d, %d : (tensor<12x3xf32>, tensor<12x3xf32>) -> tensor<12x3xf32>
  %loss = nn.reduce <mean> %s dims <0, 1> : (tensor<12x3xf32>) -> tensor<f32>
  %one = nn.constant dense<1> : tensor<i64> -> tensor<i64>
  %next = nn.add %key, %one : (tensor<i64>, tensor<i64>) -> tensor<i64>
  func.return %loss, %next : tensor<f32>, tensor<i64>
}
train.step @step of @loss <adamw, lr = 0.05>
"""  # noqa: E501 - the text of a program


@pytest.fixture(scope="module")
def elastic(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shardir.compile(ELASTIC).save(tmp_path_factory.mktemp("elastic") / "program")


@long_form
def test_a_run_goes_on_with_the_machines_that_are_left(elastic, tmp_path):
    """One is killed with its ranks: the other one compiles the program for its two, which go on
    from the last checkpoint, with the losses of a run on both."""
    steps, folder = 30, tmp_path / "ckpt"
    expected = shardir.run(elastic, steps=steps, timeout=60)
    directory = tmp_path / "program"
    shutil.copytree(elastic, directory)
    text = (directory / "program.py").read_text()
    assert text.count("\n    # x: f32 ") == 1
    slow = "\n    __import__('time').sleep(0.1)"
    (directory / "program.py").write_text(text.replace("\n    # x: f32 ", f"{slow}\n    # x: f32 "))
    nodes = Nodes(directory, f"--steps={steps}", "--log", tmp_path / "log",
                  "--checkpoints", folder, "--save-every=2", "--max-restarts=1")  # fmt: skip
    nodes.start(0, "1:2")
    nodes.start(1, "1:2")
    until = time.monotonic() + 60
    while not (folder / "step-00000006").exists() and time.monotonic() < until:
        time.sleep(0.02)
    nodes.kill(1)
    code, shown = nodes.end()[0]
    assert code == 0, shown
    assert "started again: a rank or a machine is lost\ngoes on with 2 ranks" in shown
    assert "\n2 ranks on gloo" in shown
    entries = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert [e["ranks"] for e in entries if e["event"] == "start"] == [4, 2]
    losses = {entry["step"]: entry["loss"] for entry in entries if entry["event"] == "step"}
    found = [losses[k + 1] for k in range(steps)]
    np.testing.assert_allclose(found, expected.losses["step"], rtol=1e-5, atol=0)


@long_form
def test_a_machine_comes_back_to_those_that_are_left(elastic, tmp_path):
    """All go on from a checkpoint that is written then."""
    folder, log = tmp_path / "ckpt", tmp_path / "log"
    nodes = Nodes(elastic, "--steps=100000", "--log", log, "--checkpoints", folder,
                  "--save-every=50", "--keep=2", "--max-restarts=1")  # fmt: skip

    def entries(event: str) -> list[dict[str, Any]]:
        found = [json.loads(line) for line in log.read_text().splitlines(True) if line[-1] == "\n"]
        return [entry for entry in found if entry["event"] == event]

    def wait(is_there: Callable[[], Any]) -> None:
        until = time.monotonic() + 60
        while not is_there() and time.monotonic() < until:
            time.sleep(0.05)

    nodes.start(0, "1:2")
    wait(lambda: log.exists() and entries("step"))
    nodes.start(1, "1:2")
    wait(lambda: len(entries("start")) == 2)
    last = entries("step")[-1]["step"]
    wait(lambda: entries("step")[-1]["step"] > last + 50)
    os.kill(nodes.agents[0][0].pid, signal.SIGTERM)
    _, shown = nodes.end()[0]
    assert "started again: another machine takes part\ngoes on with 4 ranks" in shown
    assert [entry["ranks"] for entry in entries("start")] == [2, 4]
    losses = [entry["loss"] for entry in entries("step")]
    assert f"stopped after step {len(losses)}, with a checkpoint" in shown
    expected = shardir.run(elastic, steps=len(losses), timeout=60)
    np.testing.assert_allclose(losses, expected.losses["step"], rtol=1e-4, atol=0)


@pytest.mark.parametrize(
    ("old", "new", "words", "message"),
    [
        ("", "", ["--max-restarts=0"],
         "--nnodes 2:4: expected --max-restarts R and --checkpoints FOLDER, with which it goes on "
         "with fewer machines; else give --nnodes 4"),
        ("dp = 2", "dp = 3", ["--nnodes=5:6"],
         "--nnodes 5:6: the program cannot run on 5: expected a size of axis dp of @m <dp = 3, "
         "tp = 2> of which 5/6 is one too, got 3; use another mesh, or other numbers of machines"),
        ("", "", [],
         "--nnodes 2:4: the program cannot run on 3: expected a size of axis dp of @m <dp = 2, "
         "tp = 2> of which 3/4 is one too, got 2; use another mesh, or other numbers of machines"),
        ("// passes: ", "", [],
         "source.ir:1: expected `// passes: ` and passes; compile it anew"),
    ],
)  # fmt: skip
def test_machines_that_a_program_cannot_be_for(old, new, words, message, tmp_path, capsys):
    path = shardir.compile(ELASTIC.replace(old, new)).save(tmp_path / "program") / "source.ir"
    path.write_text(path.read_text().replace(old, new))
    given = ["--nnodes=2:4", "--rdzv=localhost:1", "--max-restarts=1", "--checkpoints=c",
             "--timeout=1", *words]  # fmt: skip
    assert tool.main([str(path.parent), *given]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert line.endswith(message)


def test_a_directory_without_its_source(tmp_path, capsys):
    given = ["--nnodes=2:4", "--rdzv=localhost:1", "--max-restarts=1", "--checkpoints=c"]
    assert tool.main([str(program(tmp_path / "program")), *given]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("source.ir, from which it is compiled again; compile it anew")


@long_form
def test_a_node_comes_back(one_machine, tmp_path):
    """One that was killed, without a word."""
    wait = f"""
if calls == 5 and not os.path.exists("{tmp_path}/killed"):
    open("{tmp_path}/" + str(rt_mesh.rank), "w").close()
    while not os.path.exists("{tmp_path}/killed"):
        time.sleep(0.05)""".strip()
    directory, dump = program(tmp_path / "program", wait), tmp_path / "dump.npz"
    nodes = Nodes(directory, f"--steps={STEPS}", "--dump", dump, "--max-restarts=1",
                  "--checkpoints", tmp_path / "ckpt", "--save-every=2")  # fmt: skip
    nodes.start(0)
    nodes.start(1)
    until = time.monotonic() + 60
    while not all((tmp_path / str(k)).exists() for k in range(4)) and time.monotonic() < until:
        time.sleep(0.05)
    nodes.kill(1)
    (tmp_path / "killed").touch()
    time.sleep(1)
    nodes.start(1)
    assert [code for code, _ in nodes.end().values()] == [0, 0]
    found, expected = states(dump), one_machine[1]
    assert all(np.array_equal(found[k], x) for k, x in expected.items())


@long_form
def test_a_signal_to_a_node_ends_all_after_a_checkpoint(one_machine, tmp_path):
    lines = f"""
open("{tmp_path}/" + str(rt_mesh.rank), "w").close()
time.sleep(0.1)""".strip()
    directory, folder = program(tmp_path / "program", lines), tmp_path / "ckpt"
    nodes = Nodes(directory, "--steps=600", "--checkpoints", folder, "--max-restarts=3")
    nodes.start(0)
    nodes.start(1)
    until = time.monotonic() + 60
    while not all((tmp_path / str(k)).exists() for k in range(4)) and time.monotonic() < until:
        time.sleep(0.05)
    os.kill(nodes.agents[1][0].pid, signal.SIGTERM)
    ended = nodes.end()
    assert [ended[k][0] for k in (0, 1)] == [0, 128 + signal.SIGTERM], ended
    (path,) = folder.iterdir()
    assert f"stopped after step {int(path.name[-8:])}, with a checkpoint" in ended[0][1]


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent runs here; its ranks are forked."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    for name, value in in_agents().items():
        monkeypatch.setattr(subprocess_handler, name, value)


@long_form
@pytest.mark.usefixtures("in_this_process")
def test_restarts_end_where_they_cannot_help(tmp_path):
    """A rank that fails each time is the error of the last start, with what it has printed. The
    losses of each step are reported once."""
    lines = f"""
open("{tmp_path}/" + str(rt_mesh.rank), "a").write("x")
if calls == 2 and rt_mesh.rank == 1:
    raise ValueError("no such luck")""".strip()
    directory, options = program(tmp_path / "program", lines), {"max_restarts": 2, "timeout": 60}
    with pytest.raises(RunError, match=r"(?s)^rank 1 failed: ValueError: no such luck\n  \| ") as e:
        shardir.run(directory, steps=STEPS, checkpoints=tmp_path / "ckpt", **options)
    assert "ValueError: no such luck" in str(e.value).splitlines()[-1]
    assert (tmp_path / "1").read_text() == "x" * 6


@pytest.mark.usefixtures("in_this_process")
def test_an_error_of_the_plan_is_not_tried_again(tmp_path):
    directory, events = program(tmp_path / "program"), []
    options: dict[str, Any] = {"checkpoints": tmp_path / "ckpt", "timeout": 60}
    shardir.run(directory, steps=2, **options)
    given = Options.of({"steps": 2, "max_restarts": 5, **options})
    with pytest.raises(RunError, match="--steps 2: expected more than 2"):
        shardir.backend.backend_of("torch").run(directory, given, on_event=events.append)
    assert "restart" not in [event["event"] for event in events]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--nnodes=3", "--rdzv=localhost:1"],
         "--nnodes: expected a divisor of 4, the ranks of mesh @m <dp = 2, tp = 2>, got 3"),
        (["--nnodes=2", "--node-rank=2", "--rdzv=localhost:1"],
         "--node-rank: expected 0 to 1, got 2"),
        (["--node-rank=1"], "--node-rank: expected 0 to 0, got 1"),
        (["--nnodes=2", "--rdzv=localhost:1", "--check"],
         "--check: expected one machine, got --nnodes 2"),
        (["--nnodes=2"], "--nnodes: expected --rdzv HOST:PORT, an address of machine 0"),
        (["--max-restarts=1"], "--max-restarts: expected --checkpoints FOLDER"),
        (["--max-restarts=1", "--checkpoints=a", "--resume=b"],
         "--max-restarts: expected no --resume, or that of a, from which it goes on, got b"),
        (["--nnodes=2", "--rdzv=no.such.host.invalid:1"],
         "--rdzv no.such.host.invalid:1: cannot reach no.such.host.invalid: "),
        (["--nnodes=2", "--rdzv=localhost:1", "--node-rank=1", "--timeout=1"],
         "found no rendezvous at localhost:1 within 1 s: start node 0 there"),
    ],
)  # fmt: skip
def test_nodes_that_cannot_be(words, message, tmp_path, capsys):
    assert tool.main([str(program(tmp_path / "program")), *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {message}")


def test_nodes_are_in_the_order_of_their_ranks():
    def nodes(*ranks: int) -> list[rendezvous.Peer]:
        return [rendezvous.Peer(rank, "p", "o") for rank in ranks]

    assert [rendezvous.place(nodes(3, 0, 5), k) for k in range(3)] == [1, 0, 2]
    with pytest.raises(RunError, match="expected distinct ranks, got 3 twice"):
        rendezvous.place(nodes(3, 0, 3), 0)
    wrong = [*nodes(0, 1), rendezvous.Peer(2, "p", "other")]
    with pytest.raises(RunError, match="got different options on node 2 and node 0"):
        rendezvous.place(wrong, 0)


def test_nodes_know_each_other_by_all_that_they_run(tmp_path):
    """Of a program, what ranks read of it; of options all but the paths of files."""
    directory = program(tmp_path)
    plan, options = read_plan(directory), Options(steps=3, dump=tmp_path / "a.npz")
    same = digests(plan, options)
    assert digests(plan, replace(options, dump=tmp_path / "b.npz")) == same
    assert digests(plan, replace(options, steps=4))[0] == same[0]
    assert digests(plan, replace(options, steps=4))[1] != same[1]
    for name in ("program.py", "plan.json"):
        text = (directory / name).read_bytes()
        (directory / name).write_bytes(text + b"\n")
        assert digests(plan, options)[0] != same[0], name
        (directory / name).write_bytes(text)
    assert digests(plan, options) == same
