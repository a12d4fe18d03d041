"""The price of a value that is moved with others: that of the runtime's ops, however many bytes."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shardir.algebra.cluster import DEFAULT
from shardir.algebra.collectives import COLLECTIVES
from shardir.backend.torch.shardir_runtime import runtime as rt
from shardir.backend.torch.shardir_runtime.collectives import blocks
from shardir.cost import report
from shardir.syntax.parser import parse

LISTS = {
    "all_reduce": lambda mesh, xs: rt.all_reduce(mesh, xs, "sum", ("r",)),
    "reduce_scatter": lambda mesh, xs: rt.reduce_scatter(mesh, xs, "sum", 0, ("r",)),
    "all_gather": lambda mesh, xs: rt.all_gather(mesh, xs, 0, ("r",)),
    "all_to_all": lambda mesh, xs: rt.all_to_all(mesh, xs, 1, 0, ("r",)),
}
"""The runtime's functions that move several values."""


class TensorsMade(TorchDispatchMode):
    """The number of tensors that torch's ops return."""

    number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.number += sum(isinstance(x, torch.Tensor) for x in tree_leaves(out))
        return out


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("kind", LISTS)
def test_a_value_more_costs_as_many_ops_as_the_runtime_takes(
    kind: str, n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the messages, of which each value has its bytes."""
    for module, names in (
        (torch.distributed, ("all_reduce", "all_to_all_single")),
        (blocks, ("gather", "scatter")),
    ):
        for name in names:
            monkeypatch.setattr(module, name, lambda *args, **kwargs: None)
    monkeypatch.setattr(blocks, "is_library", lambda x: True)
    mesh = rt.Mesh([("r", n)])
    monkeypatch.setattr(mesh, "_process_group", lambda axes: None)
    numbers = []
    for values in (3, 4):
        with TensorsMade() as made:
            LISTS[kind](mesh, [torch.ones(8, 8) for _ in range(values)])
        numbers.append(made.number - values)  # the ones
    assert numbers[1] - numbers[0] == COLLECTIVES[kind].packing_ops(n)


def test_all_that_move_several_values_have_ops() -> None:
    assert {c.name for c in COLLECTIVES.values() if c.fusible} == LISTS.keys()


@pytest.mark.parametrize(("values", "priced"), [(1, 0), (3, 3)])
def test_each_of_several_values_has_the_price_of_its_ops(values: int, priced: int) -> None:
    t = "tensor<4xf32, #dist.local<@m, [{}], partial sum {r}>>"
    out = "tensor<4xf32, #dist.local<@m, [{}]>>"
    names = [f"%x{i}" for i in range(values)]
    arguments = ", ".join(f"{name}: {t}" for name in names)
    types, outs = (", ".join([each] * values) for each in (t, out))
    results = ", ".join(f"%y{i}" for i in range(values))
    module = parse(
        f"dist.mesh @m <r = 4>\nfunc.func @f({arguments}) -> ({outs}) {{\n"
        f"  {results} = dist.all_reduce <sum> {', '.join(names)} over <r> : ({types}) -> ({outs})\n"
        f"  func.return {results} : {outs}\n}}"
    )
    free, packed = (report(module, replace(DEFAULT, packing=p))[0].seconds for p in (0.0, 1e-3))
    ops = COLLECTIVES["all_reduce"].packing_ops(4)
    assert packed - free == pytest.approx(priced * ops * 1e-3)
