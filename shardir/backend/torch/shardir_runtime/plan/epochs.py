"""The batches of the rows of a file, over epochs. This file needs only Python."""

import re
from dataclasses import dataclass

LAST = re.compile(r"wrap|drop|refuse|pad=(.+)")
"""The policies for the incomplete last batch of an epoch; `pad` names the mask."""


@dataclass(frozen=True)
class Epochs:
    """The batches of a file.

    Args:
        last: the policy for the incomplete last batch of an epoch. `wrap`: it is completed by the
            first rows of the next epoch; `pad`: it is completed by them, and the next epoch has
            them again; `drop`: it is left out; `refuse`: it is an error.
    """

    rows: int
    batch: int
    last: str = "wrap"

    @property
    def batches(self) -> int:
        """The number of batches of an epoch: complete batches, and a padded batch."""
        return -(-self.rows // self.batch) if self.last == "pad" else self.rows // self.batch

    def first(self, number: int) -> int:
        """Return the place of a batch's first row, counted over all epochs."""
        if self.last == "wrap":
            return number * self.batch
        epoch, index = divmod(number, self.batches)
        return epoch * self.rows + index * self.batch

    def count(self, number: int) -> int:
        """Return the number of rows of a batch before its padding."""
        if self.last != "pad":
            return self.batch
        return min(self.batch, self.rows - number % self.batches * self.batch)
