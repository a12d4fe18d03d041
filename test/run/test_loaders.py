"""Loaders: their batches on ranks, their states in checkpoints, and batches that are read ahead."""

import socket
import threading
import time
from collections.abc import Iterable, Iterator
from importlib import import_module
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from support.extent import extent
from support.forked import run_ranks
from support.loaders import ROWS, Stream, loader, rows
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import shardir
from shardir import ShardirError
from shardir.backend.runs import LaunchError
from shardir.backend.torch.shardir_runtime.data.loaders import Prefetch, map_tensors, to_device

BATCH, STEPS, SAVED = 4, 7, 3
"""Of a loader with two batches in an epoch: a checkpoint is within the second epoch."""


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x).tanh())


def built() -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = Model().double()
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def compiled(batch: int = BATCH, mesh: str = "dp = 2") -> Any:
    model, optimizer = built()
    x, labels = (t[:batch] for t in rows())
    return shardir.compile(model, x, labels=labels, loss=nn.functional.cross_entropy,
                           optimizer=optimizer, mesh=mesh, plan="ddp(dp)")  # fmt: skip


@pytest.fixture(scope="module")
def shared_program() -> Any:
    return compiled()


@pytest.fixture
def program(shared_program: Any) -> Any:
    shared_program.reset()
    return shared_program


