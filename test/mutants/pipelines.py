"""Mutants of pipelines: modes."""

from mutants import Mutant

MUTANTS = [
    Mutant(
        "strategies are saved before they are decided on",
        "save-strategies runs before the pass that decides.",
        "shardir/pipelines.py",
        "with_files",
        "found.insert(at + 1, new(str(save)))",
        "found.insert(at, new(str(save)))",
        "test/pipelines/test_pipelines.py",
    ),
]
