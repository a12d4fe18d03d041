"""Plans: read as they are written, and written for entries; patterns are those of fnmatch."""

import re
from fnmatch import fnmatchcase
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.strategies import quick

from shardir.algebra.layout import REDUCTIONS, Layout
from shardir.algebra.mesh import Axis, SizedAxes
from shardir.algebra.plan import (
    LayoutPlan,
    NameKind,
    PlanEntry,
    PlanLine,
    PresetLine,
    SearchLine,
    exactly,
)
from shardir.algebra.plan_notation import is_plan, read, text_of
from shardir.algebra.strategy import Strategy
from shardir.diagnostics import ShardirError

NAMES = st.from_regex(r"[a-c*?{}\[\],.0-9]{1,8}", fullmatch=True)


A, B = Axis("a"), Axis("b", 2, 4)
DIMS = st.lists(st.sampled_from([(), (A,), (B, A), SizedAxes((A,), (3, 1))]), max_size=3).map(tuple)
SPLIT = st.builds(Layout, st.just(""), DIMS)
PLACED = st.builds(
    lambda dims, axes, reduction, host: Layout("", dims, host=host).with_partial(axes, reduction),
    DIMS, st.sampled_from([(), (A,)]), st.sampled_from(REDUCTIONS), st.booleans(),
)  # fmt: skip
STRATEGIES = st.builds(
    Strategy,
    st.sampled_from([None, "m"]),
    st.lists(DIMS, min_size=1, max_size=2).map(tuple) | st.just(((2, 1), (1, 2))),
    st.none() | st.just((((A,),),)),
)
FIELDS: dict[str, Any] = {"layout": PLACED, "recompute": st.just(True)}
ALLOWED = {
    NameKind.VALUE: FIELDS | {"stage": st.integers(0, 9), "strategy": STRATEGIES},
    NameKind.INPUT: FIELDS | {"uses": SPLIT},
    NameKind.PARAMETER: FIELDS
    | {
        "uses": SPLIT,
        "parts": st.lists(SPLIT, min_size=1, max_size=3).map(tuple),
        "states": PLACED,
        "fusion": st.integers(0, 9),
    },
}
"""What a line of each kind may say."""


def entries(kind: NameKind) -> st.SearchStrategy[PlanEntry]:
    return st.fixed_dictionaries({}, optional=ALLOWED[kind]).map(lambda said: PlanEntry(**said))


@st.composite
def lines(draw: Any) -> PlanLine | PresetLine | SearchLine:
    function = draw(st.sampled_from([None, "f", "a b", 'q"uo//te', "step.1"]))
    if function and draw(st.booleans()):
        found = {"objective": draw(st.floats(0, 1)), "presets": "fsdp(dp)", "recompute": 1}
        return SearchLine(function, tuple(found.items()))
    if draw(st.booleans()):
        names = st.sampled_from(["fsdp", "2d", "megatron+sequence"])
        axes = st.lists(st.sampled_from(["dp", "tp"]), max_size=2).map(tuple)
        return PresetLine(tuple(draw(st.lists(st.tuples(names, axes), min_size=1, max_size=3))))
    kind = draw(st.sampled_from(NameKind))
    said = draw(entries(kind).filter(lambda entry: entry.said))
    return PlanLine(kind, draw(NAMES), said, function=function)


@quick
@given(st.lists(lines(), max_size=4))
def test_a_plan_is_read_as_it_is_written(found: list[Any]) -> None:
    plan = LayoutPlan(tuple(found))
    assert read(str(plan)) == (plan, [])


@quick
@given(st.dictionaries(NAMES, st.integers(0, 3), max_size=8), st.data())
def test_a_short_plan_says_of_each_name_what_its_entry_is(names: dict, data: Any) -> None:
    """Few entries, so that names share them; some are empty."""
    few = [PlanEntry(), *(data.draw(entries(NameKind.PARAMETER)) for _ in range(3))]
    wanted = {name: few[i] for name, i in names.items()}
    plan, errors = read(str(LayoutPlan.of({NameKind.PARAMETER: wanted})))
    assert not errors
    for name, entry in wanted.items():
        said: dict[str, Any] = {}
        for line in plan.lines:
            assert isinstance(line, PlanLine)
            if (here := line.says("f", NameKind.PARAMETER, name)) is not None:
                said = {n: getattr(here, n) for n in here.said} | said
        assert PlanEntry(**said) == entry


