"""A program is compared with the module itself: a wrong import is found, and its op is named."""

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.extent import long_form
from torch import nn
from torch.nn import functional as F

import shardir
from shardir.build import nn as ops
from shardir.diagnostics import ShardirError
from shardir.frontends.torch.aten import TABLE

G = torch.Generator().manual_seed(2)
X, Y = torch.randn(8, 6, generator=G), torch.randint(3, (8,), generator=G)


class Net(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.norm, self.down = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)
        self.dropout = dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.dropout(self.norm(self.up(x)), self.dropout, self.dropout > 0)
        h = F.gelu(h)
        return self.down(h)


GELU_LINE = inspect.getsourcelines(Net)[1] + inspect.getsource(Net).splitlines().index(
    "        h = F.gelu(h)")  # fmt: skip


def compiled(model: nn.Module, **options: Any) -> Any:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    given: dict[str, Any] = {"mesh": "d = 2", "plan": "fsdp", "clip": "norm, max = 0.5",
                             "loss": F.cross_entropy, **options}  # fmt: skip
    return shardir.compile(model, X, labels=Y, optimizer=optimizer, check=True, **given)


def mean_of_rows(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs, labels, reduction="none").mean()


def test_a_program_that_is_right_agrees() -> None:
    """A bias before a batch norm has no gradient but rounding, which Adam makes a step of."""
    model = Net()
    program = compiled(model, accumulate="mean, microbatches = 2", loss=mean_of_rows)
    report = program.check([(X, Y), (X.flip(0), Y)], steps=2)
    names = {v.name for v in report.values}
    assert not report.differing
    assert {"loss of step 1", "loss of step 2", "gradient of up.weight", "down.bias after step 1",
            "norm.running_var after step 1"} <= names  # fmt: skip
    assert program.steps_done == 0
    torch.testing.assert_close(program.state_dict(), Net().state_dict(), rtol=0, atol=0)


@long_form
def test_microbatches_over_tokens_are_compared_as_one_batch() -> None:
    """Their numbers of labels differ; batches that batch norms see apart can't be compared."""
    model, several = Net(), {"accumulate": "tokens, microbatches = 2", "plan": None}
    with pytest.raises(ShardirError, match="expected a module without buffers that change"):
        compiled(model, **several)
    model.add_module("norm", nn.LayerNorm(8))
    some = Y.clone()
    some[1:] = -100
    report = compiled(model, **several).check([(X, some), (X.flip(0), Y)], steps=2)
    assert not report.differing


WRONG: dict[str, tuple[Callable[..., Any], str, str]] = {
    "value": (lambda t, x, approximate="none": ops.gelu(x) * 1.01, "loss of step 1", "at aten"),
    "gradient": (
        lambda t, x, approximate="none": ops.stop_gradient(ops.gelu(x) * 0.5) + ops.gelu(x) * 0.5,
        "gradient of up.weight", "at the gradient of aten",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_import_is_found_and_its_op_is_named(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry, differing, place = WRONG[name]
    monkeypatch.setitem(TABLE, "gelu", entry)
    with pytest.raises(ShardirError) as e:
        compiled(Net(), mesh="d = 1", plan=None)
    first, where, *rows = str(e.value).splitlines()
    assert first.startswith("the program differs from its module in ")
    assert differing in first
    assert re.fullmatch(rf"first {place}\.gelu\.default at .*{__name__}\.py:{GELU_LINE}", where)
    assert any(re.match(rf"{differing}: largest difference .* DIFFER", row) for row in rows)


def test_outputs_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TABLE, "gelu", WRONG["value"][0])
    program = shardir.compile(Net().eval(), X, train=False, mesh="d = 1")
    with pytest.raises(ShardirError, match=rf"in output 0\nfirst at aten\.gelu.*:{GELU_LINE}\n"):
        program.check()


def test_random_numbers_are_others_in_torch() -> None:
    with pytest.raises(
        ShardirError, match=r"got aten\.native_dropout\.default at .*compare it with p ="
    ):
        compiled(Net(0.1))
