"""Colours, widths and the progress of work, on terminals and elsewhere."""

import sys
import time
from io import StringIO

import pytest

from shardir.diagnostics import Diagnostic, print_error, progress_shown, report_progress
from shardir.diagnostics import terminal as terminals
from shardir.diagnostics.terminal import choose_color, colored, has_color, plain, width


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _no_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")


def test_colours_are_for_terminals_unless_one_says_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert has_color(Terminal()) and not has_color(StringIO())
    monkeypatch.setenv("TERM", "dumb")
    assert not has_color(Terminal())
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert has_color(StringIO())
    monkeypatch.setenv("NO_COLOR", "1")
    assert not has_color(Terminal())
    try:
        choose_color("always")
        assert has_color(StringIO())
        choose_color("never")
        monkeypatch.delenv("NO_COLOR")
        assert not has_color(Terminal())
    finally:
        choose_color("auto")


def test_a_diagnostic_in_colours_has_a_gutter_with_the_number_of_the_line() -> None:
    found = Diagnostic("expected 4, got 5", "a.ir", 12, 3, 2, "  %x", ("seen",))
    assert str(found) == "a.ir:12:3: error: expected 4, got 5\n    %x\n    ^^\n  note: seen"
    lines = found.rendered(colored).splitlines()
    assert lines[1:3] == [
        " \x1b[2m  12 | \x1b[0m  %x",
        " \x1b[2m     | \x1b[0m  \x1b[1;31m^^\x1b[0m",
    ]
    assert found.rendered(plain) == str(found)


def test_an_error_says_what_and_where_and_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "rank 1 was killed\n  rank 1: step 5\n  help: use less memory"
    monkeypatch.setattr(sys, "stderr", err := StringIO())
    print_error(text, "shard-run")
    assert err.getvalue() == f"shard-run: error: {text}\n"
    monkeypatch.setattr(sys, "stderr", err := Terminal())
    print_error(text)
    assert err.getvalue().splitlines() == [
        "\x1b[1;31merror:\x1b[0m \x1b[1mrank 1 was killed\x1b[0m",
        "\x1b[2m  rank 1: step 5\x1b[0m",
        "  \x1b[1;36mhelp:\x1b[0m use less memory",
    ]


def test_the_width_is_that_of_the_terminal_or_fixed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", StringIO())
    monkeypatch.setattr(sys, "stdout", StringIO())
    assert width() == 100
    monkeypatch.setenv("COLUMNS", "150")
    assert width() == 150
    monkeypatch.setenv("COLUMNS", "20")
    assert width() == 60


def test_long_work_has_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminals, "PERIOD", 0.05)
    monkeypatch.setattr(sys, "stderr", err := StringIO())
    with progress_shown("compiling"), progress_shown("within"):
        time.sleep(0.12)
        report_progress("the search")
        time.sleep(0.12)
    lines = err.getvalue().splitlines()
    assert lines[0] == "compiling: 0 s" and lines[-1] == "the search: 0 s", lines
    time.sleep(0.1)
    assert err.getvalue().splitlines() == lines
    monkeypatch.setattr(sys, "stderr", err := StringIO())
    with progress_shown("compiling", lines=False):
        time.sleep(0.1)
    assert not err.getvalue()


def test_on_a_terminal_the_line_goes_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminals, "DELAY", 0.0)
    monkeypatch.setattr(sys, "stderr", err := Terminal())
    with progress_shown("compiling [x]"):
        time.sleep(0.3)
    shown = err.getvalue()
    assert "compiling [x]: 0 s" in shown and "\x1b[2K" in shown.rsplit("compiling", 1)[1]
