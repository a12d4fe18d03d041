"""The checkpoints of a run in its course: where it begins, when it saves, whether it ends early.

A part of the runtime; needs only torch, and safetensors where there are checkpoints.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import runtime_manifest as manifests
from runtime_events import FINISH, Events
from runtime_interruption import INTERRUPT, Interruption, may_finish
from runtime_options import RunOptions
from runtime_plan import PlanError
from runtime_states import States


class Saving:
    """A run without checkpoints.

    Attributes:
        start: the steps that are done before it.
        signal: the system's signal that the run is to end, on whose arrival the ranks have agreed;
            0 if there is none.
    """

    start = 0
    signal = 0

    def __init__(self, interruption: Interruption | None):
        self.interruption = interruption

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

    def __init__(self, options: RunOptions, states: States, function: str, events: Events):
        from runtime_checkpoints import Checkpoints

        assert options.checkpoints is not None
        super().__init__(Interruption(states.mesh, (*INTERRUPT, FINISH)))
        self.options, self.events = options, events
        self.checkpoints = Checkpoints(options.checkpoints, states, function, options.keep)

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
def saving(options: RunOptions, states: States, function: str, events: Events) -> Iterator[Saving]:
    """Yield what saves the states of a run, which are those of the checkpoint that it resumes; all
    checkpoints are written at the end of the block.

    Raises:
        PlanError: a checkpoint cannot be read or written, or has all steps of the run.
    """
    if (options.checkpoints or options.resume) and not _has_safetensors():
        raise PlanError("checkpoints need safetensors: pip install 'shardir[weights]'")
    if options.checkpoints is None:
        saved = Saving(Interruption(states.mesh, (FINISH,)) if may_finish() else None)
    else:
        saved = Checkpointing(options, states, function, events)
    if options.resume is not None and not _is_new(options):
        from runtime_checkpoints import restore

        path = manifests.located(options.resume)
        saved.start = restore(path, states).step
        if saved.start >= options.steps:
            raise PlanError(
                f"expected more than {saved.start} --steps, which {path} has, got {options.steps}"
            )
    yield saved
    if isinstance(saved, Checkpointing):
        saved.checkpoints.finish()


def _is_new(options: RunOptions) -> bool:
    """Whether a run that resumes its own checkpoints has none yet."""
    folder = options.resume
    return folder is not None and folder == options.checkpoints and not manifests.complete(folder)


def _has_safetensors() -> bool:
    from importlib.util import find_spec

    return find_spec("safetensors") is not None
