"""Mutants of reports."""

from mutants import Mutant

MUTANTS = [
    Mutant(
        "an explanation starts at the second redistribution",
        "--explain-redistributions omits the first one from the sum.",
        "shardir/reports/redistributions.py",
        "sum(p.received_bytes for p in plans)",
        "sum(p.received_bytes for p in plans[1:])",
        "test/reports",
    ),
]
