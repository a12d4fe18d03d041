# ruff: noqa: E402 (torch may not be installed)
"""Weights of files: a run begins with them, and a checkpoint is exported to them."""

import json
import math
import re
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.extent import extent
from support.forked import server

torch = pytest.importorskip("torch")
safetensors = pytest.importorskip("safetensors.torch")

import shardir
from shardir.backend.torch.launch.export import export
from shardir.backend.torch.launch.forks import share_forks
from shardir.tools import run as tool


class Model(torch.nn.Module):
    """Weights that 4 ranks split and one that they do not, and buffers of two types."""

    def __init__(self, seed: int):
        super().__init__()
        torch.manual_seed(seed)
        self.a = torch.nn.Linear(6, 8)
        self.norm = torch.nn.BatchNorm1d(8)
        self.b = torch.nn.Linear(8, 5, bias=False)

    def forward(self, x):
        return self.b(self.norm(self.a(x)).relu())


X, Y = torch.randn(8, 6, generator=torch.manual_seed(0)), torch.zeros(8, 5)


def _compiled(mesh: str, plan: str) -> Any:
    model = Model(1)
    return shardir.compile(
        model, X, labels=Y, loss=torch.nn.functional.mse_loss, mesh=mesh, plan=plan,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    )  # fmt: skip


@pytest.fixture(scope="module")
def compiled() -> Any:
    return _compiled("d = 4", "fsdp(d)")


@pytest.fixture(scope="module")
def program(compiled, tmp_path_factory) -> Path:
    return compiled.save(tmp_path_factory.mktemp("program") / "out")


@pytest.fixture(scope="module")
def trained(compiled, program, tmp_path_factory):
    """The folder of a checkpoint of 4 ranks, and the weights as the module takes them."""
    folder = tmp_path_factory.mktemp("trained") / "c"
    with share_forks(server()):
        compiled.run(steps=3, checkpoints=folder, timeout=60)
    return folder, compiled.state_dict()


def _equal(found, wanted) -> None:
    assert found.keys() == wanted.keys()
    assert all(x.dtype == wanted[k].dtype and x.equal(wanted[k]) for k, x in found.items())


def test_a_checkpoint_becomes_a_file_of_the_module(trained, program, tmp_path):
    folder, wanted = trained
    file = tmp_path / "model.safetensors"
    assert tool.main([str(program), f"--resume={folder}", f"--export={file}"]) == 0
    found = safetensors.load_file(file)
    _equal(found, wanted)
    assert not found["a.weight"].equal(Model(1).a.weight)
    Model(2).load_state_dict(found)
    with safetensors.safe_open(file, "pt") as opened:
        assert opened.metadata() == {"format": "pt"}


def test_files_have_at_most_a_size_and_an_index(trained, program, tmp_path):
    folder, wanted = trained
    file = tmp_path / "model.safetensors"
    words = [f"--resume={folder}", f"--export={file}", "--max-shard-size=260"]
    assert tool.main([str(program), *words]) == 0
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    names = sorted(set(index["weight_map"].values()))
    assert sorted(p.name for p in tmp_path.glob("*.safetensors")) == names
    assert len(names) > 2
    parts = {name: safetensors.load_file(tmp_path / name) for name in names}
    _equal({k: parts[name][k] for k, name in index["weight_map"].items()}, wanted)
    assert sum(map(len, parts.values())) == len(wanted)
    sizes = [sum(x.nbytes for x in part.values()) for part in parts.values()]
    assert max(sizes) <= 260
    assert index["metadata"]["total_size"] == sum(sizes)


@pytest.mark.parametrize(("several", "ddp"), [(True, False), *extent([], [(False, True)])])
def test_a_run_begins_with_weights_of_files(several, ddp, program, tmp_path):
    model, file = Model(2), tmp_path / "model.safetensors"
    states = model.state_dict()
    if several:
        places = {k: f"part-{i % 2}.safetensors" for i, k in enumerate(states)}
        for name in set(places.values()):
            part = {k: x for k, x in states.items() if places[k] == name}
            safetensors.save_file(part, tmp_path / name)
        file = tmp_path / "model.safetensors.index.json"
        file.write_text(json.dumps({"weight_map": places}))
    else:
        safetensors.save_file(states, file)
    out = _compiled("a = 2, b = 1", "ddp(a)").save(tmp_path / "out") if ddp else program
    dump = tmp_path / "dump.npz"
    report = shardir.run(out, steps=1, weights=tmp_path, dump=dump, timeout=60)
    loss = torch.nn.functional.mse_loss(model(X), Y)
    loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9).step()
    np.testing.assert_allclose(report.losses["step"][0], loss.item(), rtol=1e-5)
    with np.load(dump) as found:
        for name, x in model.state_dict().items():
            np.testing.assert_allclose(found[f"states/{name}"], x.numpy(), rtol=1e-4, atol=1e-5)


