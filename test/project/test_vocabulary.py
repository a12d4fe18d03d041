"""Sources, messages and pages use the terms of docs/glossary.md, not the words that it replaces."""

import pytest
from vocabulary import FORMS, ROOT, files, occurrences, titles, words


def test_the_glossary_has_the_words() -> None:
    assert {"digit", "wire", "whole", "fault"} <= {*words()}
    assert {*FORMS} <= {*words()}, "a form without a word of the glossary"


@pytest.mark.parametrize("path", [*files()], ids=lambda p: str(p.relative_to(ROOT)))
def test_terms_are_those_of_the_glossary(path) -> None:
    found = [*occurrences(path), *titles(path)]
    assert not found, "\n".join(f"{f.file}:{f.line}: {f.word}: {f.text}" for f in found)
