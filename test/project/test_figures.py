"""The figures of the documentation are those that docs/figures.py draws now."""

import re
from pathlib import Path

import pytest
from figures import FIGURES
from support.extent import LONG
from support.pages import DOCS, PAGES

RUNS = "losses", "resumed"
"""Figures of runs on ranks, whose last bits differ from processor to processor."""

SLOW = "offload", "plans", "program", "recompute", "search", "stages", "step-memory"
"""Figures of large programs, which the long form draws."""

CHECKED = [name for name in FIGURES if name not in RUNS and (LONG or name not in SLOW)]


@pytest.mark.parametrize("name", CHECKED)
def test_figure_is_current(name: str) -> None:
    told = f"run: python docs/figures.py {name}, and look at the picture"
    assert FIGURES[name]() == (DOCS / "pictures" / f"{name}.svg").read_text(), told


def test_pictures_are_shown_and_pages_show_pictures_that_exist() -> None:
    shown: set[Path] = set()
    for page in PAGES:
        links = re.findall(r"!\[[^\]]+\]\((?!\w+:)([^)]+)\)", page.read_text())
        shown |= {(page.parent / link).resolve() for link in links}
    assert all(path.exists() for path in shown)
    drawn = {DOCS / "pictures" / f"{name}.svg" for name in FIGURES}
    assert drawn <= shown, "a page shows each figure"
