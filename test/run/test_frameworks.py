"""The recipes of docs/guides/frameworks.md, against torch on one device."""

import logging
import runpy
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import loop
import pytest
import torch
from support.extent import long_form
from support.forked import run_ranks
from support.pages import FILE, ROOT
from torch import nn
from torch.utils.data import DataLoader, Dataset

import shardir

RECIPES = dict(FILE.findall((ROOT / "docs/guides/frameworks.md").read_text()))
RATE, STEPS = float(torch.tensor(0.01)), 6


@pytest.fixture
def recipe(tmp_path: Path) -> Callable[[str], dict[str, Any]]:
    def namespace(name: str) -> dict[str, Any]:
        (tmp_path / name).write_text(RECIPES[name])
        return runpy.run_path(str(tmp_path / name))

    return namespace


def batches() -> list[Any]:
    return list(loop.batches(1, STEPS))


class Batches(Dataset):
    def __init__(self, source: Iterable[Any]) -> None:
        self.batches = list(source)

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: int) -> Any:
        return self.batches[index]


def halved(step: int) -> float:
    return 0.5 ** (step // 2)


def in_torch(rate: Callable[[int], float]) -> tuple[list[float], nn.Module]:
    torch.manual_seed(0)
    model, optimizer = loop.build()
    optimizer.param_groups[0]["lr"] = RATE
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    losses = []
    for x, labels in batches():
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), labels)
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    return losses, model


def built() -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    return loop.build()


def compiled(model: nn.Module, optimizer: Any, **options: Any) -> Any:
    x, labels = batches()[0]
    return shardir.compile(
        model, x, labels=labels, loss=nn.functional.cross_entropy, optimizer=optimizer,
        mesh="dp = 2", plan="fsdp", evaluate=True, **options,
    )  # fmt: skip


@pytest.fixture
def quiet() -> Iterator[None]:
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


@long_form
@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("quiet")
def test_lightning(recipe: Any, tmp_path: Path) -> None:
    lightning = import_module("lightning")
    losses = list[float]()

    class Seen(lightning.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            losses.append(float(trainer.callback_metrics["loss"]))

    names, (model, optimizer) = recipe("with_lightning.py"), built()
    with compiled(model, optimizer).ranks() as ranks:
        module = names["Sharded"](
            model, ranks, lambda rate: torch.optim.lr_scheduler.LambdaLR(rate, halved)
        )
        trainer = lightning.Trainer(
            max_epochs=1, accelerator="cpu", devices=1, default_root_dir=tmp_path, logger=False,
            enable_progress_bar=False, enable_model_summary=False, callbacks=[Seen()],
        )  # fmt: skip
        valid = DataLoader(Batches(loop.batches(2, 3)), batch_size=None)
        trainer.fit(module, DataLoader(Batches(batches()), batch_size=None), valid)
    expected, trained = in_torch(halved)
    assert losses == pytest.approx(expected, rel=1e-6)  # Lightning logs f32
    torch.testing.assert_close(dict(model.state_dict()), dict(trained.state_dict()))
    assert trainer.global_step == STEPS
    with torch.no_grad():
        means = [nn.functional.cross_entropy(trained(x), y) for x, y in loop.batches(2, 3)]
    assert float(trainer.callback_metrics["val_loss"]) == pytest.approx(
        float(torch.stack(means).mean()), rel=1e-6
    )
    (path,) = tmp_path.rglob("*.ckpt")
    weights = torch.load(path, weights_only=False)["state_dict"]
    torch.testing.assert_close(
        weights, {f"model.{name}": x for name, x in trained.state_dict().items()}
    )


def test_a_loop_of_accelerate(recipe: Any) -> None:
    accelerator = recipe("with_accelerate.py")["Accelerator"](mesh="dp = 2", plan="fsdp")
    original, optimizer = built()
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, halved)
    model, optimizer, loader, loss_of = accelerator.prepare(
        original, optimizer, batches(), nn.functional.cross_entropy
    )
    losses = []
    for x, labels in loader:
        optimizer.zero_grad()
        loss = loss_of(model(x), labels)
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    expected, trained = in_torch(halved)
    assert losses == pytest.approx(expected, rel=1e-12)
    found = accelerator.unwrap_model(model).state_dict()
    torch.testing.assert_close(dict(found), dict(trained.state_dict()))
    accelerator.end_training()


