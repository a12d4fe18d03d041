"""Started collectives: each has one wait for all of its results."""

import pytest

import shardir
from shardir.diagnostics import ShardirError
from shardir.dialects import dist

T = "tensor<4x4xf32, #dist.local<@m, [{}, {}]>>"
P = "tensor<4x4xf32, #dist.local<@m, [{}, {}], partial sum {d}>>"
WAITS = {0: "got no use", 1: "", 2: "got dist.wait, dist.wait"}


@pytest.mark.parametrize("count", WAITS)
def test_a_started_collective_has_one_wait(count: int) -> None:
    waits = "".join(f"  %w{i} = dist.wait %y : ({T}) -> {T}\n" for i in range(count))
    text = (
        f"dist.mesh @m <d = 2>\nfunc.func @f(%x: {P}) {{\n"
        f"  %y = dist.all_reduce <sum> %x over <d> async : ({P}) -> {T}\n{waits}  func.return\n}}"
    )
    if WAITS[count]:
        with pytest.raises(ShardirError, match=WAITS[count]):
            shardir.compile(text, "")
    else:
        assert any(isinstance(op, dist.WaitOp) for op in shardir.compile(text, "").module.walk())
