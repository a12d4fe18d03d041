"""The positions of the ranks of all nodes (positions.py); a node reads the positions of its ranks.

Nodes exchange positions by the store of their rendezvous, and only after a time without progress: a
run that makes progress exchanges nothing.
"""

import base64
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from shardir.backend.torch.launch.positions import Records, Standing
from shardir.backend.torch.shardir_runtime.collectives.position import RECORD

Share = Callable[[str | None], list[bytes]]
"""Publishes a text of a node, unless it is None; returns the last text of each node."""


class NodePositions:
    """The positions of a node's ranks.

    Args:
        path: of the file in which its ranks record them.
        timeout: of a wait for a rank, in seconds.
    """

    def __init__(self, ranks: int, path: Path, timeout: float):
        self.path, self.timeout = path, timeout
        self.records = Records(ranks, path)
        self.begin(lambda _: [])

    def begin(self, share: Share) -> None:
        """Begin a round: its ranks have not started."""
        self.records.clear()
        self._share, self._said = share, list[bytes]()
        self._last, self._since = b"", time.monotonic()
        self._has_told = self._has_asked = False

    def watch(self) -> None:
        """Tell the other nodes, and ask them, where the ranks have not moved for a while."""
        records = b"".join(self.records.read())
        if records != self._last:
            self._last, self._since = records, time.monotonic()
            self._has_told = self._has_asked = False
            return
        still = time.monotonic() - self._since
        if still > self.timeout / 4 and not self._has_told:
            self._has_told = True
            self._ask(records)
        if still > self.timeout / 2 and not self._has_asked:
            self._has_asked = True
            self._ask(None)

    @property
    def is_still(self) -> bool:
        """Whether the ranks have not moved for a while."""
        return time.monotonic() - self._since > self.timeout / 2

    def standing(self, first: int, program: Path, size: int) -> Standing:
        """Return where the ranks of all nodes stand, as far as these have told.

        Args:
            first: the first rank of this node.
            size: the number of ranks of each stage.
        """
        own = self.records.read()
        self._ask(b"".join(own))
        here = first // len(own)
        all_records = {
            node * len(own) + k: said[k * RECORD : (k + 1) * RECORD]
            for node, said in enumerate(self._said) if node != here
            for k in range(len(said) // RECORD)
        }  # fmt: skip
        return Standing(all_records | dict(enumerate(own, first)), program, size)

    def _ask(self, records: bytes | None) -> None:
        with suppress(Exception):  # node 0, which serves the store, may have ended
            told = None if records is None else base64.b64encode(records).decode()
            self._said = [base64.b64decode(text) for text in self._share(told)]
