"""Mutants of the backend `shm` of emitted programs."""

from mutants import Mutant

MUTANTS = [
    Mutant(
        "shared memory is free after one reader",
        "A segment is used again once one of its readers has read it.",
        "shardir/backend/torch/shardir_runtime/shm/segments.py",
        "SegmentPool.read",
        "if not segment.unread:",
        "if reader >= 0:",
        "test/run/test_shm.py -k sequences",
    ),
    Mutant(
        "a sum begins with a rank's own part",
        "By shared memory each rank adds up in another order.",
        "shardir/backend/torch/shardir_runtime/shm/moves.py",
        "GroupMoves.all_reduce",
        "reduce(op, [operands[k] for k in sorted(operands)], own_part[0])",
        "reduce(op, list(operands.values()), own_part[0])",
        "test/run/test_shm.py -k steady",
    ),
    Mutant(
        "a rank that reads nothing more has sent nothing",
        "By shared memory messages of a rank that has left are lost where it cannot be answered.",
        "shardir/backend/torch/shardir_runtime/shm/links.py",
        "Links._try_send",
        "self._deaf.add(peer)",
        "self.closed.add(peer)",
        "test/run/test_shm.py -k left",
    ),
    Mutant(
        "reductions are made where they are to be",
        "By shared memory a reduction into memory that is not contiguous is lost.",
        "shardir/backend/torch/shardir_runtime/shm/moves.py",
        "GroupMoves.reduce",
        "if dense is not out:",
        "if dense is out:",
        "test/run/test_shm.py -k special",
    ),
    Mutant(
        "a message that has come waits for its receive to be waited for",
        "By shared memory a sender waits until its message is read, and its reader for the sender.",
        "shardir/backend/torch/shardir_runtime/shm/operations.py",
        "Operations.start",
        "if awaited is None or awaited[1] in self.links.inbox[awaited[0]]:",
        "if awaited is None:",
        "test/run/test_shm.py -k posted",
    ),
    Mutant(
        "a message has the bytes of any tensor",
        "By shared memory the elements of a tensor are sent in the order of their bytes.",
        "shardir/backend/torch/shardir_runtime/shm/segments.py",
        "_is_plain",
        "size <= ONE_COPY and x.is_contiguous() and",
        "size <= ONE_COPY and",
        "test/run/test_shm.py -k unordered",
    ),
    Mutant(
        "collectives of shm copy",
        "The runtime packs and sends blocks one by one on shm, whose collectives move several.",
        "shardir/backend/torch/shardir_runtime/shm/group.py",
        "SharedMemoryGroup",
        "supports_coalescing = True",
        "supports_coalescing = False",
        "test/run/test_runtime.py",
    ),
]
