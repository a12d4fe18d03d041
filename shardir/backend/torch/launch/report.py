"""The output of shard-run: progress, results, and the comparison with one device."""

import math
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, TextIO

import numpy as np

from shardir.backend.runs import LaunchError, OnTrace, Options, Report
from shardir.backend.torch.launch.start import run
from shardir.backend.torch.shardir_runtime.checkpoints import manifest as manifests
from shardir.backend.torch.shardir_runtime.plan.program import ProgramPlan
from shardir.backend.torch.shardir_runtime.run.events import repeat_sentence
from shardir.diagnostics.terminal import Waiting, console, is_terminal
from shardir.syntax.files import scratch_folder

COMPARED_STEPS = 20
# How far two runs may differ, relatively, where the sums are added up in another order.
TOLERANCES = {"f64": 1e-9, "f32": 1e-4, "bf16": 2e-2, "f16": 2e-2}


class Progress:
    """The events of a run as a line that stays on a terminal, or as lines elsewhere.

    Args:
        label: what runs, if there are several runs: before the line, or once before all lines.
        log_every: without a terminal, the steps between two lines; by default a tenth of them.
    """

    def __init__(
        self, label: str, steps: int, log_every: int | None = None, out: TextIO | None = None
    ):
        self.label, self.steps = label, steps
        self.log_every = log_every or max(1, steps // 10)
        self.out = out or sys.stdout
        self._ranks = 0
        self._headed = not label
        self._waiting: Waiting | None = None
        self._stack = ExitStack()
        self._bar: Any = None
        self._tasks: dict[str, Any] = {}
        self._firsts: dict[str, int] = {}
        self._rates: dict[str, LineRates] = {}

    @contextmanager
    def shown(self) -> Iterator["Progress"]:
        """Show the start of the run, and then the bar, for the block."""
        self._waiting = Waiting(f"{self._prefix}starting the ranks", self.out)
        try:
            with ExitStack() as self._stack:
                yield self
        finally:
            if self._waiting is not None:
                self._waiting.stop()
            self._waiting = self._bar = None

    @property
    def _prefix(self) -> str:
        return f"{self.label}: " if self.label else ""

    def _begin(self) -> None:
        """Show the bar in place of the start, on a terminal."""
        if self._waiting is None:
            return
        self._waiting.stop()
        self._waiting = None
        if not is_terminal(self.out):
            return
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as Bar
        from rich.table import Column

        text = Column(no_wrap=True, overflow="ellipsis")
        left = TextColumn("{task.fields[left]} left")
        columns = (BarColumn(10), left, TextColumn("{task.description}", table_column=text))
        self._bar = self._stack.enter_context(Bar(*columns, console=console(self.out)))

    def __call__(self, event: dict[str, Any]) -> None:
        """Show an event of rank 0."""
        if event["event"] == "evaluated":
            name = f"{event['function']}: {event['name']}"
            text = f"{event['of']}: step {event['step']}/{self.steps}  {name} = "
            self._print(text + f"{event['value']:.6g}")
        if event["event"] == "stopped":
            self._print(f"stopped after step {event['step']}, with a checkpoint")
        if event["event"] == "repeat" and (text := repeat_sentence(event)):
            self._print(text)
        if event["event"] == "restart":
            self._print(f"started again: {event['reason']}")
        if event["event"] == "start":
            if self._ranks not in (0, event["ranks"]):
                self._print(f"goes on with {event['ranks']} ranks")
            self._ranks = event["ranks"]
            if self._waiting is not None:
                self._waiting.update(f"{self._prefix}the first step")
        if event["event"] != "steps":
            return
        self._begin()
        name, first, losses = event["function"], event["first"], event["losses"]
        if self._bar is not None:
            if name not in self._tasks:
                self._tasks[name] = self._bar.add_task("", total=self.steps, left="")
            done = first + len(losses) - 1
            rate = (done - self._firsts.setdefault(name, first) + 1) / max(event["seconds"], 1e-9)
            left = _clock((self.steps - done) / rate)
            parts = self._parts(event, done, event["rates"])
            text = escape(self._prefix + "  ".join(parts))
            self._bar.update(self._tasks[name], completed=done, description=text, left=left)
            return
        rates = self._rates.setdefault(name, LineRates(first - 1))
        rates.add(event)
        for step in range(first, first + len(losses)):
            if step in (1, self.steps) or step % self.log_every == 0:
                self._print("  ".join(self._parts(event, step, rates.until(step))))

    def _parts(self, event: dict[str, Any], step: int, rates: Mapping[str, float]) -> list[str]:
        """The parts of the line of a step."""
        at, share, waits = step - event["first"], event.get("share"), event.get("waits")
        parts = [f"{event['function']}: step {step}/{self.steps}"]
        parts += [f"loss {event['losses'][at]:.6g}"]
        parts += [f"{name} {x[at]:.6g}" for name, x in event["metrics"].items()]
        parts += _format_rates(rates)
        parts += [f"{share:.2%} of peak"] if share else []
        parts += [f"{event['memory'] / 2**20:,.0f} MiB"]
        parts += [f"{waits['share']:.0%} wait for rank {waits['rank']}"] if waits else []
        return parts

    def _print(self, text: str) -> None:
        """Print a line, above the bar if there is one; before the first one what runs."""
        if self._waiting is not None and is_terminal(self.out):
            self._begin()
        if not self._headed:
            text, self._headed = f"{self.label}:\n{text}", True
        if self._bar is None:
            print(text, file=self.out, flush=True)
        else:
            self._bar.console.print(text, markup=False)


class LineRates:
    """The rates of steps since the previous line, from events that are reported at other times.
    Within an event each step takes as long.

    Args:
        done: the steps before the first event.
    """

    def __init__(self, done: int):
        self._line = self._begun = (done, 0.0)
        self._ended = self._begun
        self._ratios: dict[str, float] = {}

    def add(self, event: dict[str, Any]) -> None:
        """Add an event with steps, which may begin anew after a restart."""
        first, seconds, rates = event["first"], event["seconds"], event["rates"]
        if first - 1 != self._ended[0] or seconds < self._ended[1]:
            self._line = self._ended = (first - 1, 0.0)
        self._begun, self._ended = self._ended, (first + len(event["losses"]) - 1, seconds)
        if steps := rates.get("steps"):
            self._ratios = {what: rate / steps for what, rate in rates.items()}

    def until(self, step: int) -> dict[str, float]:
        """Return the rates from the previous line to a step of the last event, by unit; none where
        it took no time."""
        (begun, since), (ended, seconds) = self._begun, self._ended
        now = since + (seconds - since) * (step - begun) / (ended - begun)
        (line, before), self._line = self._line, (step, now)
        if now <= before:
            return {}
        return {what: (step - line) / (now - before) * x for what, x in self._ratios.items()}


def escape(text: str) -> str:
    """Return a text for rich without markup."""
    from rich.markup import escape

    return escape(text)


def _clock(seconds: float) -> str:
    """A time as a clock has it: 1:02:03."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def summary(report: Report) -> list[str]:
    """Return the last lines of a run's output."""
    lines = [f"{report.ranks} {_plural('rank', report.ranks)} on {report.backend}"]
    for name, losses in report.losses.items():
        count = len(losses)
        rate = report.steps_per_second.get(name, math.nan)
        lines.append(
            f"{name}: {count} {_plural('step', count)}, final loss {losses[-1]:.6g},"
            f" {rate:.1f} steps/s{_throughput(report, name, rate)}"
        )
    lines += [str(report.waits)] * (report.waits is not None)
    for result in report.results:
        lines.append(f"{result['function']}: {result['name']} = {_value(result)}")
    return lines


def _throughput(report: Report, name: str, rate: float) -> str:
    """The samples and tokens per second of a step function."""
    counts = {"samples": report.samples, "tokens": report.tokens}
    found = [f", {of[name] * rate:,.0f} {what}/s" for what, of in counts.items() if name in of]
    return "".join(found) if math.isfinite(rate) else ""


def _format_rates(rates: Mapping[str, float]) -> list[str]:
    """The rates of steps, and of the smallest that is counted in them."""
    return [
        f"{rates[what]:{',.0f' if rates[what] >= 100 else '.3g'}} {what}/s"
        for what in dict.fromkeys([*rates][:1] + [*rates][-1:])
    ]


def _plural(word: str, count: int) -> str:
    return word if count == 1 else word + "s"


def _value(result: dict[str, Any]) -> str:
    value, shape = result["value"], list(result["shape"])
    if not shape and value is not None:
        return f"{value:.6g}" if isinstance(value, float) else str(value)
    kind = f"{result['dtype']} {shape}"
    if value is None or math.prod(shape) > 16:
        return f"{kind} (--dump FILE writes it)"
    return f"{np.array2string(np.array(value), precision=6, separator=', ')} ({kind})"


# ---- --check ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Difference:
    """The difference between the results of all ranks and the results of one device."""

    what: str
    difference: float
    allowed: float

    @property
    def agrees(self) -> bool:
        """Whether it is within rounding errors."""
        return self.difference <= self.allowed

    def __str__(self) -> str:
        verdict = "agree" if self.agrees else "DISAGREE"
        return (
            f"check: {self.what}: largest relative difference {self.difference:.2g}"
            f" (allowed {self.allowed:.2g}): {verdict}"
        )


def run_and_check(
    plan: ProgramPlan, options: Options, progress: Progress, on_trace: OnTrace | None = None
) -> tuple[Report, list[Difference]]:
    """Run on all ranks and on one device, and compare losses and results."""
    if options.nnodes.high > 1:
        raise LaunchError(f"--check: expected one machine, got --nnodes {options.nnodes}")
    if plan.single is None:
        raise LaunchError(
            "--check: there is no program for one device to check against: this one was compiled"
            " from a program that is already written per rank"
        )
    with scratch_folder() as folder:
        ranks, single = options.dump or folder / "ranks.npz", folder / "single.npz"
        shown, resume = options.verbose, options.resume
        if resume is not None and (complete := manifests.complete(resume)):
            resume = complete[-1]  # the ranks may write more
        elif resume == options.checkpoints:
            resume = None
        with progress.shown() if shown else nullcontext():
            given, on_event = replace(options, dump=ranks), progress if shown else None
            report = run(plan.directory, given, on_event=on_event, on_trace=on_trace)
        alone = Progress("one device", progress.steps, progress.log_every, progress.out)
        one = replace(
            options, dump=single, resume=resume, checkpoints=None, log=None, tensorboard=None
        )
        with alone.shown() if shown else nullcontext():
            on_event = alone if shown else None
            run(plan.directory, one, program=plan.single, on_event=on_event)
        with np.load(ranks) as ours, np.load(single) as theirs:
            return report, compare(plan, dict(ours), dict(theirs), options.steps)


def compare(plan: ProgramPlan, ours: dict, theirs: dict, steps: int) -> list[Difference]:
    """Return the differences of the first losses of each step, and of each function's results.

    Results come after all the steps, and rounding errors grow with them: so does the tolerance.
    """
    found = []
    for function in plan.functions:
        dtypes = {value.dtype for value in (*function.args, *function.results)}
        dtypes.add(function.narrowest)
        allowed = max((TOLERANCES[d] for d in dtypes if d in TOLERANCES), default=0.0)
        key = f"losses/{function.name}"
        if function.kind == "step" and key in ours:
            a, b = ours[key][:COMPARED_STEPS], theirs[key][:COMPARED_STEPS]
            # Step by step: a late loss may be a thousandth of the first one.
            each = [relative_difference(x, y) for x, y in zip(a, b, strict=True)]
            what = f"{function.name}'s losses in the first {len(each)} {_plural('step', len(each))}"
            found.append(Difference(what, max(each, default=0.0), allowed))
        if function.is_beside:
            growth = max(1.0, steps / COMPARED_STEPS)
            for i, result in enumerate(function.results):
                key = f"results/{function.name}/{i}"
                if key in ours:
                    what = f"{function.name}'s {result.name}"
                    difference = relative_difference(ours[key], theirs[key])
                    found.append(Difference(what, difference, allowed * growth))
    return found


def relative_difference(a: Any, b: Any) -> float:
    """Return the maximum difference, relative to the maximum magnitude of finite numbers; infinite
    if only one of two numbers is NaN or infinite. Two NaNs agree, as do equal infinities."""
    a, b = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    if a.shape != b.shape:
        return math.inf
    rest = (a != b) & ~(np.isnan(a) & np.isnan(b))
    if not rest.any():
        return 0.0
    a, b, finite = a[rest], b[rest], np.abs(b[np.isfinite(b)])
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        return math.inf
    return float(np.abs(a - b).max()) / max(float(finite.max()), 1e-30)
