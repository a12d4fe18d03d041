"""Programs that a loop of the user trains, on ranks that stay up (shardir.start)."""

import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import loop
import pytest
import torch
from support.forked import run_ranks
from torch import nn

import shardir
from shardir import ShardirError
from shardir.backend.runs import RunError
from shardir.backend.torch.launch.local_trainer import LocalTrainer
from shardir.backend.torch.shardir_runtime.run.trainer import Trainer

loss_of = nn.functional.cross_entropy


def _port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


class Eager:
    """The example's model, trained by torch on one device."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model, self.optimizer = loop.build()
        self.optimizer.param_groups[0]["lr"] = float(self.optimizer.param_groups[0]["lr"])

    def step(self, x: torch.Tensor, labels: torch.Tensor) -> float:
        self.optimizer.zero_grad()
        loss = loss_of(self.model(x), labels)
        loss.backward()
        self.optimizer.step()
        return loss.item()

    @torch.no_grad()
    def evaluate(self) -> float:
        losses = [loss_of(self.model(x), labels) for x, labels in loop.batches(2, 3)]
        return torch.stack(losses).mean().item()


@pytest.fixture(scope="module")
def program() -> Any:
    return _compiled(mesh="dp = 2, tp = 2", plan="zero1(dp)")


def _compiled(**options: Any) -> Any:
    torch.manual_seed(0)
    model, optimizer = loop.build()
    (x, labels), = loop.batches(0, 1)  # fmt: skip
    return shardir.compile(
        model, x, labels=labels, loss=loss_of, optimizer=optimizer, evaluate=True, **options
    )


def test_a_loop_trains_as_torch_does_and_its_checkpoint_fits_another_mesh(
    program: Any, tmp_path: Path
) -> None:
    saved, checkpoints = program.save(tmp_path / "out"), tmp_path / "checkpoints"
    script = Path(__file__).parent / "trainer_rank.py"
    outputs = run_ranks(script, 4, [checkpoints, saved, _port()], 100, compared=False)

    eager, expected = Eager(), dict[int, tuple[float, float]]()
    for i, batch in enumerate(loop.batches(1, 6)):
        loss = eager.step(*batch)
        if i % 3 == 2:
            expected[i + 1] = loss, eager.evaluate()
            eager.optimizer.param_groups[0]["lr"] *= 0.5
    with _compiled(mode="stand_alone").start(resume=checkpoints) as trainer:
        assert trainer.steps_done == 6
        assert trainer.lr == eager.optimizer.param_groups[0]["lr"]
        torch.testing.assert_close(trainer.state_dict(), dict(eager.model.state_dict()))
    for i, batch in enumerate(loop.batches(3, 2)):
        expected[i + 7] = eager.step(*batch), 0.0
    norm = sum(float(w.square().sum()) for w in eager.model.state_dict().values())
    for rank, out in enumerate(outputs):
        words = [line.split() for line in out.splitlines() if line.startswith("rank")]
        found = {int(w[2]): (float(w[3]), float(w[4])) for w in words if w[2] != "norm"}
        assert found.keys() == expected.keys(), out
        for step, values in found.items():
            assert values == pytest.approx(expected[step], rel=1e-12), (step, out)
        assert float(words[-1][3]) == pytest.approx(norm, rel=1e-12)
        assert words[-1][4] == "True", "a group of the caller stays"
        assert f"expected input of [2, 16] and torch.float64 on rank {rank}, got [8, 16]" in out


class Tied(nn.Module):
    """Two names of a weight; a buffer and metrics that depend on the mode of the module."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(5, 4), nn.Linear(4, 5)
        self.head.weight = self.embedding.weight
        self.norm = nn.BatchNorm1d(4)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> Any:
        logits = self.head(self.norm(self.embedding(tokens)))
        share = (logits.argmax(-1) == targets).float().mean()
        return loss_of(logits, targets, reduction="sum"), {"share": share}


TOKENS = torch.arange(12).reshape(2, 6) % 5


