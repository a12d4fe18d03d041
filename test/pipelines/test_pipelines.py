"""Pipelines as data: their texts, and where strategies are loaded and saved."""

import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.extent import extent

from shardir.pipelines import DECIDERS, MODES, with_files, with_plan
from shardir.rewriting.registry import build, split

LEAVES = st.from_regex(r"[a-z]{1,3}(=[0-9])?", fullmatch=True)
PARTS = st.recursive(
    LEAVES,
    lambda inner: st.tuples(LEAVES, st.sampled_from(["{}", "()", "[]"]), st.lists(inner)).map(
        lambda t: f"{t[0]}{t[1][0]}{','.join(t[2])}{t[1][1]}"
    ),
    max_leaves=6,
)


@settings(max_examples=extent(30, 100), deadline=None, derandomize=True)
@given(st.lists(PARTS, min_size=1, max_size=4))
def test_a_list_is_split_at_its_own_commas_only(parts: list[str]) -> None:
    assert list(split(" , ".join(parts), "list")) == parts


@pytest.mark.parametrize("mode", ["data", "hybrid", "semi_auto", "auto"])
def test_strategies_are_saved_after_the_last_pass_that_decides(mode: str) -> None:
    passes = build(MODES[mode].pipeline)
    names = [p.name for p in passes]
    at = max(i for i, name in enumerate(names) if name in DECIDERS)
    saved = [p.name for p in with_files(passes, "plan.txt")]
    assert saved == [*names[: at + 1], "save-strategies", *names[at + 1 :]]


@pytest.mark.parametrize("mode", ["data", "hybrid", "semi_auto", "auto"])
def test_a_plan_is_applied_where_annotations_are_read_and_after_differentiation(mode: str) -> None:
    """The second time before a search, in whose functions there are gradients."""
    found: Any = with_plan(build(MODES[mode].pipeline), "fsdp")
    applied = {p.lines: i for i, p in enumerate(found) if p.name == "apply-plan"}
    names = [p.name for p in found]
    if mode != "auto":
        assert [*applied] == ["all"] and applied["all"] < names.index("propagate-strategies")
        return
    assert [*applied] == ["before", "after"]
    assert applied["before"] < names.index("assign-stages")
    assert applied["after"] == names.index("search-strategies") - 1


def test_a_pass_on_its_own_finds_the_pipelines() -> None:
    """An embedder who runs one pass has imported that alone."""
    program = (
        "from shardir.passes.strip_layouts import StripLayouts\n"
        "from shardir.rewriting.registry import PASSES, PIPELINES, expand\n"
        "print(*(s.name for s in expand('lower-layouts', PASSES, PIPELINES)))"
    )
    argv = [sys.executable, "-c", program]
    ended = subprocess.run(argv, check=True, stdout=subprocess.PIPE, text=True)
    assert ended.stdout.split() == [p.name for p in build("lower-layouts")]
