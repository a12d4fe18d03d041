"""shard-run on real ranks: its results, and its exit after errors of ranks and plans."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from support.extent import extent, long_form
from support.forked import started
from support.ranks import sample
from support.ranks.orders import batch_rows

pytest.importorskip("torch")

from shardir.backend.runs import Options, RunError
from shardir.backend.torch.launch import report
from shardir.backend.torch.launch import start as launch
from shardir.backend.torch.launch.start import read_plan
from shardir.dialects.random import fill
from shardir.tools import run as tool

ENVIRONMENT = {**os.environ, "TORCH_DISTRIBUTED_DEBUG": "DETAIL"}


@pytest.fixture
def debugged(monkeypatch):
    """torch compares the collectives of the ranks."""
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")


def in_numpy(directory, steps, seed):
    """Return losses, states and predictions of the same training in numpy."""
    x_all, t_all = np.load(directory / "data/x.npy"), np.load(directory / "data/t.npy")
    states = {
        key: fill("normal", sample.NORMAL, shape, None, f"{seed}/{key}", np.float64)
        for key, shape in [("w1", (8, 9)), ("w2", (9, 3))]
    }
    w1, w2, m1, losses = states["w1"], states["w2"], 0.0, []
    for step in range(steps):
        rows = batch_rows(40, step, 15, seed)
        x, t = x_all[rows].astype(np.float64), t_all[rows]
        h = x @ w1
        d = np.maximum(h, 0) @ w2 - t
        losses.append((d * d).sum() / 45)
        dy = d * (2 / 45)
        m1 = 0.5 * m1 + x.T @ ((dy @ w2.T) * (h > 0))
        w1, w2 = w1 - 0.1 * m1, w2 - 0.1 * np.maximum(h, 0).T @ dy
    return losses, {"w1": w1, "w2": w2, "w1.momentum": m1}, np.maximum(x_all[:32] @ w1, 0) @ w2


@pytest.mark.usefixtures("debugged")
def test_training_equals_numpy_and_one_device(tmp_path, capsys):
    directory, dump = sample.write(tmp_path / "dir"), tmp_path / "all.npz"
    options = ["--nproc=4", "--steps=30", "--seed=3", "--log-every=10", "--timeout=60"]
    assert tool.main([str(directory), "--check", f"--dump={dump}", *options]) == 0
    out = capsys.readouterr().out
    assert "step: step 20/30  loss " in out
    assert "one device:\nstep: step 1/30  loss " in out
    assert "4 ranks on gloo" in out
    assert "check: step's losses in the first 20 steps" in out
    assert out.count(": agree") == 4
    losses, states, predicted = in_numpy(directory, 30, 3)
    with np.load(dump) as got:
        np.testing.assert_allclose(got["losses/step"], losses, rtol=1e-4)
        for key, state in states.items():
            np.testing.assert_allclose(got[f"states/{key}"], state, rtol=1e-3, atol=1e-5)
        first = predicted[:16]  # of two batches; of a scalar it is their mean
        np.testing.assert_allclose(got["results/predict/0"], first, rtol=1e-3, atol=1e-5)
        total = predicted.sum() / 2
        np.testing.assert_allclose(got["results/predict/1"], total, rtol=1e-3)


@long_form
def test_torchrun_starts_it_too(tmp_path):
    mesh = {"name": "m", "axes": [["dp", 2], ["tp", 1]]}
    directory = sample.write(tmp_path / "dir", mesh=mesh)
    path = directory / "program.py"
    named = r"\1    print(open('/proc/self/comm').read())\n"
    text, count = re.subn(r"(def step\(.*\):\n)", named, path.read_text())
    assert count == 1
    path.write_text(text)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    ran = subprocess.run(
        [*torchrun, path, "--steps", "5"],
        env={**os.environ, "TORCH_DISTRIBUTED_DEBUG": "DETAIL"},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    losses, _, _ = in_numpy(directory, 5, 0)
    (last,) = re.findall(r"step: step 5, loss (\S+)", ran.stdout)
    assert float(last) == pytest.approx(losses[-1], rel=1e-4)
    assert "predict: y = f32 [16, 3]" in ran.stdout
    if sys.platform == "linux":
        assert {"rank 0", "rank 1"} <= {*ran.stdout.splitlines()}


def test_nothing_of_a_program_runs_after_its_end(tmp_path, monkeypatch):
    """The interpreter is not finalized: a thread of a process group that outlives it would abort
    the process."""
    monkeypatch.setenv("PIDS", str(tmp_path))
    monkeypatch.setenv("ERROR", "")
    end = """\
    try:
        rt.main({"step": step})
    finally:
        open(os.environ["PIDS"] + "/after", "w").close()
