"""Runs on several nodes, here agents on one machine, and runs that are started again."""

import json
import os
import signal
import socket
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))
import sample
from extent import long_form
from forked import Forked, in_agents

pytest.importorskip("torch")

import shardir
from shardir.backend.interface import Options, Report, RunError
from shardir.backend.torch.launch import rendezvous
from shardir.tools import run as tool

AGENT = Path(__file__).parent / "node_agent.py"
TIMES = '{"last_call_timeout": 1, "keep_alive_interval": 1}'
STEPS = 8


def program(folder: Path, lines: str = "pass") -> Path:
    """The sample, whose step runs lines first; `calls` is the number of its calls."""
    body = ("global calls", "calls += 1", *lines.splitlines())
    text = sample.PROGRAM.replace("m1):\n", "m1):\n" + "".join(f"    {x}\n" for x in body), 1)
    head = "import os, signal, time\ncalls = 0\n"
    return sample.write(folder, head + text)


class Nodes:
    """The agents of a run; what they print."""

    def __init__(self, *words: Any):
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.rdzv = f"127.0.0.1:{free.getsockname()[1]}"
        self.words = [*map(str, words), "--timeout=60"]
        self.agents: dict[int, tuple[Forked, Any]] = {}

    def start(self, rank: int, nnodes: Any = 2, *words: Any) -> None:
        log = tempfile.TemporaryFile()  # noqa: SIM115 - read by `end`
        words = (*self.words, "--nnodes", nnodes, "--node-rank", rank, "--rdzv", self.rdzv, *words)
        env = {**os.environ, "TIMES": TIMES, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        self.agents[rank] = Forked([sys.executable, AGENT, *words], env, log), log

    def end(self) -> dict[int, tuple[int, str]]:
        """The exit code and the output of each agent."""
        found = {}
        try:
            for rank, (agent, log) in self.agents.items():
                code = agent.wait()
                log.seek(0)
                found[rank] = code, log.read().decode()
        finally:
            for agent, log in self.agents.values():
                agent.kill()
                log.close()
        return found

    def kill(self, rank: int) -> None:
        os.killpg(self.agents[rank][0].pid, signal.SIGKILL)


def errors(output: str) -> list[str]:
    return [line for line in output.splitlines() if line.startswith("error: ")]


def states(dump: Path) -> dict[str, Any]:
    with np.load(dump) as file:
        return {k: file[k] for k in file.files if not k.startswith("losses/")}


@pytest.fixture(scope="module")
def one_machine(tmp_path_factory: pytest.TempPathFactory) -> tuple[Report, dict[str, Any]]:
    """The run of all steps by the launcher of one machine."""
    from forked import SUBPROCESS

    from shardir.backend.torch.launch import ranks

    folder = tmp_path_factory.mktemp("one")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranks, "subprocess", SUBPROCESS)
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
    with pytest.raises(RunError, match="expected more than 2 --steps"):
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
    with pytest.raises(RunError, match="expected another one on each node, got 3 twice"):
        rendezvous.place(nodes(3, 0, 3), 0)
    wrong = [*nodes(0, 1), rendezvous.Peer(2, "p", "other")]
    with pytest.raises(RunError, match="got other options on node 2 than on node 0"):
        rendezvous.place(wrong, 0)
