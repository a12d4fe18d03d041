"""Two runs of a program of a module are one longer run: of whatever a step updates."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.extent import sampled
from torch import nn
from torch.nn.functional import cross_entropy

import shardir
from shardir.backend.runs import RunError

STEPS, FIRST = 5, 2
G = torch.Generator().manual_seed(3)
BATCHES = [(torch.randn(8, 6, generator=G), torch.randint(3, (8,), generator=G))
           for _ in range(STEPS)]  # fmt: skip


def module(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 8, bias=False),
        nn.BatchNorm1d(8),
        nn.GELU(),
        nn.Dropout(dropout),
        nn.Linear(8, 3),
    )


def compiled(model: nn.Module, optimizer: Any, **options: Any) -> Any:
    x, y = BATCHES[0]
    given: dict[str, Any] = {"mesh": "dp = 2", "plan": "zero1", **options}
    return shardir.compile(
        model, x, labels=y, loss=cross_entropy, optimizer=optimizer, **given
    )  # fmt: skip


def of_torch(model: nn.Module, optimizer: Any, scheduler: Any = None, batches: Any = BATCHES):
    losses = []
    for x, y in batches:
        loss = cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        losses.append(loss.item())
    return losses


def states_of(program: Any) -> dict[str, Any]:
    """Return copies of all states of a program, those of its optimizer too."""
    weights = {f"weight {key}": x.numpy().copy() for key, x in program.state_dict().items()}
    return weights | {key: np.copy(x) for key, x in program.state.states.items()}


def assert_equal_bits(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert ours.keys() == theirs.keys()
    for key, value in ours.items():
        np.testing.assert_array_equal(value, theirs[key], err_msg=key)


def test_two_runs_are_one_run_of_torch() -> None:
    """Moments, steps, the schedule, statistics of a batch norm; and again after a reset."""
    model = module()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    program = compiled(model, optimizer, scheduler=scheduler)
    losses = of_torch(model, optimizer, scheduler)  # the program has values of its own by now
    reports = [program.run(BATCHES[:FIRST], steps=FIRST),
               program.run(BATCHES[FIRST:], steps=STEPS - FIRST)]  # fmt: skip
    assert [r.first["step"] for r in reports] == [1, FIRST + 1]
    got = [loss for r in reports for loss in r.losses["step"]]
    assert got == pytest.approx(losses, rel=1e-5)
    torch.testing.assert_close(program.state_dict(), dict(model.state_dict()), rtol=1e-4, atol=1e-6)
    assert program.steps_done == STEPS
    program.reset()
    assert program.steps_done == 0
    again = program.run(BATCHES[:FIRST], steps=FIRST)
    assert (again.first, again.losses) == (reports[0].first, reports[0].losses)


OPTIONS: dict[str, dict[str, Any]] = {
    "random numbers and a loss scale": {
        "optimizer": "adam, lr = 0.01", "clip": "norm, max = 0.5",
        "loss_scale": "dynamic, initial = 256.0, interval = 2",
    },
    "replicas": {
        "optimizer": "momentum, lr = 0.1, momentum = 0.9", "mesh": None, "plan": None,
        "sync": "nesterov, replicas = 2, every = 3, lr = 0.7, momentum = 0.9",
    },
    "stages": {
        "optimizer": "adamw, lr = 0.01", "mesh": None, "plan": None, "stages": "1f1b, ranks = 2",
        "accumulate": "tokens, microbatches = 2",
    },
}  # fmt: skip


@pytest.mark.parametrize("name", sampled(OPTIONS, 1))
def test_two_runs_have_the_bits_of_one(name: str) -> None:
    """Of dropout, a loss scale, replicas between two synchronisations, and stages."""
    options = OPTIONS[name]
    program = compiled(module(0.2), **options)
    each = 2 if name in ("replicas", "stages") else 1
    batches = [BATCHES[i % STEPS] for i in range(each * STEPS)]
    report = program.run(batches, steps=STEPS)
    once = states_of(program)
    program.reset()
    program.run(batches[: each * FIRST], steps=FIRST)
    rest = program.run(iter(batches[each * FIRST :]), steps=STEPS - FIRST)
    assert rest.losses["step"] == report.losses["step"][FIRST:]
    assert_equal_bits(states_of(program), once)


def test_rows_checkpoints_and_failures(tmp_path: Path) -> None:
    """Rows of files go on; a checkpoint has the number of all steps; a run that fails changes
    nothing; other weights leave the optimizer its moments."""
    x, y = (torch.cat(part).numpy() for part in zip(*BATCHES, strict=True))
    np.savez(tmp_path / "rows.npz", input=x, labels=y)
    given: Any = {"data": {"input,labels": str(tmp_path / "rows.npz")}}
    twice = compiled(module(), "momentum, lr = 0.1, momentum = 0.9", mesh="dp = 1", plan=None)
    report = twice.run(steps=STEPS, **given)
    once = states_of(twice)
    twice.reset()
    first = twice.run(steps=FIRST, checkpoints=tmp_path / "c", dump=tmp_path / "d.npz", **given)
    with pytest.raises(RunError):
        twice.run([(BATCHES[0][0] * float("nan"), BATCHES[0][1])], steps=1)
    assert twice.steps_done == FIRST
    assert first.losses["step"] == report.losses["step"][:FIRST]
    with np.load(tmp_path / "d.npz") as dumped:
        for key, value in twice.state.states.items():
            np.testing.assert_array_equal(dumped[f"states/{key}"], value)
    twice.load_state_dict(twice.state_dict())
    rest = twice.run(steps=STEPS - FIRST, checkpoints=tmp_path / "c", **given)
    assert rest.losses["step"] == report.losses["step"][FIRST:]
    assert_equal_bits(states_of(twice), once)
    assert [p.name for p in sorted((tmp_path / "c").iterdir())] == ["step-00000002",
                                                                    "step-00000005"]  # fmt: skip
    twice.reset()
    resumed = twice.run(steps=STEPS, resume=tmp_path / "c" / "step-00000002", **given)
    assert resumed.losses == rest.losses
    assert_equal_bits(states_of(twice), once)
