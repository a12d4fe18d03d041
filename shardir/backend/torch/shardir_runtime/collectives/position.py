"""The position of a rank in its sequence of collectives, in memory that its launcher reads too,
even if the rank is stopped or killed.

The memory is a file with a record for each rank of a machine; SHARDIR_POSITIONS names it (`fd:N`,
or a path). A record has 64-bit integers: the step, counted from 1; the number of collectives begun;
the number completed; the rank whose value a stage waits for, plus 1; a text with the work of a
stage; and a ring of the last program lines, by the number of the collective. launch/positions.py
finds the op and the source line in the text of the program.
"""

import functools
import mmap
import os
import sys
from collections.abc import Callable
from typing import Any

POSITIONS = "SHARDIR_POSITIONS"
"""The variable of the environment that names the file."""

RECORD = 1024
"""The bytes of a record."""

STEP, BEGUN, COMPLETED, PEER, NOTE, LINES = 0, 1, 2, 3, 4, 16
"""The places of the fields, in integers."""

KEPT = RECORD // 8 - LINES
"""The number of lines in the ring."""

NOTE_BYTES = 8 * (LINES - NOTE)

_words: Any = None
"""The record; None without a launcher, when nothing is recorded."""
_program = ""


def attach(program: str) -> None:
    """Record from now on, if there is a launcher.

    Args:
        program: the name of the file whose lines are recorded, as its code objects have it.
    """
    global _words, _program
    target = os.environ.get(POSITIONS)
    if target is None:
        return
    file = int(target[3:]) if target.startswith("fd:") else os.open(target, os.O_RDWR)
    memory = memoryview(mmap.mmap(file, 0))
    os.close(file)
    first = RECORD * int(os.environ["LOCAL_RANK"])
    _words, _program = memory[first : first + RECORD].cast("Q"), program


def at_step(step: int) -> None:
    """Record the number of the step that begins, counted from 1."""
    if _words is not None:
        _words[STEP] = step


def note(text: str) -> None:
    """Record the work of a stage."""
    if _words is not None:
        data = text.encode()[:NOTE_BYTES].ljust(NOTE_BYTES, b"\0")
        _words[NOTE:LINES] = memoryview(data).cast("Q")


def begin(peer: int = -1, line: int = 0) -> None:
    """Record that a wait for other ranks begins.

    Args:
        peer: the awaited rank, if it is of another stage.
        line: the line of the program; by default the current line.
    """
    if _words is None:
        return
    if not line:
        frame = sys._getframe(2)
        while frame is not None and frame.f_code.co_filename != _program:
            frame = frame.f_back
        line = 0 if frame is None else frame.f_lineno
    number = _words[BEGUN] + 1
    _words[LINES + number % KEPT] = line
    _words[PEER] = peer + 1
    _words[BEGUN] = number


def complete() -> None:
    """Record that the wait is over."""
    if _words is not None:
        _words[COMPLETED] = _words[BEGUN]


def recorded(collective: Callable) -> Callable:
    """Record the calls of a collective, in the record and by name in a running profiler."""
    # imported here: the launcher reads positions without torch
    from torch.autograd import profiler

    from ..compat import is_profiled

    @functools.wraps(collective)
    def call(*args: Any, **kwargs: Any) -> Any:
        begin()
        if is_profiled():
            with profiler.record_function(f"shardir.{collective.__name__}"):
                result = collective(*args, **kwargs)
        else:
            result = collective(*args, **kwargs)
        complete()
        return result

    return call
