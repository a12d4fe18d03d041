"""Mutants of shardir.testing: what a law or the reducer would not see."""

from mutants import Mutant

MUTANTS = [
    Mutant(
        "all ranks have the values that are expected",
        "The results of ranks are not compared.",
        "shardir/testing/op_laws.py",
        "row_errors",
        "return p.differences(run(module, name, p.arguments[: len(inputs)]))",
        'return ""',
        "test/testing/test_check_op.py",
    ),
    Mutant(
        "gradients have one digit",
        "Gradients are compared as if the reference had a large error.",
        "shardir/testing/problems.py",
        "Problem.differences",
        "least = self.least if i >= gradients else 0.0",
        "least = 0.1 if i >= gradients else 0.0",
        "test/testing/test_check_op.py",
    ),
    Mutant(
        "an attribute that is always there varies",
        "An attribute with one value in all cases is not named.",
        "shardir/testing/op_laws.py",
        "OpLaws._attributes",
        "if len(values) == 1:",
        "if not values:",
        "test/testing/test_check_op.py",
    ),
    Mutant(
        "a pass runs once",
        "A second run of a pass is not compared with the first.",
        "shardir/testing/passes.py",
        "_PassLaws._checks",
        "if self.idempotent:",
        "if not self.idempotent:",
        "test/testing/test_check_pass.py",
    ),
    Mutant(
        "half of the ops stay",
        "The reducer leaves out halves alone.",
        "shardir/testing/reducer.py",
        "least",
        "if size <= 1:",
        "if size <= 2:",
        "test/testing/test_check_pass.py",
    ),
    Mutant(
        "a simulated all-reduce is a broadcast",
        "Simulated ranks have the value of the first rank in place of the sum.",
        "shardir/testing/simulated.py",
        "World.all_reduce",
        "REDUCTIONS[op](torch.stack(group.shared(x.clone())))",
        "group.shared(x.clone())[0]",
        "test/testing/test_execution.py",
    ),
]