@pytest.fixture(scope="module")
def tied() -> Any:
    torch.manual_seed(0)
    batch = {"tokens": TOKENS[0], "targets": TOKENS[1]}
    return shardir.compile(
        Tied(), batch, optimizer="sgd, lr = 0.1", mode="stand_alone", evaluate=True
    )


@pytest.fixture(scope="module")
def trainer(tied: Any) -> Trainer:
    return tied.start()


def test_names_metrics_and_modes_are_those_of_the_module(tied: Any) -> None:
    model, trainer = Tied(), tied.start()
    model.load_state_dict(trainer.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    by_name = {"targets": TOKENS[1], "tokens": TOKENS[0]}
    for batch in (by_name, [TOKENS[0].to(torch.uint8), TOKENS[1]]):
        loss = trainer.step(batch)
        optimizer.zero_grad()
        expected, metrics = model(TOKENS[0], TOKENS[1])
        expected.backward()
        optimizer.step()
        torch.testing.assert_close(loss, expected.detach())
        assert trainer.metrics == metrics
    torch.testing.assert_close(trainer.state_dict(), dict(model.state_dict()))
    model.eval()
    batches = [(TOKENS[0], TOKENS[1]), (TOKENS[1], TOKENS[0])]
    with torch.no_grad():
        losses, metrics = zip(*(model(*batch) for batch in batches), strict=True)
    found = trainer.evaluate(iter(batches))
    assert found["loss"] == pytest.approx(float(sum(losses)) / 2, rel=1e-6)
    assert found["share"] == pytest.approx(float(sum(m["share"] for m in metrics)) / 2)
    trainer.load_state_dict(tied.state_dict())
    torch.testing.assert_close(trainer.state_dict(), tied.state_dict())


def _set_rate(trainer: Trainer) -> None:
    trainer.lr = 0.1


X = TOKENS[0]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda t: t.step(X[:3], X), "expected tokens of [6] and torch.int64, got [3] and torch."),
        (lambda t: t.step(X, X.float()),
         "targets of [6] and torch.int64, got [6] and torch.float32; use .to(torch.int64)"),
        (lambda t: t.step(X), "expected the inputs tokens, targets of step, got 1 in order"),
        (lambda t: t.step(X, token=X), "targets of step, got 1 in order, token"),
        (lambda t: t.step(X, 3), "expected a tensor as targets, got int; use torch.as_tensor"),
        (lambda t: t.evaluate([]), "expected batches to evaluate evaluate, got none"),
        (lambda t: t.evaluate([X], "valid"), "expected a function of evaluate, got 'valid'"),
        (lambda t: t.lr, "expected a program whose learning rate is data, got one with a constant"),
        (_set_rate, "compile with lr=torch.tensor(0.001) in the optimizer"),
        (lambda t: t.evaluate(X), "expected an iterable of batches to evaluate evaluate, got Tens"),
        (lambda t: t.evaluate((X, X)), "to evaluate evaluate, got one batch; give [(x, y)]"),
        (lambda t: t.evaluate(3), "of batches to evaluate evaluate, got int; give a list of one"),
        (lambda t: t.load("nowhere"), "expected a folder of checkpoints, got nowhere"),
        (lambda t: t.load(3), "expected the path of a folder, got 3"),
        (lambda t: t.save(None), "expected the path of a folder, got None"),
        (lambda t: t.save(__file__), f"expected a folder that can be written, got {__file__}: "),
        (lambda t: t.load_state_dict({"norm.weight": X}),
         "expected norm.weight of [4], got [6]; all parameters and buffers, got none of "),
        (lambda t: (t.close(), t.step(X, X)), "expected a trainer that is open, got one after"),
    ],
)  # fmt: skip
def test_wrong_calls_change_nothing(
    trainer: Trainer, call: Callable[[Trainer], Any], message: str
) -> None:
    before = trainer.state_dict()
    with pytest.raises(ShardirError) as error:
        call(trainer)
    assert message in str(error.value)
    assert trainer.steps_done == 0
    trainer._is_open = True
    assert all(torch.equal(x, before[name]) for name, x in trainer.state_dict().items())


