"""make faults: commands under signals, with full disks, closed pipes and odd environments.

    python test/disturbances.py --cases 200 --seed 0           each command is a process of its own
    python test/disturbances.py --cases 20 --seed 0 --forked   all are forked from this one
    python test/disturbances.py --cases 2000 --undisturbed --forked     runs of two ranks, each good

A case is a command, a disturbance, and the exit codes that are right. Whatever happens, a command

1. ends within SECONDS, with one of these codes, and shows no traceback of its own;
2. leaves no process, and no file but its complete output: other files are as before.

After SIGKILL a file of the name `.shardir.*` may be left where a file was being written.
"""

import argparse
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice, repeat
from multiprocessing import Pool
from pathlib import Path
from typing import Any

from support.forked import Child, OwnForks, fork
from support.ranks import sample

SECONDS, GONE_SECONDS = 120, 20
MARK = "SHARDIR_CASE"
ROOT = Path(__file__).resolve().parents[2]
COMMANDS: dict[str, tuple[str, ...]] = {
    "print": ("opt", "block.ir", "-p", "train"),
    "write": ("opt", "block.ir", "-p", "train", "-o", "out.ir"),
    "emit": ("opt", "block.ir", "-p", "train", "-t", "torch", "-o", "emitted"),
    "train": ("run", "program", "--steps=4", "--timeout=60"),
    "dump": ("run", "program", "--steps=4", "--timeout=60", "--dump=out.npz"),
    "compile": ("run", "step.ir", "--steps=4", "--timeout=60"),
}
"""The commands by name. `train` ends by itself; in the others only the moment counts."""

STEP = """
dist.mesh @m <a = 2>
func.func @f(%x: tensor<4xf32, #dist.layout<@m, [{a}]>>) -> tensor<f32> {
  %s = nn.reduce <sum> %x dims <0> : (tensor<4xf32, #dist.layout<@m, [{a}]>>) -> tensor<f32>
  func.return %s : tensor<f32>
}
"""

OUTPUTS = {"write": "out.ir", "emit": "emitted", "dump": "out.npz"}


@dataclass(frozen=True)
class Case:
    """A command and what happens to it.

    Args:
        words: the command line, without `shard-`.
        codes: the exit codes that are right.
        output: the file or folder that it may write.
        message: a part of what it prints to stderr.
        number, moment: a signal, and when it comes: as a part of an undisturbed run, or, when the
            case is run, in seconds.
        prepare: what the process does before the command.
        environment: changes of the environment; None deletes a variable.
    """

    name: str
    words: tuple[Any, ...]
    codes: tuple[int, ...]
    output: str | None = None
    message: str = ""
    number: int = 0
    moment: float = 0.0
    prepare: Callable[[], object] = int
    environment: dict[str, str | None] = field(default_factory=dict)


def cases(seed: int) -> Iterator[Case]:
    """An endless sequence: each round has each kind of disturbance, in a random order."""
    chance = random.Random(seed)
    while True:
        found = [*_signals(chance), *_streams(), *_disks(chance), *_environments(), *_names(),
                 *_ranks()]  # fmt: skip
        chance.shuffle(found)
        yield from found


def _on(name: str, what: str, codes: tuple[int, ...], **options: Any) -> Case:
    return Case(f"{name}: {what}", COMMANDS[name], codes, OUTPUTS.get(name), **options)


def _signals(chance: random.Random) -> Iterator[Case]:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL):
        codes = (0, -number) if number == signal.SIGKILL else (0, -number, 128 + number)
        for name in COMMANDS:
            moment = chance.uniform(0, 1.1)
            yield _on(
                name, f"{number.name} after {moment:.2f}", codes, number=number, moment=moment
            )


def _streams() -> Iterator[Case]:
    for name in COMMANDS:
        wrong = 0 if name in ("write", "emit") else 2
        yield _on(name, "full stdout", (wrong,), prepare=partial(_become, "/dev/full", 1))
        yield _on(name, "full stderr", (0,), prepare=partial(_become, "/dev/full", 2))
        closed = 0 if name in ("write", "emit") else 141
        yield _on(name, "stdout without a reader", (closed,), prepare=_break_stdout)
        for number in (0, 1, 2):
            yield _on(name, f"closed stream {number}", (0,), prepare=partial(os.close, number))
    yield Case("closed stdin that is read", ("opt",), (2,), message="which is closed",
               prepare=partial(os.close, 0))  # fmt: skip


