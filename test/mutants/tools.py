"""Mutants of tools: the command lines."""

from mutants import Mutant

MUTANTS = [
    Mutant(
        "disagreement is success",
        "shard-run --check exits with 0 where results differ.",
        "tools/run.py",
        "return 0 if all(difference.agrees for difference in differences) else 1",
        "return 0",
        "test/tools/test_exit_codes.py",
    ),
    Mutant(
        "errors are success",
        "shard-opt exits with 0 where the program has errors.",
        "tools/opt.py",
        "return int(failed)",
        "return 0",
        "test/tools/test_opt.py::test_errors_of_passes",
    ),
    Mutant(
        "split inputs lose their lines",
        "Programs after the first are located from line 1.",
        "tools/opt_files.py",
        'chunks.append([""] * (number + 1))',
        "chunks.append([])",
        "test/tools/test_announced_errors.py::test_split_input",
    ),
    Mutant(
        "announced errors may be on any line",
        "--verify-diagnostics accepts an error on another line.",
        "tools/expected.py",
        "d.line == self.line and",
        "",
        "test/tools/test_announced_errors.py::test_an_announced_error_has_its_line_severity_and_text",
    ),
    Mutant(
        "unexpected errors are fine",
        "--verify-diagnostics accepts errors that are not announced.",
        "tools/expected.py",
        "return unexpected + [",
        "return [",
        "test/tools/test_announced_errors.py::test_announced_errors",
    ),
    Mutant(
        "no group has all ranks",
        "shard-calibrate does not measure collectives between all ranks.",
        "tools/collective_probes.py",
        "range(2, ranks + 1) if",
        "range(2, ranks) if",
        "test/tools/test_shard_calibrate.py::test_groups_and_sizes",
    ),
    Mutant(
        "a busy machine calibrates",
        "shard-calibrate succeeds while other processes use the cores.",
        "tools/calibrate.py",
        "if load > MAX_LOAD:",
        "if False:",
        "test/tools/test_shard_calibrate.py",
    ),
    Mutant(
        "errors count on one side only",
        "An error counts only where the model predicts too much.",
        "tools/fitted_cluster.py",
        "max(ratio, 1 / ratio) - 1",
        "ratio - 1",
        "test/tools/test_shard_calibrate.py::test_errors_are_of_the_ratio_either_way",
    ),
    Mutant(
        "a collective takes what is around it",
        "A probe of a collective counts the work of the ops between its calls.",
        "tools/fitted_cluster.py",
        "found[name] - sum(spent[name].values()) + mine",
        "found[name]",
        "test/tools/test_shard_calibrate.py -k take_their_work",
    ),
]
