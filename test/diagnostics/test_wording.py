"""Words that are close to a known one are corrected, and no others."""

from hypothesis import given, settings
from hypothesis import strategies as st

from shardir.diagnostics.wording import did_you_mean

KNOWN = ("dist.wait", "nn.matmul", "train.step")


@settings(deadline=None, derandomize=True)
@given(st.sampled_from(KNOWN), st.data())
def test_a_word_without_one_letter_is_corrected(word: str, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(word) - 1))
    assert did_you_mean(word[:at] + word[at + 1 :], KNOWN) == f"; did you mean {word}?"


@settings(deadline=None, derandomize=True)
@given(st.text("xyz_", min_size=1, max_size=9))
def test_a_word_of_other_letters_is_not(word: str) -> None:
    assert did_you_mean(word, KNOWN) == ""
