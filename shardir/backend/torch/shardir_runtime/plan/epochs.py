"""The batches that the rows of a file make, epoch after epoch.

It needs only Python.
"""

import re
from dataclasses import dataclass

LAST = re.compile(r"wrap|drop|refuse|pad=(.+)")
"""What can become of rows at the end of an epoch that are no batch; `pad` names the mask."""


@dataclass(frozen=True)
class Epochs:
    """The batches of a file.

    Args:
        last: what becomes of the rows at the end of an epoch that are no batch. `wrap`: they make
            one with the first rows of the next epoch; `pad`: so they do, and the next epoch has
            these rows too; `drop`: they are left out; `refuse`: there are none.
    """

    rows: int
    batch: int
    last: str = "wrap"

    @property
    def batches(self) -> int:
        """The number of batches of an epoch: complete ones, and one that is padded."""
        return -(-self.rows // self.batch) if self.last == "pad" else self.rows // self.batch

    def first(self, number: int) -> int:
        """Return the place of a batch's first row; places of all epochs follow one another."""
        if self.last == "wrap":
            return number * self.batch
        epoch, index = divmod(number, self.batches)
        return epoch * self.rows + index * self.batch

    def count(self, number: int) -> int:
        """Return the number of rows of a batch that are no padding: its first ones."""
        if self.last != "pad":
            return self.batch
        return min(self.batch, self.rows - number % self.batches * self.batch)
