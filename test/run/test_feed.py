# ruff: noqa: E402 (torch may not be installed)
"""Batches that Python makes while ranks train."""

import contextlib
import copy
import os
from itertools import count
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import shardir
from shardir.backend.runs import LaunchError
from shardir.backend.torch.shardir_runtime import runtime as rt

ROWS = 7  # over two: four and three


@pytest.fixture(scope="module")
def compiled():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.GELU(), torch.nn.Linear(8, 4))
    return model, shardir.compile(
        model, torch.randn(ROWS, 6), labels=torch.randint(4, (ROWS,)),
        loss=torch.nn.functional.cross_entropy,
        mesh="dp = 2, tp = 2", plan="megatron(tp) * ddp(dp)",
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
    )  # fmt: skip


@pytest.fixture(autouse=True)
def no_pipe_stays_open(compiled):
    """However a run ends, neither end of a pipe is left."""
    before = pipes()
    yield
    assert pipes() <= before


def pipes():
    """Return the pipes of this process: each of its descriptors, with the pipe's number."""
    found = set()
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # that of the folder itself
            found.add((path.name, os.readlink(path)))
    return {(name, file) for name, file in found if file.startswith("pipe:")}


def batches(seed):
    """Make batches without an end."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        x = torch.randn(ROWS, 6, generator=generator)
        yield x, torch.randint(4, (ROWS,), generator=generator)


def in_torch(model, given, steps):
    """Train a copy of a module; return its losses."""
    model, losses = copy.deepcopy(model), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _, (x, y) in zip(range(steps), given, strict=False):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_an_iterator_is_taken_while_ranks_train(compiled):
    (model, program), taken = compiled, count()
    program.load_state_dict(model.state_dict())
    given = (batch for batch, _ in zip(batches(1), taken, strict=False))
    report = program.run(given, steps=30)
    assert report.losses["step"] == pytest.approx(in_torch(model, batches(1), 30), rel=1e-4)
    assert next(taken) == 30  # and no more


def test_local_batches_are_parts_of_the_ranks(compiled):
    """Those of a list begin again at its end."""
    model, program = compiled
    program.load_state_dict(model.state_dict())
    two = [batch for batch, _ in zip(batches(2), range(2), strict=False)]
    axes = [("dp", 2), ("tp", 2)]
    rows = [slice(*rt.Mesh(axes, rank).bounds(ROWS, ("dp",))) for rank in range(4)]
    parts = [[(x[mine], y[mine]) for mine in rows] for x, y in two]
    report = program.run(parts, local=True, steps=5)
    want = in_torch(model, two * 3, 5)
    assert report.losses["step"] == pytest.approx(want, rel=1e-4)
    with pytest.raises(LaunchError, match=r"batch 0: expected .* of \[4, 6\] for rank 0, got \[7"):
        program.run([[batch] * 4 for batch in two], local=True, steps=2)


def failing():
    yield from [next(batches(3))] * 3
    raise KeyError("no such row")


def test_an_error_of_an_iterator_ends_the_run(compiled):
    _, program = compiled
    with pytest.raises(KeyError, match="no such row"):
        program.run(failing(), steps=9)
    x, y = next(batches(4))
    with pytest.raises(shardir.ShardirError, match=r"expected .* of \[7, 6\] in batch 1, got \[3"):
        program.run(iter([(x, y), (x[:3], y[:3])]), steps=9)
    with pytest.raises(LaunchError, match="expected the batches of 9 steps, got those of 1; pass"):
        program.run(iter([(x, y)]), steps=9)
