"""The checkpoints of a run: where it begins, when it saves, whether it ends early."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from ..data.loaders import LOADER, state_file
from ..plan.program import PlanError, PlanFunction
from ..run.anomalies import NotFiniteError
from ..run.events import FINISH, Events
from ..run.interruption import INTERRUPT, Interruption, may_finish
from ..run.options import RunOptions
from ..run.states import States
from . import manifest as manifests


class Beginning(NamedTuple):
    """States from which steps can run again."""

    step: int
    """The number of steps before them."""
    path: Path | None
    """The checkpoint; None for the initial values."""
    restore: Callable[[], Any]
    """Sets the states on all ranks."""


class Saving:
    """A run without checkpoints.

    Args:
        first: the beginning of the run.

    Attributes:
        start: the number of steps before the run.
        signal: the system's signal at which the ranks have agreed to end the run; else 0.
    """

    signal = 0

    def __init__(self, interruption: Interruption | None, first: Beginning):
        self.interruption, self.first, self.start = interruption, first, first.step

    def begin(self) -> None:
        """Begin a step."""
        if self.interruption is not None:
            self.interruption.begin()

    def agreed(self) -> bool:
        """Whether the ranks have agreed that this step is the last one."""
        found = 0 if self.interruption is None else self.interruption.agreed()
        self.signal = 0 if found == FINISH else found
        return bool(found)

    def is_due(self, step: int, is_last: bool) -> bool:
        """Whether a checkpoint is due after `step` steps."""
        return False

    def save(self, step: int) -> None:
        """Save the states after `step` steps."""

    def beginnings(self) -> list[Beginning]:
        """Return the beginnings from which steps of this run can run again, the latest first, after
        all checkpoints are written."""
        return [self.first]

    def asked(self) -> bool:
        """Whether this rank has received a signal to end the run at once."""
        return self.interruption is not None and self.interruption.signal in INTERRUPT


class Checkpointing(Saving):
    """A run with checkpoints."""

    def __init__(
        self, options: RunOptions, states: States, function: PlanFunction, events: Events,
        first: Beginning,
    ):  # fmt: skip
        from .distributed import Checkpoints

        assert options.checkpoints is not None
        super().__init__(Interruption(states.mesh, (*INTERRUPT, FINISH)), first)
        self.options, self.events, self.function = options, events, function
        self.checkpoints = Checkpoints(
            options.checkpoints, states, function, first.step, options.keep
        )

    def is_due(self, step: int, is_last: bool) -> bool:
        every = self.options.save_every
        return is_last or bool(every and step % every == 0)

    def save(self, step: int) -> None:
        self.checkpoints.save(step, self._loader(step))
        self.events.send(event="checkpoint", step=step, folder=str(self.checkpoints.folder))
        if self.signal:
            self.checkpoints.finish()
            self.events.send(event="stopped", step=step, signal=self.signal)

    def _loader(self, step: int) -> bytes | None:
        """Return the state of the launcher's loader after the batch of a step, if it has one."""
        folder = os.environ.get(LOADER)
        if folder is None or self.checkpoints.mesh.rank:
            return None
        return state_file(Path(folder), step).read_bytes()

    def beginnings(self) -> list[Beginning]:
        self.checkpoints.finish()
        found = manifests.complete(self.checkpoints.folder)
        written = [
            _beginning_at(path, self.checkpoints.states, self.function)
            for path in reversed(found) if manifests.step_of(path) > self.start
        ]  # fmt: skip
        is_there = self.first.path is None or self.first.path.is_dir()  # --keep may have removed it
        return [*written, *([self.first] if is_there else [])]


def _beginning_at(path: Path, states: States, function: PlanFunction) -> Beginning:
    from .distributed import restore

    return Beginning(manifests.step_of(path), path, partial(restore, path, states, function))


@contextmanager
def saving(
    options: RunOptions, states: States, function: PlanFunction, events: Events
) -> Iterator[Saving]:
    """Restore the checkpoint that a run resumes, and yield the object that saves its states. All
    checkpoints are written at the end of the block, even if a value is not finite.

    Raises:
        PlanError: a checkpoint cannot be read or written, or has all steps of the run.
    """
    if options.checkpoints or options.resume:
        check_safetensors()
    first = Beginning(options.steps_done, None, states.initialize)
    if options.resume is not None and not is_new(options):
        path = manifests.checkpoint_at(options.resume)
        first = _beginning_at(path, states, function)
        first = first._replace(step=first.restore().step)
        if first.step >= options.steps:
            raise PlanError(
                f"--steps {options.steps}: expected more than {first.step}, which {path} has"
            )
    elif options.steps_done > options.steps:
        raise PlanError(
            f"--steps {options.steps}: expected at least {options.steps_done}, which are done"
        )
    if options.checkpoints is None:
        yield Saving(Interruption(states.mesh, (FINISH,)) if may_finish() else None, first)
        return
    saved = Checkpointing(options, states, function, events, first)
    try:
        yield saved
    except NotFiniteError:  # on all ranks, or on this one while all others wait for it
        saved.checkpoints.finish()
        raise
    saved.checkpoints.finish()


def is_new(options: RunOptions) -> bool:
    """Return whether a run that resumes its own checkpoints has none yet."""
    folder = options.resume
    return folder is not None and folder == options.checkpoints and not manifests.complete(folder)


def check_safetensors() -> None:
    """Raise PlanError if there is no package that writes checkpoints."""
    from importlib.util import find_spec

    if find_spec("safetensors") is None:
        raise PlanError("checkpoints need safetensors: pip install 'shardir[weights]'")
