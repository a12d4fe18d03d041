"""The names of process groups and collectives: in torch's flight recorder, which Gloo has too, and
in its profiler."""

import json

import pytest
from support.device import on_cpu
from support.ranks import sample

pytest.importorskip("torch")

import torch

import shardir
from shardir.backend.torch.shardir_runtime import runtime
from shardir.backend.torch.shardir_runtime.collectives.mesh import name_of

RECORDED = """
calls += 1
if calls == 3 and rt_mesh.rank == 1:
    import json
    from shardir_runtime.collectives import mesh as meshes
    groups = {meshes.name_of(axes): g.process_group.group_desc
              for axes, g in rt_mesh._groups.items()}
    import torch._C._distributed_c10d as c10d
    with open("FOLDER/found", "w") as file:
        json.dump([groups, c10d._dump_fr_trace_json().decode()], file)
""".strip()


@on_cpu("there the recorder has another order")
def test_groups_have_the_names_of_their_axes(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "1000")
    lines = ["global calls", *RECORDED.replace("FOLDER", str(tmp_path)).splitlines()]
    body = "".join(f"    {line}\n" for line in lines)
    text = sample.PROGRAM.replace("m1):\n", f"m1):\n{body}", 1)
    directory = sample.write(tmp_path / "program", f"calls = 0\n{text}")
    shardir.run(directory, steps=4, timeout=60, checkpoints=tmp_path / "ckpt")
    groups, trace = json.loads((tmp_path / "found").read_text())
    assert groups == {"dp": "dp", "tp": "tp"}
    entries = json.loads(trace)["entries"]
    # Of each step: the product over tp; the loss and the gradients over dp.
    of_steps = [e for e in entries if e["process_group"][1] in groups]
    assert [e["process_group"][1] for e in of_steps[:6]] == ["tp", "dp", "dp"] * 2
    assert {e["process_group"][1] for e in entries} <= {"dp", "tp", "interruptions"}
    # A wait in one of them ends after --timeout.
    assert {e["timeout_ms"] for e in of_steps} == {60_000}


def test_axes_have_names():
    assert name_of(("dp", ("tp", 2, 4))) == "dp, tp:(2)4"


def test_a_profile_has_the_names_of_collectives():
    """Without one there are none: they cost more than the rest of the call."""
    mesh = runtime.Mesh([("dp", 1)])
    x = torch.ones(2)
    with torch.profiler.profile() as profile:
        runtime.all_reduce(mesh, x, "sum", ("dp",))
        runtime.all_gather(mesh, x, 0, ("dp",))
    names = [event.name for event in profile.events() or ()]
    assert [name for name in names if "shardir" in name] == [
        "shardir.all_reduce", "shardir.all_gather",
    ]  # fmt: skip
