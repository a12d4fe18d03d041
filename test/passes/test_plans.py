"""Plans of presets: bytes and layouts against formulas, and plans in the Python interface."""

from dataclasses import asdict
from itertools import pairwise
from math import prod
from pathlib import Path

import pytest
from support.perceptron import BEFORE_RETAINING, SIZES, perceptron
from xdsl.context import Context
from xdsl.dialects.builtin import ModuleOp

import shardir
from shardir.cost import report
from shardir.diagnostics import ShardirError
from shardir.dialects.dist import layout_of
from shardir.dialects.nn.types import unsharded_type
from shardir.passes.apply_plan import ApplyPlan
from shardir.rewriting.annotated_plan import annotated_plan
from shardir.rewriting.functions import bodies
from shardir.syntax.parser import parse
from shardir.syntax.printer import print_module
from shardir.tools import bench

communication, plans, programs = bench.load("bytes"), bench.load("plans"), bench.load("programs")


@pytest.mark.parametrize("model", ["gpt", "bert"])
def test_bytes_of_megatron(model: str) -> None:
    """Megatron's formula (test/bench/bytes.py), of a program without layouts."""
    sizes, dp, tp = communication.Sizes(1), 2, 4
    make, parameters = communication.LANGUAGE_MODELS[model]
    module = plans.bare(parse(make(**asdict(sizes), mesh=(dp, tp), fsdp=False)))
    made = shardir.compile(module, plan="megatron(tp) * ddp(dp)").module
    expected = communication.megatron_bytes(sizes, parameters(sizes), dp, tp)
    assert communication.communicated(made)[1] == expected


def test_bytes_of_megatron_with_sequence_parallelism() -> None:
    """Two reduce-scatters and two all-gathers of an activation forward, and as many backward, of
    (n - 1) / n of its bytes each: as many as Megatron's all-reduces (Korthikanti et al., 2022)."""
    n, shape = 4, (16, 32, 64)
    text = programs.transformer(layers=1, batch=16, seq=32, hidden=64, heads=8, mesh=(1, n))
    made = shardir.compile(plans.bare(parse(text)), plan="megatron+sequence(tp)").module
    activations = 8 * 4 * prod(shape) * (n - 1) / n
    (cost,) = report(made)
    received = sum(bytes for bytes, _ in cost.communication.values())
    assert activations <= received <= activations * 1.02
    reduced = [v for op in made.walk() if op.name == "dist.all_reduce" for v in op.results]
    assert not any(len(unsharded_type(v).get_shape()) > 2 for v in reduced)


@pytest.mark.parametrize("batch", [8, 4096])
def test_fsdp_gathers_weights_for_the_forward_and_the_backward_part(batch: int) -> None:
    """Whatever the batch: P numbers gathered for the forward part, those of all layers but the
    first again for the backward part, P scattered, and the loss; retain-gathered keeps some later.
    Parameters and states are split along dimension 0, as by torch's fully_shard."""
    first, *others = [n * m for n, m in pairwise(SIZES)]
    made = shardir.compile(perceptron(batch, 8), BEFORE_RETAINING, plan="fsdp").module
    total = communication.communicated(made)[1]
    assert total == 4 * (2 * (first + sum(others)) + sum(others) + 1)
    ((_, block),) = bodies(made)
    split = [str(layout_of(v)) for v in block.args if len(unsharded_type(v).get_shape()) == 2]
    assert split == ["@m, [{dp}, {}]"] * (1 + 3 * len(SIZES[1:]))


@pytest.mark.parametrize("preset", ["zero1", "zero2"])
def test_states_of_zero1_are_split(preset: str) -> None:
    """Each gradient is scattered and each new parameter gathered; parameters are replicated."""
    made = shardir.compile(perceptron(8, 8), plan=preset).module
    p = sum(n * m for n, m in pairwise(SIZES))
    assert communication.communicated(made)[1] == 4 * (2 * p + 1)
    ((_, block),) = bodies(made)
    _, *parameters = [v for v in block.args if len(unsharded_type(v).get_shape()) == 2]
    found = {str(v.name_hint): str(layout_of(v)) for v in parameters}
    assert {layout for n, layout in found.items() if "exp" in n} == {"@m, [{dp}, {}]"}
    assert {layout for n, layout in found.items() if "exp" not in n} == {"@m, [{}, {}]"}


def planned(module: ModuleOp, plan: str) -> ModuleOp:
    found = module.clone()
    ApplyPlan(plan=plan).apply(Context(), found)
    return found


PRESETS = ["zero1", "2d", "megatron+sequence(tp) * fsdp(dp)"]


@pytest.mark.parametrize("plan", PRESETS)
def test_a_printed_plan_is_the_plan(plan: str) -> None:
    """And a plan that is applied twice changes nothing."""
    module = plans.bare(parse(programs.transformer(layers=2, mesh=(2, 2))))
    once = planned(module, plan)
    text = print_module(once)
    assert print_module(planned(once, plan)) == text
    printed = str(annotated_plan(once))
    assert print_module(planned(module, printed)) == text
    assert len(printed.splitlines()) < 40


@pytest.mark.parametrize(("name", "written"), [
    ("hsdp", "ddp(dp) * fsdp(tp)"), ("2d", "fsdp(dp) * megatron(tp)"),
    ("tp(tp) * fsdp2(dp)", "megatron(tp) * fsdp(dp)"), ("sp", "megatron+sequence(dp, tp)"),
    ("hsdp(tp, dp)", "ddp(tp) * fsdp(dp)"),
])  # fmt: skip
def test_other_names_of_presets(name: str, written: str) -> None:
    module = plans.bare(parse(programs.transformer(layers=1, mesh=(2, 2))))
    assert print_module(planned(module, name)) == print_module(planned(module, written))


def test_the_plan_of_a_search_has_its_layouts() -> None:
    """Those of parameters, inputs and the states of the optimizer."""
    module = parse(perceptron(1 << 20, 8))
    searched = shardir.compile(module, "distributed-autodiff,search-strategies").module
    again = planned(module, str(annotated_plan(searched)))
    again = shardir.compile(again, "propagate-strategies,distributed-autodiff").module
    ((_, step),), ((_, block),) = bodies(searched), bodies(again)
    found = [layout_of(v) for v in step.args]
    assert found == [layout_of(v) for v in block.args]
    assert len(set(found)) >= 3


def test_plans_in_python(tmp_path: Path) -> None:
    """A file, the text of a plan, and presets; the plan is no part of the program of one device."""
    text, file = perceptron(8, 4), tmp_path / "plan.txt"
    file.write_text("inputs : [{dp}]\n")
    made = shardir.compile(text, plan=file)
    assert shardir.compile(text, plan=str(file)).text == made.text
    assert shardir.compile(text, plan="inputs : [{dp}]").text == made.text
    assert shardir.compile(text, mode="auto", plan="ddp").text != made.text
    assert print_module(made.original) == print_module(parse(text))
    with pytest.raises(ShardirError, match=r"\[N2\] .* the nearest names are layers.0.weight, "):
        shardir.compile(text, plan='"layer.0.weight" : [{dp}]')
    with pytest.raises(
        ShardirError, match=r"got \S*plan\.text, which is neither a file nor presets"
    ):
        shardir.compile(text, plan="plan.text")
