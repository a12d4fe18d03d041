"""Mutants of analysis: aliasing, storages and roles."""

from mutants import Mutant

MUTANTS = [
    Mutant(
        "a loop frees what it reads",
        "A value from before a loop is live until its last use in the loop.",
        "shardir/analysis/storages.py",
        "self.last[v] = last",
        "pass",
        "test/filecheck/overlap-communication/microbatches.ir",
    ),
    Mutant(
        "a reshape of a transpose is a view",
        "A copy counts as a view of its operand.",
        "shardir/analysis/aliasing.py",
        "return is_strided(op.operands[0], mesh)",
        "return False",
        "test/analysis/test_storages.py",
    ),
    Mutant(
        "the memory of arguments is free",
        "A storage that is joined to an argument is the function's own.",
        "shardir/analysis/storages.py",
        "if isinstance(mine, BlockArgument):",
        "if False:",
        "test/analysis/test_storages.py",
    ),
    Mutant(
        "started collectives read at once",
        "A collective that is started has read its operands before its wait.",
        "shardir/analysis/storages.py",
        ".append(Span(self.at[op], end))",
        "",
        "test/analysis/test_storages.py",
    ),
    Mutant(
        "operands of unused ops are live",
        "An op that no result depends on keeps its operands alive.",
        "shardir/analysis/storages.py",
        "if is_pure and not any(r in needed for r in op.results):",
        "if False:",
        "test/analysis/test_storages.py",
    ),
    Mutant(
        "states belong to the caller",
        "A step may not write into its states, since only parameters are retained.",
        "shardir/analysis/roles.py",
        "if argument.is_retained",
        "if argument.role.name == 'PARAMETER'",
        "test/analysis/test_storages.py",
    ),
    Mutant(
        "a collective in flight pins nothing",
        "Memory may be overwritten while a started collective reads it.",
        "shardir/analysis/storages.py",
        "span.start < at < span.end",
        "span.start == at",
        "test/analysis/test_storages.py",
    ),
]
