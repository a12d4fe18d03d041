"""Several training steps over the same parameters (shardir.Step), equal to torch on one device."""

import warnings
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.nn.functional import binary_cross_entropy_with_logits, mse_loss

import shardir
from shardir import Inference, ShardirError, Step


class Gan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.maker = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8))
        self.critic = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.0), nn.ReLU(), nn.Linear(16, 1))


def critic_loss(gan: Gan, real: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    good, bad = gan.critic(real), gan.critic(gan.maker(noise).detach())
    of_good = binary_cross_entropy_with_logits(good, torch.ones_like(good))
    return of_good + binary_cross_entropy_with_logits(bad, torch.zeros_like(bad))


def maker_loss(gan: Gan, noise: torch.Tensor) -> Any:
    judged = gan.critic(gan.maker(noise))
    loss = binary_cross_entropy_with_logits(judged, torch.ones_like(judged))
    return loss, {"share": (judged > 0).double().mean()}


def samples(gan: Gan, noise: torch.Tensor) -> torch.Tensor:
    return gan.maker(noise)


REAL, NOISE = (
    torch.randn(16, n, generator=torch.Generator().manual_seed(n)).double() for n in (8, 4)
)


RATE = torch.tensor(1e-2, dtype=torch.float64)


def adam(module: nn.Module, lr: Any = 1e-2) -> optim.Optimizer:
    return optim.Adam(module.parameters(), lr=lr)


def gan() -> Gan:
    torch.manual_seed(0)
    return Gan().double()


def stepped(optimizer: optim.Optimizer, loss: torch.Tensor) -> float:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def compiled(model: Gan, **options: Any) -> Any:
    return shardir.compile(
        model,
        steps={
            "critic": Step(critic_loss, (REAL, NOISE), optimizer=adam(model.critic)),
            "maker": Step(maker_loss, NOISE, optimizer=adam(model.maker, RATE), ema=0.9),
            "samples": Inference(samples, NOISE),
        },
        **options,
    )


@pytest.fixture(scope="module")
def alone() -> Any:
    """The program on one device."""
    return compiled(gan(), mode="stand_alone")


@pytest.mark.parametrize(
    "options", [{"mesh": "dp = 2", "plan": "zero1"}, {"mesh": "dp = 2, tp = 2", "mode": "auto"}]
)
def test_two_steps_train_a_gan_as_torch_does(
    options: dict[str, str], alone: Any, tmp_path: Any
) -> None:
    """On 2 and 4 ranks: each step trains the parameters of its optimizer, and reads the others. The
    averages follow the parameters after each step. Another mesh goes on from a checkpoint."""
    program, eager = compiled(gan(), **options), gan()
    average = deepcopy(eager.maker)
    of_critic, of_maker = adam(eager.critic), adam(eager.maker)

    def step(trainer: Any) -> None:
        expected = stepped(of_critic, critic_loss(eager, REAL, NOISE))
        assert trainer["critic"].step(REAL, NOISE).item() == pytest.approx(expected, rel=1e-12)
        loss, metrics = maker_loss(eager, NOISE)
        expected = stepped(of_maker, loss)
        assert trainer["maker"].step(noise=NOISE).item() == pytest.approx(expected, rel=1e-12)
        assert trainer["maker"].metrics["share"] == metrics["share"]
        with torch.no_grad():
            for x, p in zip(average.parameters(), eager.maker.parameters(), strict=True):
                x.lerp_(p, 0.1)

    def compare(trainer: Any) -> None:
        close = torch.testing.assert_close
        close(trainer.state_dict(), dict(eager.state_dict()), rtol=1e-12, atol=1e-12)
        averages = {f"maker.{name}": x for name, x in average.state_dict().items()}
        averages |= {f"critic.{name}": x for name, x in eager.critic.state_dict().items()}
        close(trainer.state_dict(ema=True), averages, rtol=1e-12, atol=1e-12)

    assert not program.check().differing
    with program.ranks() as trainer:
        for _ in range(3):
            step(trainer)
        trainer["maker"].lr = of_maker.param_groups[0]["lr"] = 0.005
        step(trainer)
        with torch.no_grad():
            torch.testing.assert_close(trainer.call("samples", NOISE), eager.maker(NOISE))
            torch.testing.assert_close(trainer.call("samples", NOISE, ema=True), average(NOISE))
        compare(trainer)
        trainer.save(tmp_path)
        with pytest.raises(ShardirError, match="of a step of critic, maker, got none; use trainer"):
            trainer.step(REAL, NOISE)
        with pytest.raises(ShardirError, match="expected a step of critic, maker, got 'judge'"):
            trainer["judge"]
    alone.reset()
    alone.load_checkpoint(tmp_path)
    assert alone.steps_done == 8
    torch.testing.assert_close(alone.state_dict(), dict(eager.state_dict()))
    for name, optimizer in (("critic", of_critic), ("maker", of_maker)):
        found = alone.optimizer_state_dict(name)
        torch.testing.assert_close(found["state"], optimizer.state_dict()["state"])
    assert float(alone.optimizer_state_dict("maker")["param_groups"][0]["lr"]) == 0.005
    with pytest.raises(ShardirError, match="a checkpoint of this program, got one without"):
        compile_one(Step(near_zero, NOISE, optimizer=adam(MODEL)), mesh="d = 1").load_checkpoint(
            tmp_path
        )
    alone.reset()
    with alone.start(resume=tmp_path) as trainer:
        assert trainer.steps_done == 8 and trainer["maker"].lr == 0.005
        step(trainer)
        compare(trainer)


def near_zero(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def near_labels(model: nn.Module, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return mse_loss(model(x), labels)


@pytest.mark.parametrize("shared", [True, False])
def test_optimizers_over_the_same_parameters(shared: bool) -> None:
    """One optimizer of two steps has its states, and counts its steps, once; two have their own.
    The first step has averages, which are those of the parameters after its own calls."""
    model = nn.Linear(4, 8).double()
    eager, average = deepcopy(model), deepcopy(model)
    losses = {"zero": (near_zero, (NOISE,)), "labels": (near_labels, (NOISE, REAL))}

    def optimizers(module: nn.Module) -> dict[str, optim.Optimizer]:
        first = adam(module)
        return {"zero": first, "labels": first if shared else adam(module)}

    steps = {
        name: Step(function, inputs, optimizer=optimizer, ema=0.5 if name == "zero" else None)
        for (name, optimizer), (function, inputs) in zip(
            optimizers(model).items(), losses.values(), strict=True
        )
    }
    program = shardir.compile(model, steps=steps, mode="stand_alone")
    by_torch = optimizers(eager)
    with program.start() as trainer:
        for name in ("zero", "labels", "labels", "zero"):
            function, inputs = losses[name]
            expected = stepped(by_torch[name], function(eager, *inputs))
            found = trainer[name].step(*inputs).item()
            assert found == pytest.approx(expected, rel=1e-12)
            if name == "zero":
                with torch.no_grad():
                    for x, p in zip(average.parameters(), eager.parameters(), strict=True):
                        x.lerp_(p, 0.5)
        for ema, module in ((False, eager), (True, average)):
            torch.testing.assert_close(
                trainer.state_dict(ema=ema), dict(module.state_dict()), rtol=1e-12, atol=1e-15
            )


def test_a_teacher_is_in_the_module_and_modules_may_be_in_a_dict() -> None:
    models = {"teacher": nn.Linear(4, 8).double(), "student": nn.Linear(4, 8).double()}
    eager = deepcopy(models)

    def distilled(models: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            target = models["teacher"](x)
        return mse_loss(models["student"](x), target)

    optimizer = optim.SGD(models["student"].parameters(), 0.1)
    step = Step(distilled, NOISE, optimizer=optimizer, separate_update=True)
    # The step has the name of a module: its states are none of student.weight.
    program = shardir.compile(models, steps={"student": step}, mode="stand_alone")
    optimizer = optim.SGD(eager["student"].parameters(), 0.1)
    with program.start() as trainer:
        for _ in range(3):
            expected = stepped(optimizer, distilled(eager, NOISE))
            assert trainer.step(NOISE).item() == pytest.approx(expected, rel=1e-12)
    assert program.state_dict().keys() == {
        f"{name}.{x}" for name in models for x in ("weight", "bias")
    }


def test_a_check_compares_all_functions_with_the_module() -> None:
    """With a schedule, clipping and microbatches. What a function does later is not the program."""
    model, factor = nn.Linear(4, 8).double(), [1.0]
    optimizer = adam(model)
    scheduler = optim.lr_scheduler.StepLR(optimizer, 2)

    def scaled(model: nn.Module, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return factor[0] * mse_loss(model(x), labels)

    program = shardir.compile(
        model, mode="stand_alone",
        steps={
            "zero": Step(
                near_zero, {"x": NOISE}, optimizer=optimizer, clip="value, max = 0.1",
                scheduler=scheduler,
                accumulate="sum, microbatches = 2",
            ),
            "labels": Step(scaled, (NOISE, REAL), optimizer=optimizer, scheduler=scheduler),
            "out": Inference(lambda model, x: (model(x), model.weight.sum()), NOISE),
        },
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch's, of the order of optimizers and schedulers
        table = str(program.check(rounds=3))
    assert "loss of labels in round 3" in table and "result 1 of out" in table
    steps = {
        name: Step(near_zero, NOISE, optimizer=optimizer, scheduler=s)
        for name, s in (("a", scheduler), ("b", None))
    }
    with pytest.raises(ShardirError, match="expected one scheduler of a and b, which share an opt"):
        shardir.compile(model, steps=steps, mode="stand_alone")
    factor[0] = 1.1
    with pytest.raises(ShardirError, match="differs from its module in loss of labels in round 1"):
        program.check()


def test_a_run_goes_on_where_a_loop_has_ended(tmp_path: Any) -> None:
    """With the states of its optimizer, in torch too."""
    model = nn.Linear(4, 8).double()
    eager = deepcopy(model)
    program = shardir.compile(
        model, NOISE, labels=REAL, loss=mse_loss, optimizer=adam(model), mode="stand_alone"
    )
    with program.start() as trainer:
        for _ in range(2):
            trainer.step(NOISE, REAL)
        trainer.save(tmp_path)
    program.load_checkpoint(tmp_path)
    optimizer = adam(eager)
    for _ in range(2):
        stepped(optimizer, mse_loss(eager(NOISE), REAL))
    close = torch.testing.assert_close
    close(program.optimizer_state_dict()["state"], optimizer.state_dict()["state"])
    losses = program.run([(NOISE, REAL)], steps=2).losses["step"]
    close(losses, [stepped(optimizer, mse_loss(eager(NOISE), REAL)) for _ in range(2)])
    close(program.state_dict(), dict(eager.state_dict()))
    assert program.steps_done == 4
    with pytest.raises(ShardirError, match="expected a folder of checkpoints, got"):
        program.load_checkpoint(tmp_path / "none")


def test_averages_of_a_run_are_those_of_torch() -> None:
    """After it, the program has them for a module's `load_state_dict`."""
    model = nn.Linear(4, 8).double()
    eager, average = deepcopy(model), deepcopy(model)
    program = shardir.compile(
        model, NOISE, labels=REAL, loss=mse_loss, optimizer=adam(model), ema=0.5, mode="stand_alone"
    )
    torch.testing.assert_close(program.state_dict(ema=True), dict(model.state_dict()))
    program.run([(NOISE, REAL)], steps=3)
    optimizer = adam(eager)
    for _ in range(3):
        stepped(optimizer, mse_loss(eager(NOISE), REAL))
        with torch.no_grad():
            for x, p in zip(average.parameters(), eager.parameters(), strict=True):
                x.lerp_(p, 0.5)
    torch.testing.assert_close(program.state_dict(ema=True), dict(average.state_dict()))
    of_torch = optimizer.state_dict()["state"][0]
    assert program.optimizer_state_dict()["state"][0].keys() == of_torch.keys()


class Two(nn.Module):
    """Two layers, of which the loss does not use one, and the other has two names."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(4, 8), nn.Linear(2, 2)
        self.tied = self.used

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)


@pytest.mark.parametrize(
    "options", [{"plan": "zero1"}, {"mode": "auto", "loss_scale": "dynamic, initial = 8.0"}]
)
def test_gradients_may_be_looked_at_before_an_update(options: dict[str, Any]) -> None:
    """On 2 ranks: of two batches, each with its weight, and clipped; then of one."""
    torch.manual_seed(0)
    model = Two().double()
    eager, optimizer = deepcopy(model), optim.AdamW(model.parameters(), 0.1)
    by_torch = optim.AdamW(eager.parameters(), 0.1)
    program = shardir.compile(
        model, NOISE, labels=REAL, loss=mse_loss, optimizer=optimizer, clip="norm, max = 0.5",
        separate_update=True, ema=0.5, mesh="dp = 2", **options,
    )  # fmt: skip
    with program.ranks() as trainer:
        for weights in ((0.25, 2.0), (1.0,)):
            by_torch.zero_grad()
            for k, weight in enumerate(weights):
                loss = mse_loss(eager(NOISE + k), REAL)
                (weight * loss).backward()
                found = trainer.backward(NOISE + k, REAL, weight=weight)
                assert found.item() == pytest.approx(loss.item(), rel=1e-12)
            named = eager.named_parameters(remove_duplicate=False)
            gradients = {name: p.grad for name, p in named if p.grad is not None}
            assert gradients.keys() == trainer.grads().keys()
            torch.testing.assert_close(trainer.grads(), gradients, rtol=1e-12, atol=1e-14)
            norm = nn.utils.clip_grad_norm_(eager.parameters(), 0.5)
            assert trainer.grad_norm == pytest.approx(norm.item(), rel=1e-12)
            by_torch.step()
            trainer.update()
            assert trainer.grad_norm == 0.0
            with pytest.raises(
                ShardirError, match="expected gradients for the update of step, got"
            ):
                trainer.update()
        by_torch.zero_grad()
        loss = mse_loss(eager(NOISE), REAL)
        loss.backward()
        nn.utils.clip_grad_norm_(eager.parameters(), 0.5)
        by_torch.step()
        assert trainer.step(NOISE, REAL).item() == pytest.approx(loss.item(), rel=1e-12)
        assert trainer.steps_done == 3
        found = trainer.state_dict()
        assert not torch.equal(trainer.state_dict(ema=True)["used.weight"], found["used.weight"])
        with pytest.raises(ShardirError, match="expected a finite number as weight, got nan"):
            trainer.backward(NOISE, REAL, weight=float("nan"))
        with pytest.raises(ShardirError, match=r"got the number 0.5 .*; write weight=0.5"):
            trainer.backward(NOISE, REAL, 0.5)
    torch.testing.assert_close(found, dict(eager.state_dict()), rtol=1e-10, atol=1e-12)


def both(model: nn.Module, x: torch.Tensor) -> Any:
    y = model(x)
    return {"share": (y > 0).double().mean(), "loss": y.mean()}


def test_results_of_functions_have_the_names_of_a_loss_and_its_metrics() -> None:
    """In the order in which they are returned. Without scalars of floats there is no evaluation."""
    model = nn.Linear(4, 8).double()
    step = Step(lambda model, x: model(x).square().mean(), NOISE, optimizer="sgd, lr = 0.1")
    program = shardir.compile(
        model, mode="stand_alone",
        steps={"step": step, "both": Inference(both, NOISE), "none": Inference(most_likely, NOISE),
               "mean": Inference(lambda model, x: model(x).mean(), NOISE)},
    )  # fmt: skip
    expected = {name: x.item() for name, x in both(model, NOISE).items()}
    with program.start() as trainer:
        assert trainer.evaluate([NOISE], "both") == pytest.approx(expected, rel=1e-12)
        mean = trainer.evaluate([NOISE], "mean")
        assert mean == pytest.approx({"loss": expected["loss"]}, rel=1e-12)
        with pytest.raises(ShardirError, match="expected a scalar of floats among the results of"):
            trainer.evaluate([NOISE], "none")


def most_likely(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).argmax(-1)


def test_updates_are_separate_where_a_program_says_so() -> None:
    model = nn.Linear(4, 8).double()
    program = shardir.compile(
        model, NOISE, labels=REAL, loss=mse_loss, optimizer=adam(model), mode="stand_alone"
    )
    with program.start() as trainer:
        for call in (trainer.update, trainer.grads, lambda: trainer.backward(NOISE, REAL)):
            with pytest.raises(ShardirError, match="got step; compile with separate_update=True"):
                call()


MODEL = nn.Linear(4, 8).double()
NO_FUNCTION: Any = torch.ones(2)
NO_MODULE: Any = {"a": 3}
TEXT: Any = "text"


def compile_one(step: Any, name: Any = "step", **options: Any) -> Any:
    return shardir.compile(MODEL, steps={name: step}, **options)


@pytest.mark.parametrize(
    ("work", "message"),
    [
        (lambda: shardir.compile(MODEL, steps={}), "expected steps by name, {'critic': shardir.St"),
        (lambda: compile_one(3), "expected a shardir.Step or shardir.Inference as step, got 3"),
        (lambda: compile_one(Step(near_zero, NOISE, optimizer=adam(MODEL)), "a-b"),
         "expected names of Python as names of steps, got 'a-b'"),
        (lambda: compile_one(Step(NO_FUNCTION, NOISE, optimizer="sgd, lr = 0.1")),
         "expected a function of the module in step, got a Tensor"),
        (lambda: shardir.compile(NO_MODULE, steps={"b": Inference(near_zero)}),
         "expected a module as a, got 3"),
        (lambda: shardir.compile(TEXT, steps={"b": Inference(near_zero)}),
         "expected a Module or a dict as model, got 'text'"),
        (lambda: compile_one(Inference(near_zero, NOISE)),
         "expected a step that trains, got functions alone; compile each with train=False"),
        (lambda: compile_one(Step(near_zero, NOISE, optimizer="sgd, lr = 0.1", parameters=[TEXT])),
         "expected parameters of the module as parameters of near_zero, got 'text'"),
        (lambda: compile_one(
            Step(near_zero, NOISE, optimizer="sgd, lr = 0.1", parameters=MODEL.weight)),
         "expected parameters of the module as parameters of near_zero, got a Tensor"),
        (lambda: compile_one(Step(near_zero, NOISE, optimizer=adam(MODEL)), loss=mse_loss),
         "expected an option of compile with steps, got loss"),
        (lambda: compile_one(Step(near_zero, NOISE, optimizer=adam(MODEL)), clip="norm, max = 1.0"),
         "got clip; give it to shardir.Step(..., clip=...)"),
        (lambda: compile_one(Step(near_zero, (NOISE, REAL), optimizer=adam(MODEL))),
         "step: expected the arguments near_zero(x), got 2 in order: too many positional"),
        (lambda: compile_one(Step(lambda m, x: m(x), NOISE, optimizer=adam(MODEL))),
         "step: expected a scalar loss among the model's outputs, got a tensor of [16, 8]"),
        (lambda: compile_one(Step(near_zero, NOISE, optimizer=adam(nn.Linear(2, 2)))),
         "step: "),
        (lambda: compile_one(
            Step(near_zero, NOISE, optimizer=adam(MODEL), parameters=MODEL.parameters())),
         "expected parameters beside a text or a function as optimizer of near_zero, got an optim"),
        (lambda: compile_one(Step(near_zero, NOISE, optimizer="sgd, lr = 0.1")).check(),
         "expected optimizers of torch.optim, which torch has, got a text in step"),
        (lambda: compile_one(
            Step(lambda m, x: nn.functional.dropout(m(x)).mean(), NOISE, optimizer=adam(MODEL))
         ).check(), "expected functions without random numbers, which are others in torch, got at"),
        (lambda: compile_one(Step(near_zero, NOISE, optimizer=adam(MODEL))).run(),
         "expected a program with one training step, got step; call them in a loop of yours: with"),
        (lambda: compile_one(Step(near_zero, NOISE, optimizer=adam(MODEL))).state_dict(ema=True),
         "expected a program with moving averages, got none; compile with ema=0.999"),
    ],
)  # fmt: skip
def test_wrong_steps_are_one_message(work: Callable[[], object], message: str) -> None:
    with pytest.raises(ShardirError) as error:
        work()
    assert message in str(error.value)
