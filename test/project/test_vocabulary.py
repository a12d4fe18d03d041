"""Sources, messages and pages use the terms of docs/glossary.md, not the words that it replaces."""

from collections import defaultdict
from pathlib import Path

import pytest
from vocabulary import FORMS, ROOT, files, occurrences, titles, words


def test_the_glossary_has_the_words() -> None:
    assert {"digit", "wire", "whole", "fault"} <= {*words()}
    assert {*FORMS} <= {*words()}, "a form without a word of the glossary"


def _folders() -> dict[str, list[Path]]:
    found = defaultdict[str, list[Path]](list)
    for path in files():
        found[str(path.parent.relative_to(ROOT))].append(path)
    return dict(found)


@pytest.mark.parametrize(("_folder", "paths"), _folders().items(), ids=_folders())
def test_terms_are_those_of_the_glossary(_folder: str, paths: list[Path]) -> None:
    found = [f for path in paths for f in (*occurrences(path), *titles(path))]
    assert not found, "\n".join(f"{f.file}:{f.line}: {f.word}: {f.text}" for f in found)
