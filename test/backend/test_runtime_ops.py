"""Functions that emitted programs call, on one device: an op, the order of a group, padding."""

from itertools import permutations

import pytest
import torch

from shardir.backend.torch.runtime import runtime_buffers as buffers
from shardir.backend.torch.runtime.ops_runtime import trust_ratio
from shardir.backend.torch.runtime.runtime_mesh import Group, shard_size


@pytest.mark.parametrize("w", [0.0, 4.0])
@pytest.mark.parametrize("u", [0.0, 9.0])
def test_a_trust_ratio_is_that_of_the_norms_or_one(w: float, u: float) -> None:
    found = trust_ratio(torch.tensor(w), torch.tensor(u), 0.5, 0.1)
    assert found.item() == pytest.approx(0.5 * 2 / (3 + 0.1 * 2) if w and u else 1.0)


def test_torch_has_the_ranks_of_a_group_by_number() -> None:
    for ranks in permutations((1, 3, 4)):
        group = Group(ranks, 3, None)
        assert buffers.to_torch_order(group, list(ranks)) == [1, 3, 4]
        assert (group.ranks[group.index], group.in_order) == (3, ranks == (1, 3, 4))


@pytest.mark.parametrize("count", [1, 2, 3, 5])
@pytest.mark.parametrize("total", [0, 1, 5, 6])
@pytest.mark.parametrize("dim", [0, 1])
def test_padded_shards_are_joined_without_their_padding(count: int, total: int, dim: int) -> None:
    x = torch.arange(2.0 * total).view((total, 2) if dim == 0 else (2, total))
    shards = [x.narrow(dim, start, n) for start, n in buffers.parts(total, count)]
    blocks = [buffers.padded(s, dim, shard_size(total, count)) for s in shards]
    assert torch.equal(buffers.joined(blocks, dim, total), x)