def test_wrong_starts(tied: Any, tmp_path: Path) -> None:
    with pytest.raises(ShardirError, match="expected a program on rank 0, got none"):
        shardir.start(None)
    with pytest.raises(ShardirError, match="expected a compiled program, or the directory of a"):
        shardir.start(Tied())
    with pytest.raises(ShardirError, match=r"expected 2 ranks, .* got 1; start this script by `to"):
        shardir.compile("dist.mesh @m <dp = 2>\n" + ONE, "train").start()
    with pytest.raises(ShardirError, match="expected a program with a training step, got none am"):
        shardir.compile(ONE, "train").start()
    assert tied.start(seed=3).save(tmp_path) == tmp_path / "step-00000000"
    with pytest.raises(ShardirError, match="expected seed=3, with which it was made, got 0"):
        shardir.start(tied.save(tmp_path / "out"), resume=tmp_path)


ONE_STEP = """
func.func private @loss(
    %w: tensor<2xf32> {train.parameter = "w", train.init = #train.init<constant, value = 1.0>}
) -> tensor<f32> {
  %l = nn.reduce <sum> %w dims <0> : (tensor<2xf32>) -> tensor<f32>
  func.return %l : tensor<f32>
}
train.step @step of @loss <sgd, lr = 0.1>
"""

ONE = """func.func @f() -> tensor<2xf32> {
  %x = nn.constant dense<1.0> : tensor<2xf32> -> tensor<2xf32>
  func.return %x : tensor<2xf32>
}
"""


# ---- ranks of a loop in one process ----


def _are_gone(trainer: LocalTrainer) -> bool:
    """Whether the ranks, the folder and the pipes of a trainer are."""
    ended = all(rank.returncode is not None for rank in trainer._ranks.processes)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(trainer._pipes.readers[0])
    return ended and len(trainer._ranks.processes) > 0 and not trainer._folder.exists()


def test_ranks_of_a_notebook_train_as_torch_does_and_end_at_ctrl_c(program: Any) -> None:
    eager = Eager()

    def broken() -> Iterator[Any]:
        yield next(loop.batches(2, 1))
        raise ValueError("of the loop")

    with pytest.raises(KeyboardInterrupt), program.ranks(4, timeout=60) as trainer:
        for i, (x, labels) in enumerate(loop.batches(1, 4)):
            expected = eager.step(x, labels)
            if i % 2:
                loss = trainer.step((x, labels))
            else:
                shards = [(x[2 * k : 2 * k + 2], labels[2 * k : 2 * k + 2]) for k in range(4)]
                loss = trainer.step(shards, local=True)
            assert loss.item() == pytest.approx(expected, rel=1e-12)
            trainer.lr = eager.optimizer.param_groups[0]["lr"] = 0.02 / (i + 1)
        assert trainer.lr == 0.005
        with pytest.raises(ShardirError, match="expected a learning rate of at least 0, got 'low'"):
            trainer.lr = "low"
        with pytest.raises(ShardirError, match=r"one number for all parameters, trainer\.lr"):
            trainer.lr = [0.1, 0.2]
        with pytest.raises(ShardirError, match="expected an iterable of batches to read ahead"):
            trainer.prefetch(3)
        with pytest.raises(ValueError, match="of the loop"):
            trainer.evaluate(broken())
        with pytest.raises(
            ShardirError, match=r"expected input of \[8, 16\] and torch.float64, got"
        ):
            trainer.evaluate([next(loop.batches(2, 1)), (x[1:], labels)])
        found = trainer.evaluate(loop.batches(2, 3))
        assert found == {"loss": pytest.approx(eager.evaluate(), rel=1e-12)}
        torch.testing.assert_close(trainer.state_dict(), dict(eager.model.state_dict()))
        trainer._pipes.register = lambda selector: signal.raise_signal(signal.SIGINT)
        trainer.step(x, labels)
    assert _are_gone(trainer)