def in_torch(batches: Iterable[Any]) -> list[float]:
    model, optimizer = built()
    losses = []
    for x, labels in batches:
        loss = nn.functional.cross_entropy(model(x), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def epochs(source: Iterable[Any]) -> Iterator[Any]:
    while True:
        yield from source


def test_a_resumed_run_reads_the_batches_of_one_that_goes_on(program: Any, tmp_path: Path) -> None:
    def run(workers: int, checkpoints: str, **options: Any) -> list[float]:
        program.reset()
        found = program.run(
            loader(BATCH, workers), checkpoints=tmp_path / checkpoints, save_every=SAVED, **options
        )
        return found.losses["step"]

    for workers in extent((1,), (0, 1)):
        expected = in_torch(islice(epochs(loader(BATCH, workers)), STEPS))
        whole = f"whole-{workers}"
        assert run(workers, whole, steps=STEPS) == pytest.approx(expected, rel=1e-12)
        step_3 = tmp_path / whole / "step-00000003"
        assert (step_3 / "loader.pt").is_file()
        losses = run(workers, f"from-3-{workers}", resume=step_3, steps=STEPS)
        assert losses == pytest.approx(expected[3:], rel=1e-12)
    # Where a callback ends the run, whose loader is some batches ahead; then with the last state.
    stopped = run(0, "stopped", steps=100, callback=lambda entry: entry.get("step") == SAVED)
    assert SAVED <= len(stopped) < 100
    more = len(stopped) + 2
    resumed = run(0, "stopped", resume=tmp_path / "stopped", steps=more)
    expected = in_torch(islice(epochs(loader(BATCH)), more))
    assert stopped + resumed == pytest.approx(expected, rel=1e-12)
    # At the end of an epoch; the folder of a run has no checkpoint at first.
    expected = in_torch(islice(epochs(loader(BATCH)), STEPS))
    run(0, "ends", resume=tmp_path / "ends", steps=2)
    losses = run(0, "ends", resume=tmp_path / "ends", steps=STEPS)
    assert losses == pytest.approx(expected[2:], rel=1e-12)
    program.reset()
    plain = DataLoader(TensorDataset(*rows()), BATCH, drop_last=True)
    program.run(plain, checkpoints=tmp_path / "plain", steps=1)
    with pytest.raises(ShardirError, match="expected the state of a loader for 1 rank, got none"):
        program.run(loader(BATCH), resume=tmp_path / "plain", steps=2)


def test_a_loop_of_this_process_goes_on_with_its_loader(program: Any, tmp_path: Path) -> None:
    expected = in_torch(islice(epochs(loader(BATCH, workers=1)), STEPS))
    with program.ranks() as trainer:
        batches = trainer.prefetch(loader(BATCH, workers=1))
        losses = [trainer.step(batch).item() for batch in islice(epochs(batches), SAVED)]
        trainer.save(tmp_path, loader=batches)
        with pytest.raises(ShardirError, match=r"state_dict\(\) and load.*, got list"):
            trainer.save(tmp_path / "other", loader=[])
        batches = loader(BATCH, workers=1)
        trainer.load(tmp_path, loader=batches)
        losses += [trainer.step(x).item() for x in islice(epochs(batches), STEPS - SAVED)]
    assert losses == pytest.approx(expected, rel=1e-12)


def test_each_rank_has_a_loader_of_its_own(tmp_path: Path) -> None:
    directory = compiled(mesh="dp = 2, tp = 2").save(tmp_path / "out")

    def run(checkpoints: str, resume: object, steps: int) -> list[str]:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        arguments = [directory, tmp_path / checkpoints, resume, steps, port]
        return run_ranks(Path(__file__).parent / "loader_rank.py", 4, arguments, 100, False)

    first = run("first", "none", SAVED)
    names = sorted(path.name for path in (tmp_path / "first/step-00000003").glob("*.pt"))
    assert names == [f"loader-0000{k}-of-00004.pt" for k in range(1, 5)]
    second = run("second", tmp_path / "first", STEPS)
    parts = zip(*(epochs(loader(1, seed=seed)) for seed in range(4)), strict=True)
    whole = ([torch.cat(x) for x in zip(*part, strict=True)] for part in parts)
    expected = in_torch(islice(whole, STEPS))
    for a, b in zip(first, second, strict=True):
        words = [line.split() for line in (a + b).splitlines() if line.startswith("rank")]
        assert [int(w[2]) for w in words] == [*range(1, STEPS + 1)], a + b
        assert [float(w[3]) for w in words] == pytest.approx(expected, rel=1e-12)
        assert "expected a loader with state_dict() and load_state_dict()" in a
    with (
        compiled(mesh="dp = 1").ranks() as trainer,
        pytest.raises(ShardirError, match="got those of 4 ranks, which differ; use as many"),
    ):
        trainer.load(tmp_path / "first", loader=loader(BATCH))


def test_batches_are_trees_of_tensors_and_arrays(program: Any) -> None:
    x, labels = rows()
    expected = in_torch([(x[:4], labels[:4]), (x[4:8], labels[4:8])])
    columns = {"x": x.numpy(), "labels": labels.numpy()}
    streams: list[Iterable[Any]] = [
        DataLoader(Stream(), BATCH, drop_last=True),  # dicts of a stream
        [{k: v[i : i + 4] for k, v in columns.items()} for i in (0, 4)],  # arrays of numpy
    ]
    if find_spec("datasets") is not None:
        table = import_module("datasets").Dataset.from_dict(columns).with_format("torch")
        streams.append(
            [{"x": batch["x"].double(), "labels": batch["labels"]} for batch in table.iter(4, True)]
        )
    for stream in streams:
        losses = program.run(stream, steps=2).losses["step"]
        assert losses == pytest.approx(expected, rel=1e-12)
        program.reset()
    with program.ranks() as trainer:
        losses = [trainer.step(batch).item() for batch in streams[1]]
        assert losses == pytest.approx(expected, rel=1e-12)
        with pytest.raises(ShardirError, match=r"expected x of .*float64, got \[4, 6\] and .*f"):
            trainer.step({"x": np.zeros((4, 6), np.float32), "labels": columns["labels"][:4]})


class Source:
    """Batches that a test watches."""

    def __init__(self, count: int, error: Exception | None = None):
        self.count, self.error, self.read = count, error, 0

    def __iter__(self) -> Iterator[int]:
        for number in range(1, self.count + 1):
            self.read = number
            yield number
        if self.error is not None:
            raise self.error


def test_batches_are_read_ahead_of_a_loop_and_end_with_it() -> None:
    source, seen = Source(100), []
    for batch in Prefetch(source, ahead=3):
        seen.append(batch)
        until = time.monotonic() + 30
        while source.read < min(100, batch + 3) and time.monotonic() < until:
            time.sleep(0.001)
        assert batch + 3 <= source.read <= batch + 5, "a batch that waits for its place counts"
        if batch == 5:
            break
    assert seen == [1, 2, 3, 4, 5]
    until = time.monotonic() + 30
    while any(t.name == "prefetch" for t in threading.enumerate()) and time.monotonic() < until:
        time.sleep(0.001)
    assert not any(t.name == "prefetch" for t in threading.enumerate())

    seen.clear()
    with pytest.raises(OSError, match="no such shard"):
        seen.extend(iter(Prefetch(Source(2, OSError("no such shard")))))
    batches = Prefetch(loader(BATCH))
    assert len(batches) == ROWS // BATCH
    assert to_device(torch.device("cpu")) is None


class Pair(NamedTuple):
    x: torch.Tensor
    name: str


def test_trees_keep_their_form_on_the_way_to_a_device() -> None:
    tree = {"pairs": [Pair(torch.ones(2), "a")], "rest": (torch.zeros(1), 3)}
    found = map_tensors(lambda x: x + 1, tree)
    assert found["pairs"][0].name == "a"
    assert found["rest"][1] == 3
    torch.testing.assert_close(found["pairs"][0].x, torch.full((2,), 2.0))
    torch.testing.assert_close(found["rest"][0], torch.ones(1))


class Counter(Source):
    """A loader whose state is the number of batches that it has made."""

    def state_dict(self) -> int:
        return self.read

    def load_state_dict(self, state: int) -> None:
        raise AssertionError(state)


def test_the_state_of_batches_is_that_of_the_loop() -> None:
    batches = Prefetch(source := Counter(9), ahead=2)
    for batch in batches:
        until = time.monotonic() + 30
        while source.read < min(9, batch + 2) and time.monotonic() < until:
            time.sleep(0.001)
        assert batches.state_dict() == batch
    every = [labels.tolist() for _, labels in islice(epochs(loader(BATCH)), 6)]
    for k in range(1, 5):
        state = None
        for _ in islice(epochs(batches := Prefetch(loader(BATCH))), k):
            state = batches.state_dict()
        other = Prefetch(loader(BATCH))
        other.load_state_dict(state)
        assert [y.tolist() for _, y in islice(epochs(other), 6 - k)] == every[k:]


def test_a_state_that_cannot_be_stored_ends_the_run(program: Any, tmp_path: Path) -> None:
    class Loader(list):
        def state_dict(self) -> Any:
            return {"next": threading.Thread}

        def load_state_dict(self, state: Any) -> None:
            raise AssertionError

    x, labels = rows()
    with pytest.raises(LaunchError, match="expected a state of Loader of tensors, numbers"):
        program.run(Loader([(x[:4], labels[:4])]), checkpoints=tmp_path, steps=1)
