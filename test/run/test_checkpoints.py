"""Checkpoints: a run that was interrupted is the one that was not, on any mesh."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.extent import extent
from support.forked import server

import shardir
from shardir import ShardirError
from shardir.backend.runs import LaunchError, Report, RunError
from shardir.backend.torch.launch.forks import share_forks
from shardir.backend.torch.shardir_runtime.checkpoints.saving import saving
from shardir.backend.torch.shardir_runtime.plan.program import PlanError, load_plan
from shardir.backend.torch.shardir_runtime.run.events import Events
from shardir.backend.torch.shardir_runtime.run.options import RunOptions
from shardir.backend.torch.shardir_runtime.run.states import States
from shardir.backend.torch.shardir_runtime.runtime import Mesh

STEPS = 9
MESHES = {
    "dp2-tp2": ("<dp = 2, tp = 2>", "[{}, {tp}]", "[{tp}, {}]"),
    "tp4": ("<dp = 1, tp = 4>", "[{}, {tp}]", "[{tp}, {}]"),
    "one": ("<dp = 1, tp = 1>", "[{}, {}]", "[{}, {}]"),
    "fsdp": ("<dp = 2, tp = 2>", "[{dp}, {tp}]", "[{tp, dp}, {}]"),
    "dp8": ("<dp = 8, tp = 1>", "[{dp}, {}]", "[{dp}, {}]"),
}
"""The mesh, and the layouts of w1 and w2, whose dimension of 9 is uneven on most of them."""

TEXT = """
dist.mesh @m MESH
func.func private @loss(
  %x: tensor<8x6xf32, #dist.layout<@m, [{dp}, {}]>>
    {train.input = #train.init<file, path = "data.npz", array = "x">},
  %w1: tensor<6x9xf32, #dist.layout<@m, W1>>
    {train.parameter = "w1", train.init = #train.init<normal, std = 0.5>},
  %w2: tensor<9x3xf32, #dist.layout<@m, W2>>
    {train.parameter = "w2", train.init = #train.init<normal, std = 0.5>}
) -> tensor<f32> {
  %h = nn.matmul %x, %w1 : (tensor<8x6xf32, #dist.layout<@m, [{dp}, {}]>>,
    tensor<6x9xf32, #dist.layout<@m, W1>>) -> tensor<8x9xf32>
  %t = nn.tanh %h : (tensor<8x9xf32>) -> tensor<8x9xf32>
  %y = nn.matmul %t, %w2 : (tensor<8x9xf32>, tensor<9x3xf32, #dist.layout<@m, W2>>)
    -> tensor<8x3xf32>
  %s = nn.square %y : (tensor<8x3xf32>) -> tensor<8x3xf32>
  %loss = nn.reduce <mean> %s dims <0, 1> : (tensor<8x3xf32>) -> tensor<f32>
  func.return %loss : tensor<f32>
}
train.step @step of @loss <adam, lr = 0.05>
"""


class Programs(dict[str, Path]):
    """The folders of the programs of MESHES, each of which is compiled when it is first needed."""

    def __init__(self, folder: Path):
        super().__init__()
        self.folder = folder
        data = np.random.default_rng(0).normal(size=(37, 6)).astype(np.float32)
        np.savez(folder / "data.npz", x=data)

    def __missing__(self, name: str) -> Path:
        mesh, w1, w2 = MESHES[name]
        text = TEXT.replace("MESH", mesh).replace("W1", w1).replace("W2", w2)
        self[name] = shardir.compile(text, base_dir=self.folder).save(self.folder / name)
        return self[name]


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Programs:
    return Programs(tmp_path_factory.mktemp("programs"))


def _run(program: Path, dump: Path, **options: Any) -> tuple[Report, dict[str, Any]]:
    """The report of a run, and the states at its end."""
    report = shardir.run(program, dump=dump, timeout=60, **options)
    with np.load(dump) as file:
        return report, {k: file[k] for k in file.files if k.startswith("states/")}


@pytest.fixture(scope="module")
def uninterrupted(programs, tmp_path_factory) -> dict[str, tuple[Report, dict[str, Any]]]:
    """The runs of all steps, which are made once; the ranks are started."""
    found: dict[str, tuple[Report, dict[str, Any]]] = {}
    return found


def _uninterrupted(name: str, programs: dict, made: dict, folder: Path) -> Any:
    if name not in made:
        made[name] = _run(programs[name], folder / "all.npz", steps=STEPS)
    return made[name]


PAIRS = [("dp2-tp2", "dp2-tp2"), ("dp8", "tp4"), ("fsdp", "one"), ("tp4", "fsdp")]
ALL_PAIRS = [(a, b) for a in MESHES for b in MESHES]


@pytest.mark.parametrize(("before", "after"), extent(PAIRS[::2], ALL_PAIRS))
def test_a_resumed_run_is_the_uninterrupted_one(before, after, programs, uninterrupted, tmp_path):
    """Bit for bit on the same mesh; on another one up to the order of sums."""
    folder = tmp_path / "checkpoints"
    first = shardir.run(programs[before], steps=4, checkpoints=folder, save_every=3, timeout=60)
    assert sorted(p.name for p in folder.iterdir()) == ["step-00000003", "step-00000004"]
    options = {"checkpoints": folder, "keep": 2, "save_every": 2}
    second, states = _run(
        programs[after], tmp_path / "b.npz", steps=STEPS, resume=folder, **options
    )
    assert sorted(p.name for p in folder.iterdir()) == ["step-00000008", "step-00000009"]
    full, expected = _uninterrupted(after, programs, uninterrupted, tmp_path)
    losses = [*first.losses["step"], *second.losses["step"]]
    if before == after:
        assert losses == full.losses["step"]
        assert all(np.array_equal(x, expected[k]) for k, x in states.items())
    np.testing.assert_allclose(losses, full.losses["step"], rtol=1e-5)
    assert states.keys() == expected.keys()
    for key, x in states.items():
        np.testing.assert_allclose(x, expected[key], rtol=1e-4, atol=1e-6)


def _edited(program: Path, folder: Path, lines: str) -> Path:
    """A copy of a program whose step runs lines first; `calls` is the number of its calls."""
    shutil.copytree(program, folder)
    text = (folder / "program.py").read_text()
    body = "".join(f"    {line}\n" for line in ("global calls", "calls += 1", *lines.splitlines()))
    head, mark, rest = text.partition('"""\n\nimport')
    rest = rest.replace("):\n", f"):\n{body}", 1)
    (folder / "program.py").write_text(
        f"{head}{mark} os, resource, signal, threading, time\nimport{rest}"
    )
    text = (folder / "program.py").read_text().replace("\n\n\ndef ", "\n\ncalls = 0\n\n\ndef ", 1)
    (folder / "program.py").write_text(text)
    return folder


KILLED_STEPS = extent(STEPS, 200)
OTHERS = [("dp2-tp2", "tp4"), ("dp8", "dp2-tp2"), ("dp2-tp2", "dp8"), ("fsdp", "one"),
          ("tp4", "fsdp")]  # fmt: skip
SAME = [("dp2-tp2", "dp2-tp2"), ("fsdp", "fsdp")]


@pytest.mark.parametrize(
    ("before", "after", "seed"),
    extent([(*SAME[1], 0)], [(*pair, n) for n in range(10) for pair in SAME]
           + [(*pair, n) for n in range(2) for pair in OTHERS]),
)  # fmt: skip
def test_a_run_that_was_killed_goes_on_at_its_last_checkpoint(
    before, after, seed, programs, uninterrupted, tmp_path
):
    """All ranks are killed while they write a checkpoint, so that none removes what is incomplete;
    in the long form one rank, at a random moment."""
    chance = np.random.default_rng(seed)
    ranks = np.prod([int(n) for n in re.findall(r"= (\d+)", MESHES[before][0])])
    writing = """if calls == 4:
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_FSIZE, (64, 64))"""
    at_random = f"""if calls == {chance.integers(2, KILLED_STEPS)} and mesh.rank == {seed % ranks}:
        time.sleep({chance.random() * 0.01})
        threading.Timer({chance.random() * 0.01}, os.kill, [os.getpid(), 9]).start()"""
    lines = extent(writing, at_random)
    killed = _edited(programs[before], tmp_path / "killed", lines)
    folder = tmp_path / "checkpoints"
    options: dict[str, Any] = {"checkpoints": folder, "resume": folder, "keep": 2,
                               "save_every": extent(1, int(chance.integers(1, 20)))}  # fmt: skip
    with pytest.raises(RunError, match=f"was killed by {extent('SIGXFSZ', 'SIGKILL')}"):
        shardir.run(killed, steps=KILLED_STEPS, timeout=60, **options)
    report, states = _run(programs[after], tmp_path / "b.npz", steps=KILLED_STEPS, **options)
    full, expected = (
        _uninterrupted(after, programs, uninterrupted, tmp_path) if KILLED_STEPS == STEPS
        else _run(programs[after], tmp_path / "full.npz", steps=KILLED_STEPS)
    )  # fmt: skip
    count = len(report.losses["step"])
    if before == after:
        assert report.losses["step"] == full.losses["step"][-count:]
        assert all(np.array_equal(x, expected[k]) for k, x in states.items())
    np.testing.assert_allclose(report.losses["step"], full.losses["step"][-count:], rtol=1e-5)
    assert not [p for p in folder.iterdir() if p.name.endswith(".incomplete")]


def test_a_signal_ends_all_ranks_after_the_same_step(programs, uninterrupted, tmp_path):
    lines = "if calls == 4 and mesh.rank == 2:\n    os.kill(os.getpid(), signal.SIGTERM)"
    program = _edited(programs["dp2-tp2"], tmp_path / "asked", lines)
    folder = tmp_path / "checkpoints"
    report = shardir.run(program, steps=STEPS, checkpoints=folder, timeout=60)
    assert report.stopped in (4, 5)
    assert [p.name for p in folder.iterdir()] == [f"step-{report.stopped:08}"]
    assert len(report.losses["step"]) == report.stopped
    _, states = _run(programs["dp2-tp2"], tmp_path / "b.npz", steps=STEPS, resume=folder)
    _, expected = _uninterrupted("dp2-tp2", programs, uninterrupted, tmp_path)
    assert all(np.array_equal(x, expected[k]) for k, x in states.items())


def test_a_full_disk_leaves_the_checkpoint_before(checkpoint, programs, tmp_path):
    folder = tmp_path / "checkpoints"
    shutil.copytree(checkpoint, folder / checkpoint.name)
    options: dict[str, Any] = {"seed": 3, "resume": folder, "timeout": 60}
    lines = ("signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
             "resource.setrlimit(resource.RLIMIT_FSIZE, (64, 64))")  # fmt: skip
    full = _edited(programs["dp2-tp2"], tmp_path / "full", lines)
    with pytest.raises(
        RunError, match=r"^cannot write the checkpoint of step 3 to .*: File too la"
    ):
        shardir.run(full, steps=8, checkpoints=folder, save_every=3, **options)
    assert [p.name for p in folder.iterdir()] == ["step-00000002"]
    report = shardir.run(programs["one"], steps=3, **options)
    assert len(report.losses["step"]) == 1


@pytest.fixture(scope="module")
def made(programs, tmp_path_factory) -> tuple[Path, dict[str, Any]]:
    """A checkpoint, and the states at the end of its run."""
    folder = tmp_path_factory.mktemp("one")
    with share_forks(server()):
        _, states = _run(
            programs["dp2-tp2"], folder / "a.npz", steps=2, seed=3, checkpoints=folder / "saved"
        )
    return folder / "saved" / "step-00000002", states


@pytest.fixture(scope="module")
def checkpoint(made) -> Path:
    return made[0]


@pytest.fixture(scope="module")
def states(made) -> dict[str, Any]:
    """The states that the checkpoint has."""
    return made[1]


def _manifest(path: Path, **changes: Any) -> None:
    data = json.loads((path / "checkpoint.json").read_text())
    for name, value in changes.items():
        data[name] = {**data[name], **value} if isinstance(value, dict) else value
        if isinstance(value, dict):
            data[name] = {k: v for k, v in data[name].items() if v is not None}
    (path / "checkpoint.json").write_text(json.dumps(data))


def _file(path: Path) -> Path:
    return sorted(path.glob("*.safetensors"))[0]


def _flip(path: Path) -> None:
    data = bytearray(_file(path).read_bytes())
    data[-1] ^= 1
    _file(path).write_bytes(data)


W1 = {"shape": [6, 9], "dtype": "f32", "role": "parameter"}


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda p: _file(p).write_bytes(b""), r"safetensors: expected \d+ bytes, got 0 bytes"),
        (lambda p: _file(p).unlink(), r"safetensors: expected \d+ bytes, got none"),
        (_flip, "expected the checksum of checkpoint.json, got another: damaged"),
        (lambda p: (p / "checkpoint.json").write_text("{"), "expected a manifest of version 2"),
        (lambda p: _manifest(p, version=1), "expected a manifest of version 2"),
        (lambda p: (p / "checkpoint.json").unlink(), "expected a folder with a complete"),
        (lambda p: _manifest(p, states={"w1": None}), "all states of the program, got none of w1"),
        (lambda p: _manifest(p, states={"w3": W1}), "states of the program alone, got w3 too"),
        (lambda p: _manifest(p, states={"w1": {**W1, "dtype": "f64"}}),
         r"expected w1 of f32 \[6, 9\], got f64 \[6, 9\]"),
        (lambda p: _manifest(p, seed=4), "expected --seed 4, with which it was made, got 3"),
        (lambda p: _manifest(p, program="0" * 64), "expected a checkpoint of this program"),
        (lambda p: _manifest(p, function="fit"), "of the step step, got one of fit"),
        (lambda p: _manifest(p, rows={"rows": 48}),
         r"with which it was made, 8 of 48 at a step \(--last wrap\), got 8 of 37 .*--weights"),
        (lambda p: _manifest(p, step=5), "--steps 5: expected more than 5, which .* has"),
        (shutil.rmtree, "expected a folder of checkpoints, got"),
    ],
)  # fmt: skip
def test_what_cannot_be_resumed_says_why(damage, message, checkpoint, programs, tmp_path):
    path = tmp_path / checkpoint.name
    shutil.copytree(checkpoint, path)
    damage(path)
    with pytest.raises(PlanError, match=message):
        _begin(programs["one"], resume=path)


def test_a_checkpoint_without_its_manifest_is_no_reason_to_begin_anew(
    checkpoint, programs, tmp_path
):
    """One command starts a run and goes on with it; what it finds damaged stays as it is."""
    path = tmp_path / checkpoint.name
    shutil.copytree(checkpoint, path)
    (path / "checkpoint.json").unlink()
    with pytest.raises(PlanError, match="expected a manifest"):
        _begin(programs["one"], resume=tmp_path, checkpoints=tmp_path)
    assert _file(path).read_bytes() == _file(checkpoint).read_bytes()


def _begin(program: Path, **options: Any) -> None:
    """Begin a run of 5 steps on one rank."""
    plan = load_plan(program)
    states = States(plan, Mesh([]), 3)
    asked = RunOptions(steps=5, seed=3, **options)
    with saving(asked, states, plan.functions[0], Events(0)):
        pass


@pytest.mark.parametrize(
    ("text", "is_same"),
    [
        (TEXT.replace("nn.tanh", "nn.relu"), False),
        (TEXT.replace("lr = 0.05", "lr = 0.5"), False),
        (TEXT.replace("dist.mesh @m MESH", "// other lines\n\n\ndist.mesh @m MESH"), True),
    ],
)
def test_another_program_with_the_same_states_is_refused(
    text, is_same, checkpoint, programs, tmp_path
):
    """Its mesh, its layouts, and lines of the source do not make a program another one."""
    mesh, w1, w2 = MESHES["one"]
    text = text.replace("MESH", mesh).replace("W1", w1).replace("W2", w2)
    compiled = shardir.compile(text, name="other.ir", base_dir=programs.folder)
    program = compiled.save(tmp_path / "out")
    if is_same:
        report = shardir.run(program, steps=3, seed=3, resume=checkpoint, timeout=60)
        assert len(report.losses["step"]) == 1
        return
    with pytest.raises(RunError, match="expected a checkpoint of this program, got one of a prog"):
        shardir.run(program, steps=3, seed=3, resume=checkpoint, timeout=60)


def test_checkpoints_of_another_run_stay(checkpoint, programs, tmp_path):
    """A run that begins before them does not write beside them, nor remove them."""
    folder = tmp_path / "checkpoints"
    shutil.copytree(checkpoint, folder / "step-00000002")
    for start, options in ((0, {}), (2, {"resume": folder / "step-00000002"})):
        later = folder / f"step-{start + 1:08}"
        shutil.copytree(checkpoint, later, dirs_exist_ok=True)
        message = f"expected none after step {start}, at which the run begins, got step-0000000"
        with pytest.raises(RunError, match=message):
            shardir.run(programs["one"], steps=5, seed=3, checkpoints=folder, keep=1, timeout=60,
                        **options)  # fmt: skip
        assert later.is_dir()


FORWARD = """
dist.mesh @m <dp = 2, tp = 1>
func.func @product(
  %w2: tensor<9x3xf32, #dist.layout<@m, [{dp}, {}]>>
    {train.parameter = "w2", train.init = #train.init<constant, value = 0>},
  %w1: tensor<6x9xf32, #dist.layout<@m, [{}, {dp}]>>
    {train.parameter = "w1", train.init = #train.init<constant, value = 0>}
) -> tensor<6x3xf32> {
  %y = nn.matmul %w1, %w2 : (tensor<6x9xf32, #dist.layout<@m, [{}, {dp}]>>,
    tensor<9x3xf32, #dist.layout<@m, [{dp}, {}]>>) -> tensor<6x3xf32>
  func.return %y : tensor<6x3xf32>
}
"""


def test_a_run_begins_with_the_weights_of_a_checkpoint(checkpoint, states, programs, tmp_path):
    """Without an optimizer, and on another mesh, whose parts are in several files, unevenly."""
    expected = states["states/w1"] @ states["states/w2"]
    out = shardir.compile(FORWARD).save(tmp_path / "out")
    for weights in (checkpoint, checkpoint.parent):
        report = shardir.run(out, weights=weights, timeout=60)
        np.testing.assert_allclose(report.results[0]["value"], expected, rtol=1e-5, atol=1e-6)
    # With the optimizer's states a run of the same program goes on, from step 0.
    _, begun = _run(programs["fsdp"], tmp_path / "b.npz", steps=0, weights=checkpoint)
    assert begun.keys() == states.keys()
    assert all(np.array_equal(x, states[key]) for key, x in begun.items())
    damaged = shutil.copytree(checkpoint, tmp_path / checkpoint.name)
    _flip(damaged)
    with pytest.raises(RunError, match="expected the checksum of"):
        shardir.run(out, weights=damaged, timeout=60)
    _manifest(shutil.copytree(checkpoint, tmp_path / "other"), states={"w1": {**W1, "shape": [9]}})
    with pytest.raises(LaunchError, match=r"expected w1 of f32 \[6, 9\], got f32 \[9\]"):
        shardir.run(out, weights=tmp_path / "other", timeout=60)


def test_a_log_goes_on_with_its_run(checkpoint, programs, tmp_path):
    """A run that resumes appends; another one begins anew."""
    log = tmp_path / "log.jsonl"
    for options, steps in (({}, [1, 2, 3]), ({"resume": checkpoint}, [1, 2, 3, 3, 4]), ({}, [1])):
        shardir.run(programs["one"], steps=max(steps[-1:]), seed=3, log=log, timeout=60, **options)
        entries = [json.loads(line) for line in log.read_text().splitlines()]
        assert [e["step"] for e in entries if e["event"] == "step"] == steps


def test_weights_of_a_checkpoint(checkpoint, states, tmp_path):
    """They are loaded by name, without what else the checkpoint has."""
    from shardir.frontends.torch import weight_files

    found = weight_files.read(checkpoint.parent)
    assert {f"states/{key}" for key in found} == states.keys()
    assert all(np.array_equal(x.numpy(), states[f"states/{key}"]) for key, x in found.items())
    _flip(shutil.copytree(checkpoint, tmp_path / "step-00000002"))
    with pytest.raises(ShardirError, match="expected the checksum"):
        weight_files.read(tmp_path)