def _without(states, name):
    return {k: x for k, x in states.items() if k != name}


WRONG = [
    (lambda s: _without(s, "a.bias"), r"weights of all parameters, got none of a\.bias"),
    (lambda s: s | {"c": torch.zeros(1)}, "weights of the program alone, got c too"),
    (lambda s: s | {"a.bias": torch.zeros(9)}, r"expected a\.bias of f32 \[8\], got f32 \[9\]"),
    (lambda s: s | {"a.bias": torch.zeros(8).int()}, r"expected a\.bias of f32 \[8\], got i32"),
]


@pytest.mark.parametrize(("change", "message"), WRONG)
def test_other_weights_are_an_error_before_a_rank_starts(
    change, message, program, tmp_path, capsys, monkeypatch
):
    safetensors.save_file(change(Model(2).state_dict()), tmp_path / "model.safetensors")
    _refused(program, tmp_path, message, capsys, monkeypatch)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("model.safetensors", lambda data: data[:-1], "expected at least .* bytes, got"),
        ("model.safetensors", lambda data: data[:20], "its header is damaged"),
        ("other.txt", lambda data: data, r"expected model\.safetensors or .* got none"),
        ("model.safetensors.index.json", lambda data: b"{}", "expected an index with a weight_map"),
        (
            "model.safetensors.index.json",
            lambda data: b'{"weight_map": {"a.bias": "none.safetensors"}}',
            r"expected the file .*none\.safetensors, got none",
        ),
    ],
)
def test_damaged_files_are_an_error_before_a_rank_starts(
    name, content, message, program, tmp_path, capsys, monkeypatch
):
    data = safetensors.save(Model(2).state_dict())
    (tmp_path / name).write_bytes(content(data))
    _refused(program, tmp_path, message, capsys, monkeypatch)


def _refused(program, weights, message, capsys, monkeypatch) -> None:
    monkeypatch.setattr("shardir.backend.torch.launch.start.Ranks", None)
    assert tool.main([str(program), f"--weights={weights}"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert re.search(f"error: --weights .*{message}", error), error


def test_a_failed_export_leaves_the_files_of_before(trained, program, tmp_path, capsys):
    folder, _ = trained
    for name in ("model.safetensors", "model.safetensors.index.json"):
        (tmp_path / name).write_bytes(b"before")
    file = next(folder.rglob("shard-00002*"))
    data = file.read_bytes()
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    words = [f"--resume={folder}", f"--export={tmp_path / 'model.safetensors'}"]
    for more in ([], ["--max-shard-size=260"]):
        assert tool.main([str(program), *words, *more]) == 2
        assert re.fullmatch("error: .*checksum.*\n", capsys.readouterr().err)
    file.write_bytes(data)
    assert {p.read_bytes() for p in tmp_path.iterdir()} == {b"before"}
    assert len([*tmp_path.iterdir()]) == 2


def test_the_memory_of_an_export_is_that_of_one_tensor(tmp_path):
    rows, count = 1 << 18, 12
    args = [f'%w{i}: tensor<{rows}xf32> {{train.parameter = "w{i}", train.init = '
            f'#train.init<constant, value = {i}.0>}}' for i in range(count)]  # fmt: skip
    types, text = f"tensor<{rows}xf32>", []
    for i in range(1, count):
        left = "w0" if i == 1 else f"s{i - 1}"
        text.append(f"%s{i} = nn.add %{left}, %w{i} : ({types}, {types}) -> {types}")
    text.append(f"%loss = nn.reduce <mean> %s{count - 1} dims <0> : ({types}) -> tensor<f32>")
    text.append("func.return %loss : tensor<f32>")
    body = "\n".join(text)
    source = f"func.func private @loss({', '.join(args)}) -> tensor<f32> {{\n{body}\n}}\n"
    out = shardir.compile(source + "train.step @step of @loss <sgd, lr = 0.0>",
                          mode="stand_alone").save(tmp_path / "out")  # fmt: skip
    shardir.run(out, steps=1, checkpoints=tmp_path / "c", timeout=60)
    file = tmp_path / "model.safetensors"
    export(out, tmp_path / "c", file, None)
    tracemalloc.start()
    export(out, tmp_path / "c", file, None)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    found = safetensors.load_file(file)
    assert [found[f"w{i}"].unique().tolist() for i in range(count)] == [[i] for i in range(count)]
    assert math.isclose(sum(x.nbytes for x in found.values()), count * rows * 4)
    assert peak < 4 * rows * 4 + 5_000_000
