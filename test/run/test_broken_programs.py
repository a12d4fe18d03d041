"""Programs that cannot be started: plans, arrays and directories of which something is broken."""

import json
import random

import numpy as np
import pytest
from support.ranks import sample

pytest.importorskip("torch")

from shardir.backend.runs import LaunchError
from shardir.backend.torch.launch import start as launch
from shardir.backend.torch.shardir_runtime.plan.arrays import NPY, ArrayError, array_in
from shardir.backend.torch.shardir_runtime.plan.program import PlanError, load_plan
from shardir.tools import run as tool


def broken(tmp_path, change):
    """Return a directory whose plan is changed by `change`."""
    directory = sample.write(tmp_path / "dir")
    plan = json.loads((directory / "plan.json").read_text())
    change(plan)
    (directory / "plan.json").write_text(json.dumps(plan))
    return directory


def first_arg(plan):
    return plan["functions"]["step"]["args"][0]


CHANGES = {
    "'version' is missing": lambda p: p.pop("version"),
    "expected version 1, got 2": lambda p: p.update(version=2),
    "mesh.axes[0][1]: expected an integer, got": lambda p: p["mesh"]["axes"][0].__setitem__(1, "2"),
    "mesh.axes[1][0]: the axis 'dp' occurs twice": lambda p: p["mesh"]["axes"][1].__setitem__(
        0, "dp"
    ),
    "step.args[0].dtype: expected one of f32, f64, bf16, f16, i64, i32, i1, got": lambda p: (
        first_arg(p).update(dtype="f8")
    ),
    "expected an axis of the mesh (dp, tp), got 'pp'": lambda p: first_arg(p).update(
        dims=[["pp"], []]
    ),
    "2 * 2 does not divide the axis 'dp'": lambda p: first_arg(p).update(dims=[[["dp", 2, 2]], []]),
    "dims: 1 entries for a shape of 2": lambda p: first_arg(p).update(dims=[[]]),
    "there is no file 'data/z.npy'": lambda p: first_arg(p)["init"].update(file="data/z.npy"),
    "is outside the directory": lambda p: first_arg(p)["init"].update(file="../../etc/passwd"),
    "the file's shape [40, 8] does not fit the shape [15, 7]": lambda p: first_arg(p).update(
        shape=[15, 7]
    ),
    "no argument of the function has the state 'w9'": lambda p: p["functions"]["step"]["results"][
        1
    ].update(updates="w9"),
    "a step needs a loss": lambda p: p["functions"]["step"]["results"].pop(0),
    "the state 'w1' has another shape": lambda p: p["functions"]["predict"]["args"][1].update(
        init={"kind": "constant", "value": 1}
    ),
    "single: there is no file 'none.py'": lambda p: p.update(single="none.py"),
    "single: '/etc/passwd' is outside the directory": lambda p: p.update(single="/etc/passwd"),
    "expected version 1, got true": lambda p: p.update(version=True),
    "kind: expected one of step, function, got [1]": lambda p: p["functions"]["step"].update(
        kind=[1]
    ),
    "embedded null byte": lambda p: p.update(single="a\0b"),
    "File name too long": lambda p: p.update(single="x" * 300),
    "init.data[0]: expected a truth value or an integer or a number, got": lambda p: p["functions"][
        "step"
    ]["args"][2]["init"].update(data=["1"]),
    "the lists in it have different lengths": lambda p: p["functions"]["step"]["args"][2][
        "init"
    ].update(data=[[1], [1, 2]]),
}


@pytest.mark.parametrize("message", CHANGES)
def test_a_bad_plan_is_one_clear_message(tmp_path, capsys, message):
    assert tool.main([str(broken(tmp_path, CHANGES[message]))]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "nowhere: no such directory"),
        (["nowhere.ir"], "nowhere.ir: no such file"),
        (["empty"], "empty has no plan.json: it is not a compiled program"),
        (["garbled"], "garbled/plan.json cannot be read: "),
        (["list"], "list/plan.json: expected an object, got [1]"),
        (["dir", "--nproc", "3"],
         "expected --nproc 4, for mesh @m <dp = 2, tp = 2>, got 3; omit --nproc"),
        (["npy"], "not an .npy file"),
    ],
)  # fmt: skip
def test_what_cannot_be_started_is_one_clear_message(
    tmp_path, monkeypatch, capsys, arguments, message
):
    monkeypatch.chdir(tmp_path)
    for name, text in [("garbled", '{"version": 1,'), ("list", "[1]")]:
        (tmp_path / name).mkdir()
        (tmp_path / name / "plan.json").write_text(text)
    (tmp_path / "empty").mkdir()
    sample.write(tmp_path / "dir")
    (sample.write(tmp_path / "npy") / "data/x.npy").write_text("1, 2, 3")
    assert tool.main(arguments) == 2
    assert message in capsys.readouterr().err


