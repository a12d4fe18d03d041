"""Mutants of grammar: the tables and the loop that runs them."""

from mutants import Mutant

MUTANTS = [
    Mutant(
        "the tables of any grammar are used",
        "The file of the tables is not named by the grammar.",
        "shardir/grammar/tables.py",
        "tables_of",
        'key = repr((code, version("lark"), [*starts], grammar))',
        'key = repr((code, version("lark"), [*starts]))',
        "test/grammar/test_retained_tables.py",
    ),
    Mutant(
        "the tables are never retained",
        "Lark computes the tables in each process.",
        "shardir/grammar/retained.py",
        "_retain",
        "Path(part.name).replace(file)",
        "os.unlink(part.name)",
        "test/grammar/test_retained_tables.py",
    ),
    Mutant(
        "terminals are tried from the last",
        "A state takes a name for a keyword, or a part of a terminal for all of it.",
        "shardir/grammar/machine.py",
        "Machine._prepare.match",
        "for single in singles)",
        "for single in reversed(singles))",
        "test/grammar/test_machine.py test/syntax/test_parser.py",
    ),
    Mutant(
        "an absent child is dropped",
        "A reduction gets no None for an optional child that is absent.",
        "shardir/grammar/machine.py",
        "_make_of_picked",
        "[None if i < 0 else children[i] for i in picks]",
        "[children[i] for i in picks if i >= 0]",
        "test/grammar/test_machine.py",
    ),
]