"""
    program = sample.COUNTDOWN.replace('    rt.main({"step": step})\n', end)
    assert "/after" in program
    directory = sample.write(tmp_path / "dir", program, **sample.countdown_plan())
    assert len(launch.run(directory, Options(steps=4, timeout=60)).losses["step"]) == 4
    assert not (tmp_path / "after").exists()


def test_alone_it_reports_how_many_ranks_it_needs(tmp_path):
    program = sample.write(tmp_path / "dir") / "program.py"
    with (tmp_path / "out").open("w") as out:
        assert started([program], os.environ, out).wait() == 2
    text = (tmp_path / "out").read_text()
    assert "expected 4 ranks (mesh @m <dp = 2, tp = 2>), got 1" in text
    assert "Traceback" not in text


@pytest.mark.usefixtures("debugged")
def test_an_ir_file_is_compiled_and_run(capsys):
    path = Path(__file__).parents[2] / "docs/examples/digits.ir"
    assert tool.main([str(path), "--check", "--steps", "20", "--timeout", "60"]) == 0
    out = capsys.readouterr().out
    assert "4 ranks on gloo" in out
    assert out.count(": agree") == 2


def test_errors_of_an_ir_file_have_their_locations(tmp_path, capsys):
    path = tmp_path / "bad.ir"
    path.write_text("func.func @f(%x: tensor<2xf32>) {\n  %y = nn.ex %x : tensor<2xf32>\n}\n")
    assert tool.main([str(path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"{path}:2:")
    assert "error:" in error
    path.write_bytes(b"\xff\xfe")
    assert tool.main([str(path)]) == 2
    assert "expected UTF-8 text" in capsys.readouterr().err


def test_a_disagreement_is_an_error(tmp_path, capsys):
    """A mesh of one rank needs no process group; here its `single` has another momentum."""
    one = json.loads(json.dumps(sample.plan()).replace('["dp", 2], ["tp", 2]', '["dp", 1]'))
    one["groups"] = []
    for function in one["functions"].values():
        for v in function["args"] + function["results"]:
            v.update(dims=[[] for _ in v["dims"]], **({"partial": None} if "partial" in v else {}))
    program = sample.SINGLE.replace(", single=True", "").replace("0.5 * m1", "0.51 * m1")
    directory = sample.write(tmp_path / "dir", program, **one)
    assert tool.main([str(directory), "--check", "--steps", "10", "--timeout", "60"]) == 1
    out = capsys.readouterr().out
    assert "DISAGREE" in out
    assert "1 rank on gloo" in out


# ---- ranks that fail -------------------------------------------------------------------------


def pids(folder):
    return [int((folder / str(rank)).read_text()) for rank in range(2)]


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until_gone(folder, seconds):
    until = time.time() + seconds
    while any(map(alive, pids(folder))):
        assert time.time() < until, "a rank is still alive"
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("error", "timeout", "message"),
    [
        ("kill", 60, "rank 1 was killed by SIGKILL"),
        ("raise", 60, "rank 1 failed: ValueError: no such luck"),
        ("exit", 60, "rank 1 ended with exit code 7 before the end of the run"),
        ("leave", 60, "rank 1 ended with exit code 0 before the end of the run"),
        ("stop", 3, "rank 1 is stopped: the others waited for it for 3 s"),
        ("hang", 3, "rank 1 is alive but does not answer"),
    ],
)
def test_a_failing_rank_ends_the_run(tmp_path, monkeypatch, error, timeout, message):
    directory = sample.write(tmp_path / "dir", sample.COUNTDOWN, **sample.countdown_plan())
    monkeypatch.setenv("PIDS", str(tmp_path))
    monkeypatch.setenv("ERROR", error)
    with pytest.raises(RunError) as caught:
        launch.run(directory, Options(steps=10, timeout=timeout))
    ended = time.time()
    assert not any(map(alive, pids(tmp_path)))
    assert str(caught.value).startswith(message), caught.value
    if timeout == 60:  # nothing waits for it
        assert ended - float((tmp_path / "ready1").read_text()) < timeout
    if error == "raise":
        assert "program.py" in str(caught.value)  # the location in the program


@pytest.mark.started_ranks
@pytest.mark.parametrize(("number", "code", "program"), [
    (signal.SIGKILL, -9, sample.COUNTDOWN),
    *extent([], [(signal.SIGINT, 130, sample.IDLE), (signal.SIGTERM, 143, sample.IDLE)]),
])  # fmt: skip
def test_no_rank_outlives_the_launcher(tmp_path, number, code, program):
    """A launcher that is killed cannot end its ranks: the runtime of the program asks for it."""
    directory = sample.write(tmp_path / "dir", program, **sample.countdown_plan())
    # A shell's background job ignores SIGINT, and so do its children.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        process = subprocess.Popen(
            [sys.executable, tool.__file__, directory, "--steps", "10000"],
            env={**os.environ, "PIDS": str(tmp_path), "ERROR": ""},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
    finally:
        signal.signal(signal.SIGINT, before)
    until = time.time() + 40
    while len(list(tmp_path.glob("ready*"))) < 2:
        assert process.poll() is None, process.communicate()[0]
        assert time.time() < until
        time.sleep(0.05)
    process.send_signal(number)
    out, _ = process.communicate(timeout=40)
    assert process.returncode == code
    assert "Traceback" not in out
    wait_until_gone(tmp_path, 5)


# ---- the comparison --------------------------------------------------------------------------


def test_comparison(tmp_path):
    plan = read_plan(sample.write(tmp_path / "dir"))
    curve = np.linspace(2, 1, 30)
    late = np.where(np.arange(30) < 20, curve, 7)  # after the steps that are compared

    def losses(ours, theirs):
        return report.compare(plan, {"losses/step": ours}, {"losses/step": theirs}, 30)[0]

    assert losses(curve, curve * (1 + 5e-5)).agrees
    assert not losses(curve, curve * (1 + 2e-4)).agrees
    assert losses(curve, late).agrees
    assert not losses(curve, curve * np.nan).agrees
    assert "DISAGREE" in str(losses(curve, 2 * curve))
