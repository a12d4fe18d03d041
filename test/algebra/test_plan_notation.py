"""Plans: read as they are written, and written for entries; patterns are those of fnmatch."""

from fnmatch import fnmatchcase
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import quick

from shardir.algebra.mesh import Axis, SizedAxes
from shardir.algebra.plan import (
    LayoutPlan,
    NameKind,
    PlanEntry,
    PlanLine,
    PresetLine,
    exactly,
    is_plan,
    read,
)

NAMES = st.from_regex(r"[a-c*?{}\[\],.0-9]{1,8}", fullmatch=True)


A, B = Axis("a"), Axis("b", 2, 4)
DIMS = st.lists(st.sampled_from([(), (A,), (B, A), SizedAxes((A,), (3, 1))]), max_size=3).map(tuple)
FIELDS: dict[str, Any] = {"layout": DIMS, "recompute": st.just(True)}
ALLOWED = {
    NameKind.VALUE: FIELDS | {"stage": st.integers(0, 9)},
    NameKind.INPUT: FIELDS | {"uses": DIMS},
    NameKind.PARAMETER: FIELDS | {"uses": DIMS, "states": DIMS, "fusion": st.integers(0, 9)},
}
"""What a line of each kind may say."""


def entries(kind: NameKind) -> st.SearchStrategy[PlanEntry]:
    return st.fixed_dictionaries({}, optional=ALLOWED[kind]).map(lambda said: PlanEntry(**said))


@st.composite
def lines(draw: Any) -> PlanLine | PresetLine:
    if draw(st.booleans()):
        names = st.sampled_from(["fsdp", "2d", "megatron+sequence"])
        axes = st.lists(st.sampled_from(["dp", "tp"]), max_size=2).map(tuple)
        return PresetLine(tuple(draw(st.lists(st.tuples(names, axes), min_size=1, max_size=3))))
    kind = draw(st.sampled_from(NameKind))
    return PlanLine(kind, draw(NAMES), draw(entries(kind).filter(lambda entry: entry.said)))


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
            if (here := line.says(NameKind.PARAMETER, name)) is not None:
                said = {n: getattr(here, n) for n in here.said} | said
        assert PlanEntry(**said) == entry


@quick
@given(st.from_regex(r"[ab.*?]{0,6}", fullmatch=True), st.from_regex(r"[ab.]{0,6}", fullmatch=True))
def test_patterns_are_those_of_fnmatch(pattern: str, name: str) -> None:
    line = PlanLine(NameKind.VALUE, pattern, PlanEntry())
    assert (line.says(NameKind.VALUE, name) is not None) == fnmatchcase(name, pattern)


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
    assert all(line.says(NameKind.VALUE, n) is not None for n in matching)
    assert not any(line.says(NameKind.VALUE, n) is not None for n in others)


@quick
@given(NAMES, NAMES)
def test_the_pattern_of_a_name_is_of_that_name_alone(name: str, other: str) -> None:
    line = PlanLine(NameKind.VALUE, exactly(name), PlanEntry())
    assert line.says(NameKind.VALUE, name) is not None
    assert name == other or line.says(NameKind.VALUE, other) is None


def test_comments_end_lines_and_are_no_parts_of_patterns() -> None:
    plan, errors = read('# a plan\n\n"a#//b" : [{dp}] // "c" : []\ninputs : [] # all\n')
    assert not errors
    found = [line for line in plan.lines if isinstance(line, PlanLine)]
    assert [(line.pattern, line.number) for line in found] == [("a#//b", 3), ("*", 4)]


def test_texts_and_names_of_files() -> None:
    texts = ["fsdp", "megatron+sequence(tp) * fsdp(dp, ep)", "inputs : [{dp}]", "# one\nfsdp"]
    assert all(map(is_plan, texts))
    assert not any(map(is_plan, ["plan.txt", "plans/fsdp", "./fsdp", "fsdp(dp", ""]))
