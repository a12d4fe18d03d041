"""choose-recompute: the examples compute the same with each policy and within budgets."""

from pathlib import Path

import pytest
from support.extent import extent
from xdsl.context import Context

import shardir
from shardir.cost.functions import ONE_DEVICE, functions
from shardir.cost.memory import memory_of
from shardir.diagnostics import ParseErrors
from shardir.interpret.equivalence import check_pass
from shardir.passes.choose_recompute import ChooseRecompute
from shardir.rewriting.marks import RECOMPUTE
from shardir.tools import bench

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
LOWERED = (
    "inline-calls,assign-stages,propagate-strategies,insert-redistributions,distributed-autodiff,"
    "recompute,lower-to-spmd,simplify-communication"
)
TEXTS = {
    path.stem: path.read_text()
    for path in sorted(EXAMPLES.glob("*.ir"))
    if "train.step" in path.read_text() and path.stem != "densenet"  # which is slow in numpy
}
CHOSEN = [("full", False), ("full", True), ("dots", False), ("0.8", False)]
GPT = bench.load("programs").gpt(
    layers=3, mesh=(2, 2), batch=8, seq=64, hidden=32, heads=4, vocab=32
)


FEW = ("dropout", "overlap", "split_softmax", "transformer_block")
"""Those that the default form has, each with another choice."""


@pytest.mark.parametrize("name", extent(FEW, tuple(TEXTS)))
def test_an_example_computes_the_same(name: str):
    given = shardir.compile(TEXTS[name], LOWERED).module
    turn = FEW.index(name) if name in FEW else 0
    for recompute, collectives in extent(CHOSEN[turn : turn + 1], CHOSEN):
        module = given.clone()
        try:
            ChooseRecompute(recompute, collectives).apply(Context(), module)
        except shardir.ShardirError as e:
            assert recompute == "0.8" and "as the smallest peak tried" in str(e)
            continue
        check_pass(given, module, "choose-recompute")


@pytest.mark.parametrize("mode", ["semi_auto", "stand_alone"])
def test_the_peak_of_layers_falls(mode: str):
    peaks = []
    for recompute in (None, "dots", "full"):
        compiled = shardir.compile(GPT, mode=mode, recompute=recompute)
        assert (recompute is None) != any(
            RECOMPUTE in op.attributes for op in compiled.module.walk()
        )
        ((f, mesh),) = functions(compiled.module)
        assert (mesh is ONE_DEVICE) == (mode == "stand_alone")
        peaks.append(memory_of(f, mesh).peak)
    assert peaks[0] > peaks[1] > peaks[2]


def test_a_function_that_frees_nothing_is_not_changed():
    """A gradient without parameters: its program frees no value, so nothing would be saved."""
    module = shardir.compile(TEXTS["reid"], LOWERED.replace("distributed-autodiff,", "")).module
    text = str(module)
    ChooseRecompute("full").apply(Context(), module)
    assert str(module) == text


def test_all_errors_are_reported():
    text = "\n".join((TEXTS["pangu_alpha"], "train.step @second of @loss <sgd, lr = 0.1>"))
    with pytest.raises(ParseErrors) as e:
        shardir.compile(text, recompute="1KB")
    assert str(e.value).count("expected a peak of at most 1000 B") == 2
