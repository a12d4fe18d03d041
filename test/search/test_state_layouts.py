"""States in other layouts than their parameters: ZeRO, annotated and found by the search."""

from math import isclose

import pytest
from xdsl.context import Context
from xdsl.dialects.builtin import ModuleOp

from shardir import compile
from shardir.analysis.functions import mesh_of
from shardir.cost import MemoryUse, memory_of, report
from shardir.dialects.dist import type_layout
from shardir.dialects.train import Role, arguments
from shardir.passes.search_strategies import SearchStrategies
from shardir.pipelines import build
from shardir.rewriting.functions import bodies
from shardir.rewriting.marks import found_by_search
from shardir.tools import bench

search = bench.load("search")

SLOW_LINKS = "bandwidth = 1e+9, latency = 1e-7"
SLOW_STARTS = "bandwidth = 4e+11, latency = 1e-3"
ONE_DIMENSION = ("[{}, {}]", "[{d}, {}]", "[{}, {d}]")
LAYOUTS = (*ONE_DIMENSION, "[{d:(1)2}, {d:(2)2}]", "[{d:(2)2}, {d:(1)2}]")


def step(links: str = SLOW_LINKS, states: str | None = None, layers: int = 1) -> str:
    """Return a step with a batch over d, replicated parameters, and states in a layout."""
    annotated = f", train.state_layout = #dist.layout<@m, {states}>" if states else ""
    weights = "".join(
        f",\n    %w{i}: !W "
        f'{{train.parameter = "w{i}", train.init = #train.init<normal>{annotated}}}'
        for i in range(layers)
    )
    body = "".join(
        f"""
  %y{i} = nn.matmul %x{i}, %w{i} : ({"!X" if i else "!B"}, !W) -> !X
  %x{i + 1} = nn.tanh %y{i} : (!X) -> !X"""
        for i in range(layers)
    )
    return f"""
dist.cluster @c <levels [node = 4 {{{links}}}], memory = 8000000000 {{bandwidth = 1e+11}}, flops {{f32 = 1e+11}}>
dist.mesh @m <d = 4> on @c
#rows = #dist.layout<@m, [{{d}}, {{}}]>
#replicated = #dist.layout<@m, [{{}}, {{}}]>
!X = tensor<256x256xf32>
!B = tensor<256x256xf32, #rows>
!W = tensor<256x256xf32, #replicated>
func.func private @loss(
    %x0: !B {{train.input = #train.init<normal>}}{weights}
) -> tensor<f32> {{{body}
  %loss = nn.reduce <mean> %x{layers} dims <0, 1> : (!X) -> tensor<f32>
  func.return %loss : tensor<f32>
}}
train.step @step of @loss <adam, lr = 0.1>
"""  # noqa: E501 - the text of a program


def searched(text: str, memory: int = 0) -> ModuleOp:
    """Return the plan of a step that keeps to the memory by its layouts alone."""
    module = search.applied(text, "distributed-autodiff")
    SearchStrategies(memory=memory, recompute="off").apply(Context(), module)
    return module


def smallest(module: ModuleOp) -> float:
    """Return the smallest sum that was found: a plan of presets may be chosen before it."""
    ((f, _),) = bodies(module)
    found = found_by_search(f)
    return found.get("smallest", found["objective"])


def layouts_of(module: ModuleOp) -> dict[str | None, str]:
    """Return the layouts of parameters and states, by their names."""
    ((f, _),) = bodies(module)
    found = zip(arguments(f), f.function_type.inputs, strict=True)
    return {
        a.key: str(type_layout(t)).removeprefix("@m, ")
        for a, t in found if a.role is not Role.INPUT
    }  # fmt: skip


def memory(module: ModuleOp) -> MemoryUse:
    """Return the memory of the lowered program."""
    lowered = module.clone()
    for p in build("lower-plan"):
        p.apply(Context(), lowered)
    ((f, _),) = bodies(lowered)
    mesh = mesh_of(f, lowered)
    assert mesh is not None
    return memory_of(f, mesh)


@pytest.mark.parametrize("links", [SLOW_LINKS, SLOW_STARTS])
def test_the_search_finds_the_best_layout_of_the_states_of_an_annotated_parameter(links: str):
    """Sharded states need a reduce-scatter and an all-gather, of an all-reduce's bytes, and an
    update of a quarter; replicated ones need one collective."""
    best, chosen = min((smallest(searched(step(links, s))), s) for s in LAYOUTS)
    found = searched(step(links))
    assert isclose(smallest(found), best)
    assert (chosen == "[{}, {}]") == (links == SLOW_STARTS)
    layouts = layouts_of(found)
    assert layouts["w0"] == "[{}, {}]"
    assert (layouts["w0.exp_avg"] == "[{}, {}]") == (links == SLOW_STARTS)


def test_within_memory_states_are_sharded_and_parameters_stay_as_annotated():
    """A device holds the parameters, the partial gradients and a buffer to reduce them, each as
    large; what it receives of three others, a quarter of that from each; a quarter of the two
    states; and less than a third of inputs, activations and results."""
    parameters = 4 * 256 * 256 * 4
    limit = int(parameters * 4.75)
    text = step(SLOW_STARTS, layers=4)
    free, found = searched(text), searched(text, limit)
    for module, states in ((free, LAYOUTS[:1]), (found, LAYOUTS[1:])):
        layouts = layouts_of(module)
        assert {layouts.pop(f"w{i}") for i in range(4)} == {"[{}, {}]"}
        assert layouts.pop("step.count") == "[]"
        assert {*layouts.values()} <= {*states}
    assert smallest(free) < smallest(found)
    assert memory(free).peak > limit >= memory(found).peak
    assert memory(found).parts["parameters"] == parameters
    assert memory(found).parts["states"] == 2 * parameters // 4 + 8


@pytest.mark.parametrize("states", ONE_DIMENSION)
def test_a_step_receives_the_bytes_of_one_all_reduce_of_the_gradient(states: str):
    """A reduce-scatter of the gradient and an all-gather of the parameter receive as many. The loss
    is reduced too."""
    (cost,) = report(compile(step(SLOW_LINKS, states)).module)
    ((received, _),) = cost.communication.values()
    assert abs(received - 2 * 256 * 256 * 4 * 3 // 4) <= 2 * 4
