"""The checkpoints of a run in its course: where it begins, when it saves, whether it ends early.

A part of the runtime; needs only torch, and safetensors where there are checkpoints.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import runtime_manifest as manifests
from runtime_anomalies import NotFiniteError
from runtime_events import FINISH, Events
from runtime_interruption import INTERRUPT, Interruption, may_finish
from runtime_options import RunOptions
from runtime_plan import PlanError, PlanFunction
from runtime_states import States


class Saving:
    """A run without checkpoints.

    Args:
        start: the steps that are done before it.

    Attributes:
        signal: the system's signal that the run is to end, on whose arrival the ranks have agreed;
            0 if there is none.
    """

    signal = 0

    def __init__(self, interruption: Interruption | None, start: int):
        self.interruption, self.start = interruption, start

    def begin(self) -> None:
        """Begin a step."""
        if self.interruption is not None:
            self.interruption.begin()

    def agreed(self) -> bool:
        """Whether this step is the last one, since that is asked for."""
        found = 0 if self.interruption is None else self.interruption.agreed()
        self.signal = 0 if found == FINISH else found
        return bool(found)

    def is_due(self, step: int, is_last: bool) -> bool:
        """Whether there is a checkpoint after so many steps."""
        return False

    def save(self, step: int) -> None:
        """Save the states after so many steps."""


class Checkpointing(Saving):
    """A run with checkpoints."""

    def __init__(
        self, options: RunOptions, states: States, function: PlanFunction, events: Events,
        start: int,
    ):  # fmt: skip
        from runtime_checkpoints import Checkpoints

        assert options.checkpoints is not None
        super().__init__(Interruption(states.mesh, (*INTERRUPT, FINISH)), start)
        self.options, self.events = options, events
        self.checkpoints = Checkpoints(options.checkpoints, states, function, start, options.keep)

    def is_due(self, step: int, is_last: bool) -> bool:
        every = self.options.save_every
        return is_last or bool(every and step % every == 0)

    def save(self, step: int) -> None:
        self.checkpoints.save(step)
        self.events.send(event="checkpoint", step=step, folder=str(self.checkpoints.folder))
        if self.signal:
            self.checkpoints.finish()
            self.events.send(event="stopped", step=step, signal=self.signal)


@contextmanager
def saving(
    options: RunOptions, states: States, function: PlanFunction, events: Events
) -> Iterator[Saving]:
    """Yield what saves the states of a run, which are those of the checkpoint that it resumes; all
    checkpoints are written at the end of the block, also where a value is not finite.

    Raises:
        PlanError: a checkpoint cannot be read or written, or has all steps of the run.
    """
    if (options.checkpoints or options.resume) and not _has_safetensors():
        raise PlanError("checkpoints need safetensors: pip install 'shardir[weights]'")
    start = 0
    if options.resume is not None and not _is_new(options):
        from runtime_checkpoints import restore

        path = manifests.located(options.resume)
        start = restore(path, states, function).step
        if start >= options.steps:
            raise PlanError(
                f"expected more than {start} --steps, which {path} has, got {options.steps}"
            )
    if options.checkpoints is None:
        yield Saving(Interruption(states.mesh, (FINISH,)) if may_finish() else None, start)
        return
    saved = Checkpointing(options, states, function, events, start)
    try:
        yield saved
    except NotFiniteError:  # on all ranks, or on this one while the others wait for it
        saved.checkpoints.finish()
        raise
    saved.checkpoints.finish()


def _is_new(options: RunOptions) -> bool:
    """Whether a run that resumes its own checkpoints has none yet."""
    folder = options.resume
    return folder is not None and folder == options.checkpoints and not manifests.complete(folder)


def _has_safetensors() -> bool:
    from importlib.util import find_spec

    return find_spec("safetensors") is not None
