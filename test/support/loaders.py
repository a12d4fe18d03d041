"""Loaders of tests: ten rows, in another order in each epoch."""

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import IterableDataset, TensorDataset

ROWS = 10


def rows() -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(3)
    x = torch.randn(ROWS, 6, generator=g).double()  # which datasets store as f32
    return x, torch.arange(ROWS) % 3


def loader(batch: int, workers: int = 0, seed: int = 0) -> Any:
    """Return a shuffling StatefulDataLoader of pairs. The sampler alone has a generator: that of a
    loader would also give the seeds of workers, when an epoch begins anew."""
    from torchdata.stateful_dataloader import StatefulDataLoader
    from torchdata.stateful_dataloader.sampler import RandomSampler

    sampler = RandomSampler(range(ROWS), generator=torch.Generator().manual_seed(seed))
    return StatefulDataLoader(
        TensorDataset(*rows()), batch, sampler=sampler, num_workers=workers, drop_last=True
    )


class Stream(IterableDataset):
    """Samples as webdataset has them: each a dict, read in order; each worker has its share."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        x, labels = rows()
        info = torch.utils.data.get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        for i in range(first, ROWS, step):
            yield {"x": x[i].numpy(), "labels": int(labels[i])}
