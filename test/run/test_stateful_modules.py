"""Modules that write to parameters and buffers train on four ranks as in torch on one device."""

import pytest
import torch
from support.extent import extent
from support.modules.judge import in_double
from support.modules.stateful import STATEFUL, loss_of

import shardir

STEPS = 5
PLANS = ("ddp", "fsdp", "megatron(tp) * fsdp(dp)")


def plans(i: int) -> tuple[str, ...]:
    """Plans of a module: all that it can have, or one."""
    case = [*STATEFUL.values()][i]
    known = PLANS if case.paired else ("ddp", "fsdp", "zero1")
    return extent((known[i % 3],), known)


@pytest.mark.parametrize(
    ("name", "plan"),
    [(name, p) for i, name in enumerate(STATEFUL) if extent(i % 6 == 0, True) for p in plans(i)],
)
def test_a_stateful_module_trains_as_in_torch(name: str, plan: str) -> None:
    case = STATEFUL[name]
    with in_double():
        torch.manual_seed(0)
        model = case.made()
        optimizer = torch.optim.SGD(
            [p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9
        )
        batches = [(torch.randn(case.shape), torch.randn(case.shape)) for _ in range(STEPS)]
        program = shardir.compile(
            model, batches[0][0], labels=batches[0][1], loss=loss_of, optimizer=optimizer,
            mesh="dp = 2, tp = 2", plan=plan, trace=case.trace,
        )  # fmt: skip
        report = program.run(batches, steps=STEPS)

        losses = []
        for x, y in batches:
            optimizer.zero_grad()
            loss = loss_of(model(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    torch.testing.assert_close(report.losses["step"], losses, rtol=1e-9, atol=1e-12)
    wanted = {k: x for k, x in program.state_dict().items()}
    found = {k: x.detach() for k, x in model.state_dict().items()}
    torch.testing.assert_close(wanted, found, rtol=1e-9, atol=1e-10)
