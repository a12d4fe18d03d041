"""Long passes say how far they have come to the tool around them."""

from shardir.diagnostics import progress_to, report_progress


def test_what_a_pass_says_goes_to_the_innermost_listener():
    outer: list[str] = []
    inner: list[str] = []
    report_progress("nobody listens")
    with progress_to(outer.append):
        report_progress("a")
        with progress_to(inner.append):
            report_progress("b")
        report_progress("c")
    assert (outer, inner) == (["a", "c"], ["b"])