def _disks(chance: random.Random) -> Iterator[Case]:
    """A file that may not grow is written as one on a full disk."""
    for name in OUTPUTS:
        size = chance.choice([0, 1, 100, 1000])
        code, message = 2, ""
        if name == "dump":
            code, message = 1, "out.npz cannot be written: File too large"
        limit = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (size, size))
        yield _on(name, f"files of at most {size} bytes", (code,), message=message, prepare=limit)
    for out, message in (("/dev/full", "No space left"), ("no/where.ir", "No such file")):
        yield Case(f"-o {out}", ("opt", "block.ir", "-o", out), (2,), message=message)
    emit = (*COMMANDS["emit"][:-1], "others")
    yield Case("a folder of others", emit, (2,), message="not overwritten")


def _environments() -> Iterator[Case]:
    for name in COMMANDS:
        for changes in (
            {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii"},
            {"TERM": "dumb", "COLUMNS": "1", "LINES": "0"}, {"HOME": None, "PATH": ""},
            {"MASTER_PORT": "x", "WORLD_SIZE": "-1", "RANK": "9", "SHARDIR_EVENTS": "fd:99"},
        ):  # fmt: skip
            yield _on(name, f"with {changes}", (0,), environment=changes)
    files = partial(resource.setrlimit, resource.RLIMIT_NOFILE, (9, 9))
    yield _on("train", "9 files", (2,), prepare=files)
    yield _on("train", "no such interface", (1,), message="rank",
              environment={"GLOO_SOCKET_IFNAME": "none"})  # fmt: skip


def _names() -> Iterator[Case]:
    long, bytes_ = "x" * 10_000, os.fsdecode(b"\xff\xfe.ir")
    yield Case("a long input", ("opt", long), (2,), message="File name too long")
    yield Case("a long output", ("opt", "block.ir", "-o", long), (2,), message="File name too long")
    yield Case("a long program", ("run", long), (2,), message="no such directory")
    yield Case(
        "a long file for strategies",
        ("opt", "block.ir", "-p", "train", "--save-strategies", long),
        (1, 2),
        message="too long",
    )
    yield Case("a long dump", ("run", "program", "--dump", f"{long}.npz"), (1, 2))
    yield Case("no UTF-8 in a name", ("opt", bytes_), (2,), message="cannot read")
    yield Case("no UTF-8 in an output", ("opt", "block.ir", "-o", bytes_), (0,), bytes_)
    yield Case("no UTF-8 in a program", ("run", bytes_), (2,), message="no such file")
    yield Case(
        "a module that exits", ("opt", "block.ir", "--import", "leaves"), (2,),
        message="--import leaves: SystemExit", environment={"PYTHONPATH": f".:{ROOT}"},
    )  # fmt: skip
    for seconds in ("inf", "1e10", "nan", "-1"):
        yield Case(f"--timeout {seconds}", ("run", "program", f"--timeout={seconds}"), (2,),
                   message="argument --timeout: expected")  # fmt: skip


def _ranks() -> Iterator[Case]:
    for error, message in (
        ("kill", "rank 1 was killed by SIGKILL"), ("leave", "rank 1 ended with exit code 0"),
        ("raise", "rank 1 failed: ValueError"), ("exit", "rank 1 ended with exit code 7"),
        ("stop", "rank 1 is stopped"),
    ):  # fmt: skip
        words = (
            "run",
            "program",
            "--steps=4",
            "--timeout=3" if error == "stop" else "--timeout=60",
        )
        yield Case(f"a rank: {error}", words, (1,), message=message, environment={"ERROR": error})


def _become(path: str, stream: int) -> None:
    os.dup2(os.open(path, os.O_WRONLY), stream)


def _break_stdout() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    os.dup2(writer, 1)


# ---- one case --------------------------------------------------------------------------------


def make_work(folder: Path) -> None:
    """Write the files on which the commands work."""
    examples = ROOT / "docs" / "examples"
    shutil.copy(examples / "matmul_strategies.ir", folder / "block.ir")
    (folder / "step.ir").write_text(STEP)
    sample.write(folder / "program", sample.COUNTDOWN, **sample.countdown_plan())
    (folder / "out.ir").write_text("old")
    (folder / "leaves.py").write_text("raise SystemExit(3)\n")
    (folder / "others").mkdir()
    for name in ("program.py", "runtime.py"):
        (folder / "others" / name).write_text("mine")


def start(case: Case, folder: Path, forked: bool, stdout: Any, stderr: Any) -> Any:
    """Start the command of a case in its folder, as the leader of a session."""
    name, *words = case.words
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "ERROR": "",
                   "PIDS": str(folder / "pids"), "TMPDIR": str(folder / "tmp"),
                   "PYTHONDONTWRITEBYTECODE": "1", **case.environment}  # fmt: skip
    environment = {k: v for k, v in environment.items() if v is not None}
    os.set_inheritable(stdout.fileno(), True)
    if not forked:
        program = (
            f"import sys; from shardir.tools.commands import command; sys.exit(command({name!r}))"
        )
        return subprocess.Popen(
            [sys.executable, "-c", program, *words], env=environment, cwd=folder / "work",
            stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr, start_new_session=True,
            preexec_fn=case.prepare,  # noqa: PLW1509 - this process has one thread
        )  # fmt: skip
    pid = fork()
    if pid == 0:
        code = 1
        try:
            os.setsid()
            os.chdir(folder / "work")
            os.environ.clear()
            os.environ.update(environment)
            tempfile.tempdir = None
            sys.path[:0] = environment["PYTHONPATH"].split(":")
            sys.argv = [f"shard-{name}", *words]
            nowhere = os.open(os.devnull, os.O_RDONLY)
            for number, file in ((0, nowhere), (1, stdout.fileno()), (2, stderr.fileno())):
                os.dup2(file, number)
            os.closerange(3, os.sysconf("SC_OPEN_MAX"))  # as in a process of its own
            case.prepare()
            for number, stream in ((0, "stdin"), (1, "stdout"), (2, "stderr")):
                there = Path(f"/proc/self/fd/{number}").exists()
                mode = "r" if number == 0 else "w"
                setattr(sys, stream, os.fdopen(number, mode, closefd=False) if there else None)
            from shardir.tools import commands

            code = commands.command(name)
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            with suppress(OSError, AttributeError):
                sys.stderr.flush()
            os._exit(code)
    return Child(pid)


