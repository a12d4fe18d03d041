"""The ranks that write the parts of a checkpoint."""

import random
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.extent import extent

pytest.importorskip("torch")

from shardir.backend.torch.shardir_runtime import runtime
from shardir.backend.torch.shardir_runtime.checkpoints.distributed import states_to_write
from shardir.backend.torch.shardir_runtime.run.states import States


def test_one_rank_writes_each_element():
    """On random meshes, of states whose parts differ in size, and of those that all ranks have."""
    chance = random.Random(0)
    for _ in range(extent(8, 2000)):
        axes = {name: chance.choice([1, 2, 3, 4]) for name in "abc"}
        types: dict[str, Any] = {}
        for key in "vwxyz":
            names = chance.sample("abc", 3)
            cut = chance.randint(0, 3)
            dims = (tuple(names[:cut]), tuple(names[cut : chance.randint(cut, 3)]))
            shape = (chance.randint(0, 9), chance.randint(1, 9))
            types[key] = SimpleNamespace(shape=shape, dims=dims, dtype="f32")
        counts = {key: np.zeros(type.shape, int) for key, type in types.items()}
        places = {}
        if chance.random() < 0.5:
            axes = {"stage": chance.randint(1, 3), **axes}
            for key in types:
                some = chance.randint(1, axes["stage"])
                places[key] = tuple(sorted(chance.sample(range(axes["stage"]), some)))
        for rank in range(np.prod([*axes.values()])):
            mesh = runtime.Mesh([*axes.items()], rank)
            of_rank: Any = SimpleNamespace(mesh=mesh, types=types, places=places)
            of_rank.bounds = lambda type, of_rank=of_rank: States.bounds(of_rank, type)
            for name in ("is_here", "is_among"):
                setattr(of_rank, name, partial(getattr(States, name), of_rank))
            for key, writes in states_to_write(of_rank):
                if not of_rank.is_here(key):
                    continue
                place = tuple(slice(*b) for b in of_rank.bounds(types[key]))
                counts[key][place] += writes
        assert all((count == 1).all() for count in counts.values()), (axes, types)
