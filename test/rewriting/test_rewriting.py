"""The shared parts of passes: bases that collect errors, the rewriter, pipelines within passes."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from xdsl.context import Context
from xdsl.dialects.builtin import ModuleOp, f16, f32, f64
from xdsl.dialects.func import FuncOp
from xdsl.ir import Attribute, Block, Operation

from shardir.algebra.layout import Layout
from shardir.analysis.functions import mesh_of
from shardir.diagnostics import Failure, Located, ShardirError
from shardir.dialects import nn
from shardir.dialects.dist import FusibleOp, RedistributeOp, layout_of
from shardir.dialects.nn.creation import dense_values
from shardir.pipelines import build
from shardir.rewriting.bases import Function, FunctionPass, GlobalPass, LocalPass
from shardir.rewriting.functions import bodies
from shardir.rewriting.lowering import lower
from shardir.rewriting.marks import BUDGET, PRESETS, search_result, set_search_result
from shardir.rewriting.registry import run_pipeline
from shardir.rewriting.rewriter import Rewriter
from shardir.syntax.parser import parse
from shardir.syntax.printer import print_module

LAID_OUT = """dist.mesh @m <d = 2>
#x = #dist.layout<@m, [{d}, {}]>
func.func @global(%x: tensor<4x6xf32, #x>) {
  %y = nn.relu %x : (tensor<4x6xf32, #x>) -> tensor<4x6xf32, #x>
  %z = nn.neg %y : (tensor<4x6xf32, #x>) -> tensor<4x6xf32, #x>
  func.return
}
"""
TEXT = (
    LAID_OUT
    + """func.func @other(%x: tensor<4x6xf32>) {
  func.return
}
func.func @local(%x: tensor<2x6xf32, #dist.local<@m, [{d}, {}]>>) {
  func.return
}
"""
)


@dataclass(frozen=True)
class Visit(FunctionPass):
    """Marks the functions that it rewrites, and finds some wrong."""

    name = "visit"
    wrong: tuple[str, ...] = ()
    failing: tuple[str, ...] = ()

    def check(self, f: Function) -> Iterable[Located]:
        if f.name in self.wrong:
            yield f.op, f"@{f.name} is wrong"
            raise ShardirError(f"@{f.name} is very wrong")

    def rewrite(self, f: Function) -> None:
        f.op.attributes["seen"] = nn.UNIT
        if f.name in self.failing:
            raise Failure([(f.op, f"@{f.name} fails")])


class VisitGlobal(GlobalPass, Visit):
    pass


class VisitLocal(LocalPass, Visit):
    pass


def seen(module: ModuleOp) -> list[str]:
    return [f.sym_name.data for f, _ in bodies(module) if "seen" in f.attributes]


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        (Visit, ["global", "other", "local"]),
        (VisitGlobal, ["global", "other"]),
        (VisitLocal, ["local"]),
    ],
)
def test_a_base_finds_the_functions_of_its_view(kind: type[Visit], names: list[str]) -> None:
    module = parse(TEXT)
    kind().apply(Context(), module)
    assert seen(module) == names


def test_errors_of_all_functions_are_one_failure_before_anything_is_rewritten() -> None:
    module = parse(TEXT)
    with pytest.raises(Failure) as e:
        Visit(wrong=("global", "local"), failing=("other",)).apply(Context(), module)
    assert [message for _, message in e.value.errors] == [
        "@global is wrong", "@global is very wrong", "@local is wrong", "@local is very wrong",
    ]  # fmt: skip
    functions = [f for f, _ in bodies(module)]
    assert [op for op, _ in e.value.errors] == [functions[i] for i in (0, 0, 2, 2)]
    assert seen(module) == []


def test_errors_while_rewriting_are_collected_too() -> None:
    module = parse(TEXT)
    with pytest.raises(Failure, match="@global fails\n@local fails"):
        Visit(failing=("global", "local")).apply(Context(), module)
    assert seen(module) == ["global", "other", "local"]


@dataclass(frozen=True)
class VisitMesh(Visit):
    """Concerns the functions with a mesh, of which some have none."""

    lost: tuple[str, ...] = ()

    def concerns(self, f: Function) -> bool:
        if f.name in self.lost:
            raise Failure([(f.op, f"@{f.name} has no mesh")])
        return True


def test_errors_of_meshes_do_not_hide_those_of_checks() -> None:
    module = parse(TEXT)
    with pytest.raises(Failure, match="@other has no mesh\n@local is wrong\n@local is very wrong"):
        VisitMesh(wrong=("other", "local"), lost=("other",)).apply(Context(), module)
    assert seen(module) == []


@pytest.mark.parametrize("name", ["lower-to-spmd", "insert-redistributions"])
def test_a_pass_collects_the_errors_of_several_functions(name: str) -> None:
    """Two functions in each of which the result of the last op has no layout."""
    head, _, function = LAID_OUT.partition("func.func")
    end = function.replace("#x>) -> tensor<4x6xf32, #x>\n  func.return", "#x>) -> tensor<4x6xf32>\n"
                           "  func.return")  # fmt: skip
    assert end != function
    twice = f"{head}func.func{end}func.func{end.replace('@global', '@second')}"
    with pytest.raises(Failure) as e:
        run_pipeline(name, Context(), parse(twice, verify=False))
    assert [message.partition(",")[0] for _, message in e.value.errors] == [
        f"expected a layout of each value in @{f}" for f in ("global", "second")
    ]  # fmt: skip


# ---- the rewriter ----


def test_the_rewriter_inserts_replaces_and_hands_names_on() -> None:
    module = parse(TEXT)
    f, block = next(bodies(module))
    relu, neg, _ = block.ops
    rewriter = Rewriter(mesh_of(f, module))
    x = block.args[0]
    new = rewriter.before(neg).value(nn.AbsOp, x)
    assert isinstance(new.owner, Operation)
    assert layout_of(new) == layout_of(x) and new.owner.location == neg.location
    rewriter.move(relu)
    assert new.owner.next_op is relu
    rewriter.replace(relu, [new])
    assert new.name_hint == "y" and neg.operands[0] is new and relu.parent is None
    scaled = rewriter.after(neg).scale(neg.results[0], 2.0)
    assert [op.name for op in block.ops] == [
        "nn.abs", "nn.neg", "nn.constant", "nn.mul", "func.return",
    ]  # fmt: skip
    assert isinstance(scaled.owner, Operation)
    copy = rewriter.before(scaled.owner).copy(neg)
    assert copy.next_op is scaled.owner and copy.results[0].name_hint == "z"
    assert copy.results[0].type == neg.results[0].type


@pytest.mark.parametrize("number", [65519.0, 65520.0, -1e40, 1e-60, 0.0, -0.0])
@pytest.mark.parametrize(
    ("element", "kind"), [(f16, np.float16), (f32, np.float32), (f64, np.float64)], ids=str
)
def test_a_constant_is_the_nearest_number_of_its_type(
    element: Attribute, kind: Any, number: float
) -> None:
    """It is infinite beyond the largest one, as of an epsilon of 1e40 in f32."""
    op = Rewriter(None, Block()).constant(number, element).owner
    assert isinstance(op, nn.ConstantOp)
    with np.errstate(over="ignore"):
        found = dense_values(op.value)
        assert found == kind(number)
        assert np.signbit(found) == np.signbit(number)


def test_the_same_redistribution_is_made_once() -> None:
    module = parse(TEXT)
    f, block = next(bodies(module))
    first = block.first_op
    assert first is not None
    rewriter = Rewriter(mesh_of(f, module)).before(first)
    x, replicated = block.args[0], Layout("m", ((), ()))
    assert rewriter.redistribute(x, replicated) is rewriter.redistribute(x, replicated)
    assert rewriter.redistribute(x, rewriter.layout(x)) is x
    assert sum(isinstance(op, RedistributeOp) for op in block.ops) == 1
    unsharded = Rewriter(None, block)
    assert unsharded.redistribute(x, replicated) is x
    assert unsharded.constant(1.0, f64).owner is block.last_op


@pytest.mark.parametrize("fusion", [None, 0, 3])
def test_collectives_of_a_redistribution_have_its_fusion_index(fusion: int | None) -> None:
    """Two gathers, along two dimensions."""
    index = "" if fusion is None else f" fusion {fusion}"
    full, split = (f"tensor<4x8xf32, #dist.layout<@m, [{d}]>>" for d in ("{}, {}", "{a}, {b}"))
    module = parse(
        "dist.mesh @m <a = 2, b = 2>\n"
        f"func.func @f(%x: {split}) -> {full} {{\n"
        f"  %y = dist.redistribute %x{index} : ({split}) -> {full}\n"
        f"  func.return %y : {full}\n}}"
    )
    f, block = next(bodies(module))
    mesh = mesh_of(f, module)
    assert mesh is not None
    lower(block, mesh)
    found = [op.fusion for op in block.ops if isinstance(op, FusibleOp)]
    assert len(found) == 2
    assert [None if i is None else i.value.data for i in found] == [fusion] * 2


# ---- what a search reports ----


def test_what_a_search_reports_is_what_a_plan_saves() -> None:
    """Figures, the bytes of a limit, the plan's presets and marks, in their order."""
    found = {"repeats": 1, "objective": 1.5, BUDGET: 1000, PRESETS: "fsdp(d)", "bound": 1.0}
    first, other, *_ = (op for op in parse(TEXT).walk() if isinstance(op, FuncOp))
    assert search_result(first) is None
    set_search_result(first, found)
    set_search_result(other, search_result(first) or {})
    assert [*(search_result(other) or {}).items()] == [*found.items()]
    assert first.attributes == other.attributes


# ---- pipelines within passes ----


def test_a_pass_runs_a_pipeline_by_its_text() -> None:
    one, other = parse(TEXT), parse(TEXT)
    run_pipeline("lower-plan{max-bytes=1KiB}", Context(), one)
    for p in build("lower-plan{max-bytes=1024}"):
        p.apply(Context(), other)
    assert print_module(one) == print_module(other) and "#dist.layout" not in print_module(one)
