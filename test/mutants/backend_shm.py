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
    Mutant(
        "a rank that reads nothing more has sent nothing",
        "By shared memory messages of a rank that has left are lost where it cannot be answered.",
        "shardir/backend/torch/runtime/runtime_shm_links.py",
        "self._deaf.add(peer)",
        "self.closed.add(peer)",
        "test/run/test_shm.py -k left",
    ),
    Mutant(
        "reductions are made where they are to be",
        "By shared memory a reduction into memory that is not contiguous is lost.",
        "shardir/backend/torch/runtime/runtime_shm_moves.py",
        "if dense is not out:",
        "if dense is out:",
        "test/run/test_shm.py -k special",
    ),
]
