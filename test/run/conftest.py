"""The device of the ranks, and examples that run once for all tests."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from support.device import DEVICE

from shardir.backend.torch.shardir_runtime.run.options import RunOptions

if DEVICE != "cpu":  # where a test names none
    of_options = RunOptions.words
    RunOptions.words = lambda self: [
        *of_options(self),
        *([] if self.device else ["--device", DEVICE]),
    ]


@pytest.fixture(scope="session")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """A function that runs an example (the arguments are those of a `Job`), each job once."""
    from support.ranks.example_runs import Job

    @cache
    def run_once(job: Job) -> Any:
        return job.run(tmp_path_factory.mktemp("example"))

    return lambda *arguments, **options: run_once(Job(*arguments, **options))
