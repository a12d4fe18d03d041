"""check_pass finds what is wrong in a pass, and the reducer the op that is the cause."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import pytest
from xdsl.context import Context
from xdsl.dialects.builtin import ModuleOp, TensorType
from xdsl.dialects.func import FuncOp

import shardir
from shardir.dialects import nn
from shardir.dialects.nn.base import TensorOp
from shardir.extend import Function, GlobalPass, Rewriter, ShardirError
from shardir.testing import check_pass, interpret, random_form, random_program, reduce
from shardir.testing.reducer import least


@dataclass(frozen=True)
class Renamed(GlobalPass):
    """Replace a negation by a negation, which does not change its meaning."""

    name = "renamed"
    kind: ClassVar[type[TensorOp]] = nn.NegOp

    def rewrite(self, f: Function) -> None:
        for op in f.ops:
            if isinstance(op, nn.NegOp) and op.out.name_hint != "negated":
                new = f.rewriter().before(op).create(self.kind, [op.x], [op.out.type])
                Rewriter.replace(op, new.results)
                new.results[0].name_hint = "negated"


@dataclass(frozen=True)
class Miscompiled(Renamed):
    """A negation becomes a square."""

    name = "miscompiled"
    kind: ClassVar[type[TensorOp]] = nn.SquareOp


@dataclass(frozen=True)
class Untyped(GlobalPass):
    """A negation loses the layout of its result, which then no longer fits."""

    name = "untyped"

    def rewrite(self, f: Function) -> None:
        for op in f.ops:
            if isinstance(op, nn.NegOp):
                new = f.rewriter().before(op).create(nn.TransposeOp, [op.x], [op.out.type])
                Rewriter.replace(op, new.results)


@dataclass(frozen=True)
class Growing(GlobalPass):
    """A negation becomes three."""

    name = "growing"

    def rewrite(self, f: Function) -> None:
        for op in f.ops:
            if isinstance(op, nn.NegOp):
                rewriter = f.rewriter().before(op)
                twice = rewriter.create(nn.NegOp, [op.x], [op.out.type])
                twice = rewriter.create(nn.NegOp, twice.results, [op.out.type])
                op.operands[0] = twice.results[0]


NEGATED = """
func.func @f(%x: tensor<4x6xf64>, %w: tensor<6x8xf64>) -> tensor<4x8xf64> {
  %h = nn.matmul %x, %w : (tensor<4x6xf64>, tensor<6x8xf64>) -> tensor<4x8xf64>
  %n = nn.neg %h : (tensor<4x8xf64>) -> tensor<4x8xf64>
  %t = nn.tanh %n : (tensor<4x8xf64>) -> tensor<4x8xf64>
  %y = nn.add %t, %h : (tensor<4x8xf64>, tensor<4x8xf64>) -> tensor<4x8xf64>
  func.return %y : tensor<4x8xf64>
}
"""


def ops_of(module: ModuleOp) -> list[str]:
    return [op.name for f in module.body.ops if isinstance(f, FuncOp) for op in f.body.block.ops]


def test_a_right_pass_breaks_no_law() -> None:
    check_pass(Renamed, [NEGATED], seeds=range(2))


def test_a_pipeline_of_shardir_breaks_no_law() -> None:
    """On random programs with layouts, of the local view after it."""
    check_pass("simplify-communication", before=LOWER, seeds=range(3))


LOWER = "propagate-strategies,insert-redistributions,lower-to-spmd"

WRONG: dict[type[GlobalPass], str] = {
    Miscompiled: "functions compute what they did before",
    Untyped: "it gives a valid program",
    Growing: "a second run changes nothing",
}


@pytest.mark.parametrize("tested", WRONG)
def test_a_wrong_pass_breaks_its_law(tested: type[GlobalPass]) -> None:
    """The report has the least program: the op alone, with sizes of 1 where they do not matter."""
    with pytest.raises(AssertionError) as error:
        check_pass(tested, [NEGATED], seeds=())
    message = str(error.value)
    assert f"{tested.name} breaks the law that {WRONG[tested]}, on program 0" in message
    _, _, text = message.partition(f"for `shard-opt -p '{tested.name}'`: ")
    least = shardir.parse(text[text.index("builtin.module") :])
    assert ops_of(least) == ["nn.neg", "func.return"], text
    (f,) = (op for op in least.body.ops if isinstance(op, FuncOp))
    (x,) = f.function_type.inputs.data
    assert isinstance(x, TensorType)
    assert x.get_shape() == (1, 1)


def test_a_pass_that_changes_nothing_is_said_so() -> None:
    with pytest.raises(AssertionError, match="expected a program that miscompiled changes, got 2"):
        check_pass(Miscompiled, [NEGATED.replace("nn.neg", "nn.tanh")], seeds=())
    check_pass(Growing, [NEGATED], seeds=(), idempotent=False)


def test_a_pass_that_does_not_exist_breaks_no_law() -> None:
    for tested, before in (("fuse-swosh", ""), ("canonicalize", "fuse-swosh")):
        with pytest.raises(ShardirError, match=r"^there is no pass fuse-swosh"):
            check_pass(tested, before=before)


def test_random_programs_are_reduced_to_a_planted_fault() -> None:
    """Of programs with and without layouts: to the op, its inputs alone, and the same each time."""
    seeds = [s for s in range(12) if "nn.neg" in ops_of(random_program(s, 12))][:2]
    assert len(seeds) == 2

    def fails(module: ModuleOp) -> bool:
        """Whether the fault changes what the program computes."""
        before = interpret(module, function="f")
        Miscompiled().apply(Context(), module)
        after = interpret(module, function="f")
        return any(abs(x - y).max(initial=0.0) > 1e-6 for x, y in zip(before, after, strict=True))

    for seed in seeds:
        program = random_program(seed, 12)
        for form in (program, random_form(program, seed)[0]):
            text = str(form)
            small = reduce(form, fails)
            assert str(form) == text
            assert ops_of(small) == ["nn.neg", "func.return"], small
            assert "layout" not in str(small)
            assert str(reduce(form, fails)) == str(small)
    with pytest.raises(ShardirError, match="expected a program that fails"):
        reduce(shardir.parse(NEGATED), lambda module: False)


def test_the_least_subset_is_found() -> None:
    """Of sets of items that fail together, by brute force over what is wanted."""
    for wanted in ([], [0], [5], [2, 7], [0, 3, 9], [1, 2, 3, 4]):
        calls = []

        def fails(
            kept: Sequence[int], wanted: list[int] = wanted, calls: list[int] = calls
        ) -> bool:
            calls.append(len(kept))
            return {*wanted} <= {*kept}

        assert least(range(10), fails) == wanted
        assert len(calls) <= 60