def content(folder: Path) -> dict[str, bytes]:
    """Return the files of a folder, without those that Python keeps of modules, and those that are
    removed meanwhile."""
    found = {}
    for at, _, names in os.walk(folder):  # rglob fails where a folder is removed meanwhile
        for p in (Path(at) / name for name in names):
            if p.is_file() and p.parent.name != "__pycache__":
                with suppress(FileNotFoundError):
                    found[os.fsencode(p.relative_to(folder)).decode("latin1")] = p.read_bytes()
    return found


def marked(mark: str) -> list[int]:
    """Return the processes that have the mark in their environment, which all of a case inherit."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            stat = (path / "stat").read_text().rpartition(")")[2].split()[0]
            if stat not in "ZX" and mark.encode() in (path / "environ").read_bytes():
                found.append(int(path.name))
        except OSError:
            continue
    return found


def wrong_of(case: Case, forked: bool) -> tuple[list[str], float]:
    """Run a case; return what is wrong, and how long it took, in seconds."""
    wrong: list[str] = []
    mark = uuid.uuid4().hex
    with tempfile.TemporaryDirectory(prefix="case-") as name:
        folder = Path(name)
        for part in ("work", "tmp", "pids"):
            (folder / part).mkdir()
        make_work(folder / "work")
        before = content(folder / "work")
        with (folder / "stdout").open("w+b") as stdout, (folder / "stderr").open("w+b") as stderr:
            marks = {**case.environment, MARK: mark}
            begun = time.monotonic()
            process = start(replace(case, environment=marks), folder, forked, stdout, stderr)
            try:
                if case.number:
                    time.sleep(case.moment)
                    if process.poll() is None:
                        os.kill(process.pid, case.number)
                code = process.wait(timeout=SECONDS)
            except subprocess.TimeoutExpired:
                code = None
                wrong.append(f"not ended after {SECONDS} s")
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            took = time.monotonic() - begun
        said = (folder / "stderr").read_bytes().decode(errors="replace")
        if code is not None and code not in case.codes:
            wrong.append(f"exit code {code}, expected {case.codes}")
        if case.message not in said:
            wrong.append(f"no {case.message!r} in stderr")
        own = [line for line in said.splitlines() if not line.startswith("  | ")]
        if any("Traceback" in line or "Exception ignored" in line for line in own):
            wrong.append("a traceback")
        killed = case.number == signal.SIGKILL
        until = time.monotonic() + GONE_SECONDS
        while (left := [*marked(mark), *content(folder / "tmp"), *(folder / "tmp").iterdir()]) and (
            time.monotonic() < until
        ):
            time.sleep(0.05)
        if left:
            wrong.append(f"left over: {left}")
        after = content(folder / "work")
        names = {n for n in {*before, *after} if before.get(n) != after.get(n)}
        output = os.fsencode(case.output).decode("latin1") if case.output else None
        strange = [n for n in names if not (output and n.split("/")[0] == output)]
        strange = [n for n in strange if not (killed and n.startswith(".shardir."))]
        if strange:
            wrong.append(f"files that changed: {strange}")
        if output and code != 0 and output in names and case.number == 0:
            wrong.append(f"{output} is not as before")
        if output in names and output.endswith(".ir") and not after[output].endswith(b"}\n"):
            wrong.append(f"{output} is not complete")
        if wrong:
            wrong.append("stderr: " + said[-1500:].strip())
        for pid in marked(mark):
            os.kill(pid, signal.SIGKILL)
    return wrong, took


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="cases at once (1)")
    parser.add_argument("--forked", action="store_true", help="fork all from this process")
    parser.add_argument("--undisturbed", action="store_true", help="disturb none: all succeed")
    options = parser.parse_args(arguments)
    if options.forked:
        import torch.distributed  # noqa: F401 - for the ranks

        import shardir
        from shardir.backend.torch.launch import forks
        from shardir.tools import opt, run  # noqa: F401 - for the commands

        with tempfile.TemporaryDirectory() as folder:
            make_work(Path(folder))
            shardir.compile_file(Path(folder, "step.ir")).save(Path(folder, "out"))
            opt.main([f"{folder}/block.ir", "-p", "train", "-o", f"{folder}/out.ir"])
        forks.Forks = OwnForks
    undisturbed = repeat(Case("undisturbed", COMMANDS["train"], (0,)))
    drawn = undisturbed if options.undisturbed else cases(options.seed)
    chosen = [*islice(drawn, options.cases)]
    calm = [
        Case("undisturbed", w, (0,), o)
        for w, o in {c.words: c.output for c in chosen if c.number}.items()
    ]
    begun, failed = time.monotonic(), 0
    with Pool(options.jobs) as pool:
        try_one = partial(wrong_of, forked=options.forked)
        seconds = {
            c.words: took for c, (_, took) in zip(calm, pool.map(try_one, calm), strict=True)
        }
        timed = [replace(c, moment=c.moment * seconds.get(c.words, 0.0)) for c in chosen]
        tried = pool.imap(try_one, timed)
        for number, (case, (wrong, took)) in enumerate(zip(chosen, tried, strict=True)):
            failed += bool(wrong)
            print(f"{number:4} {took:5.1f} s  {case.name[:70]:70} {'FAILED' if wrong else 'ok'}")
            print(*(f"     {line}\n" for line in wrong), sep="", end="", flush=True)
    print(f"{options.cases} cases, {failed} failed, {time.monotonic() - begun:.0f} s")
    return int(failed > 0)
