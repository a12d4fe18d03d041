"""Mutants of the backend `shm` of emitted programs."""

from mutants import Mutant

MUTANTS = [
    Mutant(
        "shared memory is free after one reader",
        "A segment is used again once one of its readers has read it.",
        "shardir/backend/torch/runtime/runtime_shm_segments.py",
        "if not segment.unread:",
        "if reader >= 0:",
        "test/run/test_shm.py -k sequences",
    ),
    Mutant(
        "a sum begins with a rank's own part",
        "By shared memory each rank adds up in another order.",
        "shardir/backend/torch/runtime/runtime_shm_moves.py",
        "reduce(op, [operands[k] for k in sorted(operands)], mine[0])",
        "reduce(op, list(operands.values()), mine[0])",
        "test/run/test_shm.py -k steady",
    ),
]
