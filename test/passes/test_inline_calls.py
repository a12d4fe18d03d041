"""inline-calls: locations of inlined ops, chains of calls, and the limit of ops."""

from collections import Counter

import pytest
from support.harness import (
    apply,
    defined,
    function,
)

from shardir.diagnostics import Failure
from shardir.passes import inline_calls
from shardir.syntax.parser import parse

CALLS = """func.func private @g(%x: tensor<4xf32>) -> tensor<4xf32> {
  %y = nn.relu %x : (tensor<4xf32>) -> tensor<4xf32>
  %z = nn.neg %y : (tensor<4xf32>) -> tensor<4xf32>
  func.return %z : tensor<4xf32>
}
func.func @f(%x: tensor<4xf32>) -> tensor<4xf32> {
  %y = func.call @g(%x) : (tensor<4xf32>) -> tensor<4xf32>
  %z = func.call @g(%y) : (tensor<4xf32>) -> tensor<4xf32>
  func.return %z : tensor<4xf32>
}"""


def test_inlined_ops_have_the_locations_of_the_function_that_is_called():
    module = parse(CALLS)
    *called, _ = function(module, "g").body.block.ops
    wanted = [op.location for op in called] * 2
    assert len({*wanted}) == 2
    *inlined, _ = function(apply(module, "inline-calls"), "f").body.block.ops
    assert [op.location for op in inlined] == wanted


def calling(depth: int, calls: int) -> str:
    """A program of functions, each of which calls the next one `calls` times."""
    value = "tensor<4xf32>"
    functions = [
        f"func.func {'private ' * (i > 0)}@f{i}(%v0: {value}) -> {value} {{"
        + "".join(
            f"\n%v{k + 1} = func.call @f{i + 1}(%v{k}) : ({value}) -> {value}" for k in range(calls)
        )
        + f"\nfunc.return %v{calls} : {value}\n}}\n"
        for i in range(depth)
    ]
    end = f"func.func private @f{depth}(%v0: {value}) -> {value} {{\n%v1 = nn.relu %v0 : ({value})"
    return "".join(functions) + f"{end} -> {value}\nfunc.return %v1 : {value}\n}}\n"


def test_calls_of_calls_are_inlined_at_once():
    module = apply(parse(calling(8, 2)), "inline-calls")
    assert defined(module) == {"f0"}
    assert Counter(op.name for op in function(module, "f0").body.block.ops)["nn.relu"] == 2**8


def test_chains_of_calls_are_as_deep_as_they_are():
    """No function of Python's calls itself for each."""
    module = apply(parse(calling(300, 1)), "inline-calls")
    relu, _ = function(module, "f0").body.block.ops
    assert relu.name == "nn.relu"


def test_a_program_that_would_be_too_large_is_refused_before_it_is_made():
    with pytest.raises(Failure, match=f"at most 200000 ops, got {2**60 - 2} up to @f0"):
        apply(parse(calling(60, 2)), "inline-calls")


def test_only_ops_that_calls_add_are_limited(monkeypatch: pytest.MonkeyPatch):
    """One op in the place of its call is no more."""
    monkeypatch.setattr(inline_calls, "MAX_OPS", 0)
    assert defined(apply(parse(calling(1, 3)), "inline-calls")) == {"f0"}
    with pytest.raises(Failure, match="at most 0 ops, got 2 up to @f0"):
        apply(parse(calling(2, 2)), "inline-calls")