def test_an_interrupt_of_a_cell_leaves_the_trainer_as_it_is_after_the_call(program: Any) -> None:
    eager, batches = Eager(), list(loop.batches(1, 4))
    trainer = program.ranks()
    register = trainer._pipes.register

    def interrupting(selector: Any) -> None:
        trainer._pipes.register = register
        signal.raise_signal(signal.SIGINT)
        register(selector)

    def of_cells() -> Iterator[Any]:
        yield batches[0]
        signal.raise_signal(signal.SIGINT)
        yield batches[1]
        raise ValueError("expected an interrupt before the batch after the next")

    try:
        for i, batch in enumerate(batches):
            expected = eager.step(*batch)
            if i % 2:
                assert trainer.step(*batch).item() == pytest.approx(expected, rel=1e-12)
                with pytest.raises(KeyboardInterrupt):
                    trainer.evaluate(of_cells())
                continue
            trainer._pipes.register = interrupting
            with pytest.raises(KeyboardInterrupt):
                trainer.step(*batch)
        assert trainer.steps_done == 4
        torch.testing.assert_close(trainer.state_dict(), dict(eager.model.state_dict()))
    finally:
        trainer.close()
    with pytest.raises(ShardirError, match="expected a trainer that is open, got one whose ranks"):
        trainer.step(*batch)
    assert _are_gone(trainer)


def test_ranks_end_with_their_loop_and_say_what_fails(tied: Any, tmp_path: Path) -> None:
    with tied.ranks() as trainer:
        before = trainer.state_dict()
        assert before.keys() == tied.state_dict().keys()
        assert trainer.save(tmp_path) == tmp_path / "step-00000000"
        trainer.step(X, X)
        assert trainer.metrics["share"].dtype == torch.float32
        with pytest.raises(ShardirError, match="expected a program whose learning rate is data"):
            trainer.lr = 0.1
        assert trainer.save(tmp_path / "again") == tmp_path / "again" / "step-00000001"
        with pytest.raises(ShardirError, match="expected no checkpoint of step 1 yet, got"):
            trainer.save(tmp_path / "again")  # as a cell that is run again
        with pytest.raises(ShardirError, match="expected a number of checkpoints of at least 0 as"):
            trainer.save(tmp_path, keep=-1)
        (tmp_path / "file").touch()
        with pytest.raises(ShardirError, match="expected a folder that can be written, got"):
            trainer.save(tmp_path / "file")
        with pytest.raises(ShardirError, match="expected an iterable of batches to evaluate"):
            trainer.evaluate(X)
        with pytest.raises(ShardirError, match=r"expected a tensor of real numbers as .*ndarray"):
            trainer.load_state_dict({name: x.numpy() for name, x in before.items()})
        whole = {name: (10 * x).to(torch.uint8) for name, x in before.items()}
        trainer.load_state_dict(whole)
        found = trainer.state_dict()
        assert all(torch.equal(found[name], x.to(found[name].dtype)) for name, x in whole.items())
    assert _are_gone(trainer)
    with tied.ranks(resume=tmp_path) as trainer:
        assert trainer.steps_done == 0
        with pytest.raises(ShardirError, match=r"expected no checkpoint after step 0, got .*again"):
            trainer.save(tmp_path / "again")
        torch.testing.assert_close(trainer.state_dict(), before)
        trainer.load_state_dict(before)
        other = tmp_path / "other"
        shardir.compile(ONE_STEP, "train").start(seed=3).save(other)
        with pytest.raises(ShardirError, match="all states of the program, got none of head"):
            trainer.load(other)
        with pytest.raises(
            RunError, match="rank 0 failed: IndexError: tokens: expected 0 to 4, got 9 in row 0 "
        ):
            trainer.step(X + 9, X)
        with pytest.raises(ShardirError, match="expected a trainer that is open"):
            trainer.step(X, X)
    assert _are_gone(trainer)
    with tied.ranks() as trainer, pytest.raises(RunError, match="tokens: expected 0 to 4, got 9"):
        trainer.evaluate([(X + 9, X), *[(X, X)] * 300])
    with pytest.raises(ShardirError, match=r"expected 1 ranks, for mesh @ <>, got 3"):
        tied.ranks(3)
    with pytest.raises(ShardirError, match="got timout; did you mean timeout"):
        tied.ranks(timout=3)