@long_form
@pytest.mark.filterwarnings("ignore")
def test_the_trainer_of_transformers(recipe: Any, tmp_path: Path) -> None:
    transformers = import_module("transformers")
    names = recipe("with_transformers.py")

    def model() -> Any:
        torch.manual_seed(0)
        config = transformers.GPT2Config(
            vocab_size=17, n_positions=8, n_embd=8, n_layer=1, n_head=2, use_cache=False,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )  # fmt: skip
        return transformers.GPT2LMHeadModel(config)

    tokens = torch.randint(17, (16, 8), generator=torch.Generator().manual_seed(1))
    labels = tokens.clone()
    labels[:, 0] = -100  # which Trainer counts, although no model predicts the first token
    rows = [{"input_ids": row, "labels": y} for row, y in zip(tokens, labels, strict=True)]
    args = transformers.TrainingArguments(
        str(tmp_path), per_device_train_batch_size=4, max_steps=STEPS, learning_rate=RATE,
        max_grad_norm=0, use_cpu=True, logging_steps=1, report_to="none", disable_tqdm=True,
        save_steps=STEPS, dataloader_drop_last=True,
    )  # fmt: skip

    def losses(trainer: Any) -> list[float]:
        trainer.train()
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    alone, ours = model(), model()
    expected = losses(transformers.Trainer(alone, args, train_dataset=rows))
    optimizer = torch.optim.AdamW(ours.parameters(), lr=torch.tensor(RATE), weight_decay=0.0)
    batch = {"input_ids": tokens[:4], "labels": labels[:4]}
    program = shardir.compile(ours, batch, optimizer=optimizer, mesh="dp = 2", plan="fsdp")
    with program.ranks() as ranks:
        found = losses(names["ShardedTrainer"](ours, ranks, args, train_dataset=rows))
    assert len(found) == STEPS
    assert found == pytest.approx(expected, rel=1e-4)  # as logged, with four digits
    saved = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / f"checkpoint-{STEPS}")
    torch.testing.assert_close(saved.state_dict(), ours.state_dict(), rtol=0, atol=0)
    # Not by parameters: the bias of keys has no gradient but rounding, which AdamW scales up.
    losses_after = [m(input_ids=tokens, labels=labels).loss.item() for m in (saved, alone)]
    assert losses_after[0] == pytest.approx(losses_after[1], rel=1e-5)


def test_one_callback_writes_to_several(
    recipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    boards, run = import_module("tensorboardX"), None
    names, written = recipe("with_loggers.py"), list[tuple[Any, int]]()
    if find_spec("wandb") is not None:
        monkeypatch.setenv("WANDB_SILENT", "true")
        run = import_module("wandb").init(project="test", mode="offline", dir=tmp_path)
    with boards.SummaryWriter(str(tmp_path / "board")) as board:
        writers = [
            names["to_tensorboard"](board), lambda scalars, step: written.append((scalars, step)),
        ]  # fmt: skip
        if run is not None:
            writers.append(names["to_wandb"](run))
        report = compiled(*built()).run(
            batches(), steps=4, eval_every=2, callback=names["log_to"](*writers), verbose=False
        )
    if run is not None:
        run.finish()
    losses = {step: scalars["loss"] for scalars, step in written if "loss" in scalars}
    assert [losses[step] for step in (1, 2, 3, 4)] == report.losses["step"]
    assert [step for scalars, step in written if "evaluate/loss" in scalars] == [2]
    paths = [*tmp_path.rglob("*.wandb"), *(tmp_path / "board").glob("events*")]
    assert len(paths) == 1 + (run is not None)
    until = time.monotonic() + 30  # wandb's own process may still write
    for path in paths:
        for name in (b"loss", b"steps_per_second"):
            while name not in path.read_bytes() and time.monotonic() < until:
                time.sleep(0.05)
            assert name in path.read_bytes(), path.name


def test_a_profiler_names_statements_and_collectives(tmp_path: Path) -> None:
    directory = compiled(*built()).save(tmp_path / "out")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    script = Path(__file__).with_name("profiled_rank.py")
    for out in run_ranks(script, 2, [directory, port], 60, compared=False):
        names = out.splitlines()
        assert any(name.startswith("shardir.all_gather") for name in names), out
        assert any(name.startswith("shardir.reduce_scatter") for name in names), out
        assert any("F.linear(" in name and "# test_frameworks.py:" in name for name in names), out
        assert "equal losses" in names, out


@pytest.mark.filterwarnings("ignore")
@long_form
def test_ray_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ray = pytest.importorskip("ray")  # in no extra: it is large
    (tmp_path / "with_ray_train.py").write_text(RECIPES["with_ray_train.py"])
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    directory, checkpoints = compiled(*built()).save(tmp_path / "out"), tmp_path / "checkpoints"
    variables = {"PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}
    ray.init(num_cpus=2, include_dashboard=False, runtime_env={"env_vars": variables})
    try:
        main = import_module("with_ray_train").main
        main(str(directory), 2, STEPS, checkpoints=str(checkpoints))
    finally:
        ray.shutdown()
    model, optimizer = built()
    optimizer.param_groups[0]["lr"] = RATE
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(8, 16, generator=generator, dtype=torch.float64)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), torch.arange(8) % 4).backward()
        optimizer.step()
    with compiled(*built()).ranks(resume=checkpoints) as trainer:
        assert trainer.steps_done == STEPS
        torch.testing.assert_close(trainer.state_dict(), dict(model.state_dict()))
