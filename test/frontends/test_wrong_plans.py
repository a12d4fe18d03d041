"""Wrong plans of models: each has one message with a fix."""

from collections.abc import Callable

import pytest
from support.extent import sampled
from support.modules.wrong_uses import assert_one_message, compiled


def lines(plan: str) -> Callable[[], object]:
    return lambda: compiled(mesh="dp = 2", plan=plan)


WRONG: dict[str, tuple[Callable[[], object], str]] = {
    "plan: offload": (
        lambda: compiled(mesh="dp = 2", plan='"0.weight": offload'),
        'got offload; write the layout in host memory: "PATTERN" : [{axis}, ...] on host',
    ),
    "plan: stage": (
        lambda: compiled(mesh="dp = 2", plan='"0.weight": stage = 0'),
        'got stage; stages are of values: values "PATTERN" : stage = 1',
    ),
    "plan: axis": (
        lambda: compiled(mesh="dp = 2", plan='"*.weight": [{tp}, {}]'),
        "[L2] dimension 0: expected an axis of mesh @m (dp), got tp",
    ),
    "plan: pattern": (
        lambda: compiled(mesh="dp = 2", plan='"0.wieght": [{dp}, {}]'),
        '[N2] expected a pattern of parameters of the program, got "0.wieght"',
    ),
    "plan: preset": (
        lambda: compiled(mesh="dp = 2", plan="fspd"),
        "[N4] expected a preset, got fspd; did you mean fsdp?",
    ),
    "plan: preset axis": (
        lambda: compiled(mesh="dp = 2", plan="megatron(tp)"),
        "[N4] expected an axis of mesh @m (dp), got tp; correct the axis",
    ),
    "plan: axis twice": (
        lambda: compiled(mesh="dp = 2", plan='"0.weight": [{dp}, {dp}]'),
        "[L3] expected axes that do not overlap, got dp for dimension 0 and dp for dimension 1",
    ),
    "plan: mark": (
        lambda: compiled(mesh="dp = 2", plan='"0.weight": [{dp}, {}], recomptue'),
        "strategy, uses, got recomptue; did you mean recompute?",
    ),
    "plan: file": (
        lambda: compiled(mesh="dp = 2", plan="nowhere.plan"),
        "expected a plan, got nowhere.plan, which is neither a file nor presets; write",
    ),
    "plan: no mesh": (
        lambda: compiled(plan="fsdp"),
        "expected a mesh for the layouts of @forward, got none; declare one: dist.mesh @m <dp",
    ),
    "plan: preset in a product": (
        lines("megatorn(dp)"),
        "plan:1:1: error: [N4] expected a preset, got megatorn; did you mean megatron?",
    ),
    "plan: sum": (
        lines("megatron(dp) + fsdp(tp)"),
        "expected a plan, got megatron(dp) + fsdp(tp), which is neither a file nor presets",
    ),
    "plan: dimensions": (
        lines('"0.weight" : [{dp}, {}, {}]'),
        "[L1] expected a layout of 2 dimensions, as the tensor has, got 3; write an entry for each",
    ),
    "plan: dimensions of one": (
        lines('"*" : [{}, {dp}]'),
        'plan:1:1: error: "0.bias" of @forward: [L1] expected a layout of 1 dimensions, as the te',
    ),
    "plan: no quotes": (
        lines("0.weight : [{dp}]"),
        "plan:1:1: error: [N1] expected a pattern with layouts or marks, or presets, got '0'",
    ),
    "plan: bracket": (
        lines('"0.weight" : [{dp]'),
        "got ']'; write \"PATTERN\" : [{axis}, ...]",
    ),
    "plan: input": (
        lines('inputs "imput" : [{dp}]'),
        '[N2] expected a pattern of inputs of the program, got "imput"; the nearest names are',
    ),
    "plan: states of inputs": (
        lines("inputs : states [{dp}]"),
        "[N1] expected layout, recompute or uses of inputs, got states; write",
    ),
    "plan: type": (
        lambda: compiled(mesh="dp = 2", plan=3),
        "expected a text or a path or a dict or a list as plan, got 3; plan: layouts and marks",
    ),
    "plan: dict": (
        lambda: compiled(mesh="dp = 2", plan={"0.weight": ["dp"]}),
        'expected a line of a plan, "fsdp(dp)", or a pair, ("*.weight", "[{dp}]"), got a tuple',
    ),
    "plan: two presets one axis": (
        lambda: compiled(mesh="dp = 2", plan="fsdp(dp) * ddp(dp)"),
        "[N4] expected one preset on axis dp, got fsdp and ddp",
    ),
}


@pytest.mark.parametrize("name", sampled(WRONG, 8))
def test_a_wrong_use_has_one_message(name: str) -> None:
    assert_one_message(*WRONG[name])
