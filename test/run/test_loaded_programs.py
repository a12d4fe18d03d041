"""Saved programs that are called from Python, in the process of each rank (shardir.load)."""

import socket
from pathlib import Path

import generate
import pytest
import torch
from support.forked import run_ranks

import shardir
from shardir import ShardirError

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"


def _port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def _tokens(seed: int) -> list[list[int]]:
    torch.manual_seed(seed)
    with torch.no_grad():
        return generate.generate(generate.GPT().eval(), 12).tolist()


def test_tokens_of_all_ranks_are_those_of_one_device(tmp_path):
    generate.save(str(tmp_path / "out"))
    torch.manual_seed(1)
    weights = tmp_path / "other.pt"
    torch.save(generate.GPT().state_dict(), weights)
    script = Path(__file__).parent / "generate_rank.py"
    expected = [str(_tokens(0)), str(_tokens(1)), "[2, 96] of [4, 96]"]
    expected.append("torch.Size([4, 4, 32, 16]) 13")
    for out in run_ranks(script, 4, [tmp_path / "out", weights, _port()], 100):
        assert [line for line in out.splitlines() if line.startswith(("[", "t"))] == expected, out


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """A module that counts its calls, on one device."""

    class Counted(torch.nn.Linear):
        def __init__(self) -> None:
            super().__init__(2, 2)
            self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

        def forward(self, input: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return super().forward(input) * self.calls

    torch.manual_seed(0)
    program = shardir.compile(Counted(), torch.zeros(4, 2), train=False, mode="stand_alone")
    return program.save(tmp_path_factory.mktemp("counted") / "out")


def test_states_are_retained_from_call_to_call(saved):
    program, x = shardir.load(saved), torch.randn(4, 2)
    weight, bias = (program.state_dict()[n] for n in ("weight", "bias"))
    y = torch.nn.functional.linear(x, weight, bias)
    for k in (1, 2, 3):
        torch.testing.assert_close(program(x), k * y)
    assert program.state_dict()["calls"] == 3
    program.reset()
    torch.testing.assert_close(program.call("forward", input=x), y)
    program.load_weights({"weight": weight * 2, "bias": bias * 2, "calls": torch.tensor(4)})
    torch.testing.assert_close(program(x), 5 * 2 * y)


X = torch.zeros(4, 2)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda p: p(), "expected the inputs input of forward, got none"),
        (lambda p: p(X, X), "expected the inputs input of forward, got 2 in order"),
        (lambda p: p(X, input=X), "expected the inputs input of forward, got 1 in order, input"),
        (lambda p: p(X.double()), "expected input of [4, 2] and torch.float32, got [4, 2] and "
                                  "torch.float64"),
        (lambda p: p(X[:3]), "expected input of [4, 2] and torch.float32, got [3, 2] and"),
        (lambda p: p([1.0]), "expected a tensor as input, got a list; use torch.tensor"),
        (lambda p: p.call("foward", X), "expected a function of forward, got foward; did you mean"),
        (lambda p: p.load_weights({"weight": X}), "expected weights of all parameters, got none of "
                                                  "bias; expected weight of [2, 2], got [4, 2]"),
    ],
)  # fmt: skip
def test_wrong_calls(saved, call, message):
    program = shardir.load(saved)
    before = program.state_dict()
    with pytest.raises(ShardirError) as error:
        call(program)
    assert message in str(error.value)
    assert all(torch.equal(x, before[k]) for k, x in program.state_dict().items())


def test_wrong_directories(tmp_path):
    with pytest.raises(ShardirError, match="has no plan"):
        shardir.load(tmp_path)
    generate.save(str(tmp_path / "out"))
    with pytest.raises(ShardirError, match=r'expected 4 ranks \(mesh="dp = 2, tp = 2"\), got 1'):
        shardir.load(tmp_path / "out")
