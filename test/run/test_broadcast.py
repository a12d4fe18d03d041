"""`--broadcast`: the values of rank 0 reach all ranks, and only its machine needs the weights."""

import shlex
import socket
from pathlib import Path

import numpy as np
import pytest
from support.extent import extent, long_form
from support.ranks.nodes import Nodes, states

pytest.importorskip("torch")

import safetensors.numpy
import torch

import shardir
from shardir.backend.torch.shardir_runtime import runtime
from shardir.backend.torch.shardir_runtime.collectives import broadcast as broadcasts

TEXT = """
dist.mesh @m <dp = 2, tp = 2>
func.func private @loss(
    %x: tensor<8x5xf32> {train.input = #train.init<normal>},
    %w1: tensor<5x7xf32LAYOUT> {train.parameter = "w1", train.init = #train.init<normal>},
    %w2: tensor<7x3xf32> {train.parameter = "w2", train.init = #train.init<normal, std = 0.5>}
) -> tensor<f32> {
  %h = nn.matmul %x, %w1 : (tensor<8x5xf32>, tensor<5x7xf32LAYOUT>) -> tensor<8x7xf32>
  %a = nn.tanh %h : (tensor<8x7xf32>) -> tensor<8x7xf32>
  %y = nn.matmul %a, %w2 : (tensor<8x7xf32>, tensor<7x3xf32>) -> tensor<8x3xf32>
  %s = nn.square %y : (tensor<8x3xf32>) -> tensor<8x3xf32>
  %loss = nn.reduce <mean> %s dims <0, 1> : (tensor<8x3xf32>) -> tensor<f32>
  func.return %loss : tensor<f32>
}
train.step @step of @loss <momentum, lr = 0.1, momentum = 0.9>
"""
MODES = {
    "data": ("dp = 4", ""),
    "hybrid": ("dp = 2, tp = 2", ", #dist.layout<@m, [{}, {tp}]>"),
}


def program(folder: Path, mode: str) -> Path:
    mesh, layout = MODES[mode]
    text = TEXT.replace("dp = 2, tp = 2", mesh).replace("LAYOUT", layout)
    return shardir.compile(text, mode=mode).save(folder)


OTHERS = """
import os
from shardir_runtime.ops import random
if os.environ["RANK"] != "0":  # as on a machine whose arithmetic differs
    fill = random.fill
    random.fill = lambda *args: fill(*args) + 1
"""


@pytest.mark.parametrize("mode", extent(["hybrid"], MODES))
def test_values_are_those_of_rank_0(mode, tmp_path):
    """Of all data-parallel replicas, also where a parameter is split unevenly."""
    directory, dump = program(tmp_path / "program", mode), tmp_path / "dump.npz"
    shardir.run(directory, steps=3, timeout=60, dump=dump)
    expected = states(dump)
    path = directory / "program.py"
    path.write_text(path.read_text().replace("import torch\n", f"import torch\n{OTHERS}", 1))
    for broadcast in (False, True):
        shardir.run(directory, steps=3, timeout=60, dump=dump, broadcast=broadcast)
        found = states(dump)
        assert found.keys() == expected.keys()
        equal = [np.array_equal(found[key], x) for key, x in expected.items()]
        assert all(equal) == broadcast


@long_form
def test_only_the_first_machine_has_the_weights(tmp_path, monkeypatch):
    """The lines of a page, on two machines with a folder each."""
    random = np.random.default_rng(0)
    weights = {"w1": random.normal(size=(5, 7)).astype("f4"),
               "w2": random.normal(size=(7, 3)).astype("f4")}  # fmt: skip
    page = (Path(__file__).parents[2] / "docs/guides/checkpoints.md").read_text()
    lines = [line for line in page.splitlines() if "--broadcast --nnodes" in line]
    with socket.create_server(("127.0.0.1", 0)) as free:
        rdzv = f"127.0.0.1:{free.getsockname()[1]}"
    nodes = Nodes()
    for rank, line in enumerate(lines):
        folder = tmp_path / f"machine-{rank}"
        program(folder / "out", "hybrid")
        monkeypatch.chdir(folder)
        if rank == 0:
            safetensors.numpy.save_file(weights, "model.safetensors")
        tool, *words = shlex.split(line, comments=True)
        words = [rdzv if word == "10.0.0.1:29400" else word for word in words]
        words = ["3" if word == "10000" else word for word in words]
        assert tool == "shard-run"
        assert {"out", rdzv, str(rank), "model.safetensors"} <= {*words}
        nodes.start_line(rank, [*words, "--timeout=60", "--dump=dump.npz"])
    ended = nodes.end()
    assert [code for code, _ in ended.values()] == [0, 0], ended
    alone = tmp_path / "machine-0"
    shardir.run(alone / "out", steps=3, timeout=60, dump=tmp_path / "one.npz",
                weights=alone / "model.safetensors")  # fmt: skip
    found, expected = states(alone / "dump.npz"), states(tmp_path / "one.npz")
    assert found.keys() == expected.keys()
    assert all(np.array_equal(found[key], x) for key, x in expected.items())


@pytest.mark.parametrize("shape", [(), (5,), (7, 3), (1, 9), (6, 2, 2), (0, 4)])
@pytest.mark.parametrize("chunk", [1, 16, 1 << 20])
def test_chunks_make_the_shard(shape, chunk, monkeypatch):
    """Each element comes once, in chunks of at most so many bytes where a row has no more."""
    monkeypatch.setattr(broadcasts, "CHUNK_BYTES", chunk)
    full = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)
    seen = torch.zeros_like(full)

    def values(bounds):
        part = tuple(slice(*b) for b in bounds)
        seen[part] += 1
        assert full[part].numel() * 4 <= max(chunk, 4 * full[:1].numel() if shape else 4)
        return full[part]

    mesh = runtime.Mesh([])
    for low, high in ((0, 1), (1, 3), (0, 0), (2, 9)):
        bounds = [(min(low, n), min(high, n)) for n in shape]
        seen.zero_()
        found = broadcasts.from_rank_0(mesh, shape, torch.float32, bounds, values)
        assert torch.equal(found, full[tuple(slice(*b) for b in bounds)])
        assert bool((seen == 1).all())
