"""Long passes report their progress to the tool that runs them."""

from shardir.diagnostics import progress_to, report_progress


def test_progress_goes_to_the_innermost_listener():
    outer: list[str] = []
    inner: list[str] = []
    report_progress("without a listener")
    with progress_to(outer.append):
        report_progress("a")
        with progress_to(inner.append):
            report_progress("b")
        report_progress("c")
    assert (outer, inner) == (["a", "c"], ["b"])
