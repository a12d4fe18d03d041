"""The start and the end of the commands: `shard-opt`, `shard-run`, `shard-report`, ...

1. An interrupt ends a command with exit code 130, SIGTERM and SIGHUP with 128 plus their number.
   Incomplete files are removed, and its ranks are ended.
2. Output that cannot be written is an error with exit code 2. If its reader has left (`| head`),
   the exit code is 141, without a message.
3. None of this ever shows a traceback, not even while a command's modules are imported.
"""

import gc
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from errno import ENOSPC
from importlib import import_module
from io import TextIOWrapper
from typing import NoReturn

OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
"""The folder of the package."""

ENDING = (signal.SIGTERM, signal.SIGHUP)

COLLECTED = 50_000, 20, 100
"""The thresholds of Python's garbage collector. IR and tables live long: with the default
thresholds a search spends a sixth of its time traversing them."""


class Output(TextIOWrapper):
    """A standard stream in UTF-8, whose errors name it."""

    def __init__(self, stream: TextIOWrapper):
        super().__init__(
            stream.buffer, "utf-8", "surrogateescape",
            line_buffering=stream.line_buffering, write_through=stream.write_through,
        )  # fmt: skip
        self._stream = stream  # its deletion would close the file

    def write(self, text: str) -> int:
        with _name_output_errors():
            return super().write(text)

    def flush(self) -> None:
        with _name_output_errors():
            super().flush()


@contextmanager
def _name_output_errors() -> Iterator[None]:
    try:
        yield
    except OSError as e:
        e.filename = "cannot write the output"
        raise


def opt() -> int:
    return command("opt")


def run() -> int:
    return command("run")


def report() -> int:
    return command("report")


def bench() -> int:
    return command("bench")


def calibrate() -> int:
    return command("calibrate")


def lsp() -> int:
    return command("lsp")


def command(name: str) -> int:
    """Run shardir/tools/NAME.py with the arguments of the process; return the exit code."""
    _prepare_streams()
    interrupt = signal.getsignal(signal.SIGINT)
    if interrupt is signal.default_int_handler:  # background jobs ignore the signal
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # there is nothing to remove yet
    warnings.formatwarning = lambda message, *_, **__: f"shard-{name}: warning: {message}\n"
    gc.disable()
    main = import_module(f"shardir.tools.{name}").main
    if "xdsl.ir" in sys.modules:  # not to run a compiled program
        import_module("shardir.dialects.blocks").hash_in_c()
    gc.freeze()  # the modules stay: no collection traverses them
    gc.set_threshold(*COLLECTED)
    if name != "opt":  # its IR lives until it ends
        gc.enable()
    for number in ENDING:
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _end)
    try:
        signal.signal(signal.SIGINT, interrupt)
        code = _exit_code(main)
        sys.stdout.flush()
    except KeyboardInterrupt:
        code = _fail("interrupted", 128 + signal.SIGINT)
    except BrokenPipeError:
        code = _fail("", 128 + signal.SIGPIPE)
    except OSError as e:
        advice = "\n  help: free space there, or write elsewhere" if e.errno == ENOSPC else ""
        code = _fail(f"error: {_subject(e)}: {e.strerror or e}{advice}", 2)
    for number in (signal.SIGINT, *ENDING):
        signal.signal(number, signal.SIG_IGN)  # while Python ends
    gc.freeze()  # saves a collection while Python ends
    return code


def _exit_code(main: Callable[[], int]) -> int:
    """Run `main` and return its exit code, even if it raises SystemExit."""
    try:
        return main()
    except SystemExit as e:
        if isinstance(e.code, str):
            print(e.code, file=sys.stderr)
        return e.code if isinstance(e.code, int) else int(e.code is not None)


def _subject(error: OSError) -> str:
    """Return the subject of a system error: its file, the output, or the line of our code that made
    the call."""
    if error.filename is not None:
        return str(error.filename)
    place, trace = "", error.__traceback__
    while trace is not None:
        if (file := trace.tb_frame.f_code.co_filename).startswith(OURS):
            place = f"{os.path.relpath(file, OURS)}:{trace.tb_lineno}"
        trace = trace.tb_next
    return f"the system refused what {place} asks for"


def _fail(message: str, code: int) -> int:
    """Print a message, discard pending output, and return the code."""
    with suppress(OSError):
        word, is_error, text = message.partition("error: ")
        if is_error and not word:
            from shardir.diagnostics import print_error

            print_error(text)
        else:
            print(message, end="\n" if message else "", file=sys.stderr, flush=True)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(nowhere, stream)
    return code


def _end(number: int, _: object) -> NoReturn:
    signal.signal(number, signal.SIG_IGN)
    sys.exit(128 + number)


def _prepare_streams() -> None:
    """Open /dev/null for closed standard streams, so that no other file gets their descriptors.
    Print UTF-8 in any locale, and the exact bytes of file names."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(number)
    sys.stdout = sys.stdout or os.fdopen(1, "w")
    sys.stderr = sys.stderr or os.fdopen(2, "w")
    for name in ("stdout", "stderr"):
        if isinstance(stream := getattr(sys, name), TextIOWrapper):
            setattr(sys, name, Output(stream))
