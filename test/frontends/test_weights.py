"""Weights of modules: state_dicts and files, in and out."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import shardir
from shardir.backend.torch.shardir_runtime.data.files import save_npz
from shardir.diagnostics import ShardirError
from shardir.frontends.torch.weights import read_dump

X = torch.randn(8, 4)


class Tied(nn.Module):
    """Two parameters that are one, a buffer, and one that is in no file."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
        self.head.weight = self.table.weight
        self.register_buffer("scale", torch.randn(4))
        self.register_buffer("constant", torch.ones(4), persistent=False)

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(self.table(x) * self.scale * self.constant).square().sum()


@cache
def compiled(seed: int) -> Any:
    torch.manual_seed(seed)
    return shardir.compile(Tied(), X, optimizer="sgd, lr = 0.1", mesh="d = 2", plan="fsdp")


def program(seed: int) -> Any:
    """Return the program of a seed with its initial weights."""
    found = compiled(seed)
    found.reset()
    return found


@pytest.mark.parametrize("name", ["weights.safetensors", "weights.pt", "weights"])
def test_what_is_written_is_read(tmp_path: Path, name: str) -> None:
    first, second = program(0), program(1)
    first.save_weights(tmp_path / name)
    second.load_weights(tmp_path / name)
    torch.testing.assert_close(second.state_dict(), first.state_dict(), rtol=0, atol=0)
    # the libraries' own readers find the module's own names
    read = torch.load if name.endswith("pt") else load_file
    file = tmp_path / name / "model.safetensors" if name == "weights" else tmp_path / name
    module = Tied()
    module.load_state_dict(read(file))
    torch.testing.assert_close(dict(module.state_dict()), first.state_dict(), rtol=0, atol=0)


TYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32,
         torch.bool]  # fmt: skip


def test_what_a_run_has_written_has_the_types_and_shapes_of_the_module(tmp_path: Path) -> None:
    """Of every type that a state can have; a scalar too. Others in the file are left out."""
    like = {f"{t}, {shape}": torch.empty(shape, dtype=t) for t in TYPES for shape in ((), (2, 3))}
    written = {name: (torch.randn(x.shape) * 3).to(x.dtype) for name, x in like.items()}
    files = {f"states/{name}": x for name, x in written.items()}
    save_npz(tmp_path / "run.npz", files | {"losses/step": torch.ones(2)})
    torch.testing.assert_close(read_dump(tmp_path / "run.npz", like), written, rtol=0, atol=0)


def test_weights_of_several_files(tmp_path: Path) -> None:
    first, second = program(0), program(1)
    states = {name: x.clone() for name, x in first.state_dict().items() if name != "head.weight"}
    names = sorted(states)
    places = {name: f"model-{i % 2}.safetensors" for i, name in enumerate(names)}
    for place in set(places.values()):
        save_file({n: states[n] for n in names if places[n] == place}, tmp_path / place)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": places}))
    second.load_weights(tmp_path)
    torch.testing.assert_close(second.state_dict(), first.state_dict(), rtol=0, atol=0)


WRITTEN: dict[str, tuple[str, Any, list[str]]] = {
    "folder": ("", None, ["model.safetensors"]),
    "index": (
        "w.safetensors.index.json", None,
        ["w-00001-of-00001.safetensors", "w.safetensors.index.json"],
    ),
    "small parts": (
        "w.safetensors", 32,
        [*(f"w-0000{i}-of-00004.safetensors" for i in range(1, 5)), "w.safetensors.index.json"],
    ),
    "parts in a folder": (
        "", "96B",
        [*(f"model-0000{i}-of-00002.safetensors" for i in (1, 2)), "model.safetensors.index.json"],
    ),
    "large parts": ("w.safetensors", "1GB", ["w.safetensors"]),
}  # fmt: skip


@pytest.mark.parametrize("case", WRITTEN)
def test_files_and_their_index_are_read_again(tmp_path: Path, case: str) -> None:
    """By us, and by safetensors: each tensor is in the file that the index names, once."""
    name, size, files = WRITTEN[case]
    first, second = program(0), program(1)
    first.save_weights(tmp_path / name, size)
    assert sorted(path.name for path in tmp_path.iterdir()) == files
    second.load_weights(tmp_path / (name if len(files) == 1 or not name else files[-1]))
    torch.testing.assert_close(second.state_dict(), first.state_dict(), rtol=0, atol=0)
    parts = {f: load_file(tmp_path / f) for f in files if f.endswith(".safetensors")}
    assert sorted(n for part in parts.values() for n in part) == sorted(first.state_dict())
    if files[-1].endswith(".json"):
        index = json.loads((tmp_path / files[-1]).read_text())
        assert index["weight_map"] == {n: f for f, part in parts.items() for n in part}
        assert index["metadata"]["total_size"] == sum(
            x.nbytes for part in parts.values() for x in part.values()
        )


def test_sizes_of_files_are_checked(tmp_path: Path) -> None:
    for size in ("5 parsecs", 0, -1):
        with pytest.raises(ShardirError, match="expected max_shard_size such as 5GB"):
            program(0).save_weights(tmp_path / "w.safetensors", size)
    with pytest.raises(ShardirError, match=r"max_shard_size is for \.safetensors files, got"):
        program(0).save_weights(tmp_path / "w.pt", "1GB")
    with pytest.raises(ShardirError, match=r"cannot write .*: No such file or directory"):
        program(0).save_weights(tmp_path / "no" / "w.safetensors.index.json")
    assert not [*tmp_path.iterdir()]


def test_a_module_on_the_meta_device_gets_its_weights(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = nn.Linear(4, 4)
    found = shardir.compile(model, X, train=False, mesh="d = 2", plan="ddp")
    found.load_state_dict({"weight": torch.eye(4), "bias": torch.zeros(4)})
    assert (found.save(tmp_path / "out") / "program.py").exists()


WRONG: dict[str, tuple[Any, str]] = {
    "missing": ({"scale": torch.zeros(4)}, "got none of table.weight, table.bias, head.weight"),
    "surplus": ({"other": torch.zeros(4)}, "of the module alone, got other"),
    "shapes": ({"scale": torch.zeros(5)}, r"expected scale of \[4\], got \[5\]"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_weights_change_nothing(name: str) -> None:
    given, message = WRONG[name]
    found = program(0)
    before = found.state_dict()
    states = given if name == "missing" else before | given
    with pytest.raises(ShardirError, match=message):
        found.load_state_dict(states)
    torch.testing.assert_close(found.state_dict(), before, rtol=0, atol=0)


FILES: dict[str, tuple[bytes, str]] = {
    "none.safetensors": (b"", "expected a file of weights, got"),
    "text.safetensors": (b"not weights", "expected a file of weights, got"),
    "text.pt": (b"not weights", "expected"),
    "code.pt": (b"cposix\nsystem\n(S'true'\ntR.", "expected tensors by their names, got a file"),
    "model.safetensors.index.json": (b'{"weight_map": {"a": "../a"}}', "a weight_map of files"),
}


@pytest.mark.parametrize("name", FILES)
def test_files_of_something_else_are_refused(tmp_path: Path, name: str) -> None:
    content, message = FILES[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ShardirError, match=message):
        program(0).load_weights(tmp_path / name)


def test_a_file_that_is_not_there() -> None:
    with pytest.raises(ShardirError, match="cannot be read: No such file"):
        program(0).load_weights("nowhere.pt")
    with pytest.raises(ShardirError, match="cannot be read: No such file"):
        program(0).load_weights("nowhere.safetensors")
