"""Faults that others reported: ranks compute what torch does on one device."""

import pytest
import torch

from bugs_of_others import BUGS
from bugs_of_others.record import Bug, on_one_device, on_ranks, text
from shardir import ShardirError


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_ranks_compute_what_torch_does(bug: Bug) -> None:
    if bug.refused:
        with pytest.raises(ShardirError) as caught:
            on_ranks(bug)
        assert bug.prints in str(caught.value)
        return
    found, expected = on_ranks(bug), on_one_device(bug)
    print({k: text(x) for k, x in found.items()})
    assert found.keys() == {*expected, "sent"}
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-12, msg=name)
    for name, value in bug.printed.items():
        assert text(found[name]) == value