@quick
@given(st.from_regex(r"[ab.*?]{0,6}", fullmatch=True), st.from_regex(r"[ab.]{0,6}", fullmatch=True))
def test_patterns_are_those_of_fnmatch(pattern: str, name: str) -> None:
    line = PlanLine(NameKind.VALUE, pattern, PlanEntry())
    assert (line.says("f", NameKind.VALUE, name) is not None) == fnmatchcase(name, pattern)


@pytest.mark.parametrize(
    ("pattern", "matching", "others"),
    [
        ("*.{q,k,v}_proj.weight", ["a.0.q_proj.weight", ".k_proj.weight"], ["a.o_proj.weight"]),
        ("{a*,b?}", ["a", "axe", "bx"], ["b", "bxx", "{a*,b?}"]),
        ("w[*][?]", ["w*?"], ["wx?", "w*"]),
        ("{}", [""], ["{}"]),
        ("a[b", ["a[b"], ["ab"]),
        ("x.y", ["x.y"], ["xay"]),
    ],
)
def test_patterns(pattern: str, matching: list[str], others: list[str]) -> None:
    line = PlanLine(NameKind.VALUE, pattern, PlanEntry())
    assert all(line.says("f", NameKind.VALUE, n) is not None for n in matching)
    assert not any(line.says("f", NameKind.VALUE, n) is not None for n in others)


@quick
@given(NAMES, NAMES)
def test_the_pattern_of_a_name_is_of_that_name_alone(name: str, other: str) -> None:
    line = PlanLine(NameKind.VALUE, exactly(name), PlanEntry())
    assert line.says("f", NameKind.VALUE, name) is not None
    assert name == other or line.says("f", NameKind.VALUE, other) is None


def test_comments_end_lines_and_are_no_parts_of_patterns() -> None:
    plan, errors = read('# a plan\n\n"a#//b" : [{dp}] // "c" : []\ninputs : [] # all\n')
    assert not errors
    found = [line for line in plan.lines if isinstance(line, PlanLine)]
    assert [(line.pattern, line.number) for line in found] == [("a#//b", 3), ("*", 4)]


def test_texts_and_names_of_files() -> None:
    texts = [
        "fsdp",
        "megatron + sequence",
        "megatron+sequence(tp) * fsdp(dp, ep)",
        "inputs : [{dp}]",
        "# one\nfsdp",
    ]
    assert all(map(is_plan, texts))
    assert not any(map(is_plan, ["plan.txt", "plans/fsdp", "./fsdp", "fsdp(dp", ""]))


def test_plans_in_python() -> None:
    """Mappings, and lists of pairs and lines; patterns alone get their quotes."""
    of = {"*.weight": "[{dp}]", "inputs": "[]", 'values "h"': "recompute", "@f inputs": "[]"}
    text = '"*.weight" : [{dp}]\ninputs : []\nvalues "h" : recompute\n@f inputs : []\n'
    assert text_of(of) == text_of([*of.items()]) == text
    assert text_of([("a", "[]"), "fsdp(dp)"]) == '"a" : []\nfsdp(dp)\n'
    for wrong in ([("a",)], [1], {"a": 1}, 1.0, {"a": None}):
        with pytest.raises(ShardirError, match="expected a"):
            text_of(wrong)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('"w" : offload', "got offload; write the layout in host memory: .* on host"),
        ('"w" : [], recomput', "got recomput; did you mean recompute"),
        ('"w" : stage = 1', "got stage; stages are of values: values "),
        ('"w" : strategy <((2), (1))>', "got strategy; strategies are of the ops of values"),
    ],
)
def test_items_that_are_not_there_say_what_to_write(line: str, message: str) -> None:
    _, (error,) = read(line)
    assert re.search(message, error.message) and error.message.count("[N1]") == 1
