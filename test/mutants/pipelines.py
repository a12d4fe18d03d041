"""Mutants of pipelines: pipelines and modes."""

from mutants import Mutant

MUTANTS = [
    Mutant(
        "data does not insert the batch",
        "The mode data does not lower to the local view.",
        "shardir/pipelines.py",
        '"data": f"inline-calls,data-parallel,{_PROPAGATED}"',
        '"data": f"inline-calls,data-parallel,assign-stages,propagate-strategies,{_LAID_OUT}"',
        "test/pipelines/test_modes.py::test_a_mode_is_its_pipeline",
    ),
    Mutant(
        "an unknown option is ignored",
        "An option that no pass of a pipeline has is no error.",
        "shardir/pipelines.py",
        "if not any(name in options for options in open_options):",
        "if False:",
        "test/pipelines/test_modes.py::test_options_that_a_mode_does_not_have",
    ),
    Mutant(
        "commas in braces separate passes",
        "The text of a pipeline is split at commas within options.",
        "shardir/pipelines.py",
        'if c in "({[":',
        'if c in "([":',
        "test/pipelines/test_pipelines.py",
    ),
    Mutant(
        "strategies are saved before they are decided on",
        "save-strategies runs before the pass that decides.",
        "shardir/pipelines.py",
        "found.insert(at + 1, new(str(save)))",
        "found.insert(at, new(str(save)))",
        "test/pipelines/test_pipelines.py",
    ),
    Mutant(
        "options reach the first pass only",
        "An option of a pipeline goes to its first pass.",
        "shardir/pipelines.py",
        "        for s, open_ in zip(found, open_options, strict=True)",
        "        for s, open_ in zip(found[:1], open_options[:1], strict=True)",
        "test/pipelines/test_modes.py::test_a_mode_has_the_options_of_its_passes",
    ),
]
