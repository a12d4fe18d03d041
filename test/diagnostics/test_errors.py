"""A diagnostic shows its line, underlines its range, and ends with its notes."""

from hypothesis import given
from hypothesis import strategies as st

from shardir.diagnostics.errors import Diagnostic

WORDS = st.text("ab\t ", min_size=1, max_size=12)


@given(WORDS, WORDS, WORDS, st.lists(WORDS, max_size=3))
def test_carets_are_below_the_range(before: str, word: str, after: str, notes: list[str]) -> None:
    line = before + word + after
    column = len(before) + 1
    error = Diagnostic("no", "x.ir", 3, column, len(word), line, tuple(notes))
    first, shown, below, *rest = str(error).split("\n")
    assert first == f"x.ir:3:{column}: error: no"
    assert shown == f"  {line}"
    blank = "".join("\t" if c == "\t" else " " for c in before)
    assert below == f"  {blank}{'^' * len(word)}"
    assert rest == [f"  note: {n}" for n in notes]