def test_torch_is_asked_for(tmp_path, monkeypatch, capsys):
    find = launch.importlib.util.find_spec
    monkeypatch.setattr(
        launch.importlib.util, "find_spec", lambda name: None if name == "torch" else find(name)
    )
    assert tool.main([str(sample.write(tmp_path / "dir"))]) == 2
    assert "pip install 'shardir[torch]'" in capsys.readouterr().err


def test_mutated_plans_never_show_a_traceback(tmp_path):
    """Values are deleted or replaced by others of other types: a plan is read, or a PlanError."""
    directory, chance = sample.write(tmp_path / "dir"), random.Random(0)
    text = json.dumps(sample.plan())
    for _ in range(400):
        plan = json.loads(text)
        holder = plan
        while True:
            keys = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
            key = chance.choice(keys)
            below = holder[key]
            if not isinstance(below, dict | list) or not below or chance.random() < 0.2:
                break
            holder = below
        if chance.random() < 0.2:
            del holder[key]
        else:
            choices = [
                None,
                True,
                -1,
                0,
                1.5,
                "",
                "dp",
                [],
                {},
                [["dp", 1, 2]],
                [[]],
                {"kind": "x"},
            ]
            holder[key] = chance.choice(choices)
        (directory / "plan.json").write_text(json.dumps(plan))
        try:
            load_plan(directory)
        except PlanError as error:
            assert str(error)


def test_check_needs_a_program_for_one_device(tmp_path, capsys):
    directory = broken(tmp_path, lambda p: p.update(single=None))
    assert tool.main([str(directory), "--check"]) == 2
    assert "no program for one device" in capsys.readouterr().err


def npy(header, version=b"\x01\x00", data=b"\0" * 64):
    size = len(header).to_bytes(2 if version[0] == 1 else 4, "little")
    return b"\x93NUMPY" + version + size + header + data


def header(**fields):
    return repr({"descr": "<f4", "fortran_order": False, "shape": (4, 4), **fields}).encode()


@pytest.mark.parametrize(
    "content",
    [
        b"", b"\x93NUMPY", b"\x93NUMPY\x01\x00", b"\x93NUMPY\x01\x00\xff",
        npy(b""), npy(b"[" * 5000), npy(b"-" * 9000 + b"1"), npy(b"\xff\0"), npy(b"{}"),
        npy(b"[1]"), npy(b"__import__('os')"), npy(header(), b"\x02\x00")[:12] + b"\xff" * 4,
        npy(header(descr=["<f4"])), npy(header(descr=[("a", "<f4")])), npy(header(descr="|O")),
        npy(header(shape=4)), npy(header(shape=(-1, -16))), npy(header(shape=("4", 4))),
        npy(header(shape=(True, 4))), npy(header(shape=(4.0, 4))), npy(header(shape=(1 << 70,))),
        npy(header(fortran_order=True)), npy(header(), data=b"\0" * 63),
    ],
)  # fmt: skip
def test_a_broken_array_is_one_clear_message(tmp_path, content):
    path = tmp_path / "x.npy"
    path.write_bytes(content)
    with pytest.raises(ArrayError, match=r"x\.npy: ") as caught:
        array_in(path)
    assert "\n" not in str(caught.value)


def test_a_header_is_that_of_numpy(tmp_path):
    path = tmp_path / "x.npy"
    for dtype, shape in (("<f4", (3, 2)), ("|b1", ()), ("<i8", (0, 5)), ("<f2", (1,) * 20)):
        np.save(path, np.zeros(shape, dtype))
        found = array_in(path)
        assert (NPY[dtype], shape) == (found.dtype, found.shape)
        assert found.offset + np.zeros(shape, dtype).nbytes == found.end == path.stat().st_size


def test_embedders_get_a_launch_error(tmp_path):
    with pytest.raises(LaunchError, match="no such directory"):
        launch.run(tmp_path / "nowhere")
