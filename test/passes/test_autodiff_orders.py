"""distributed-autodiff at other positions in a pipeline, on random programs."""

from collections.abc import Sequence

import pytest
from support.extent import extent
from support.harness import (
    apply,
    compiled,
    function,
    parts,
)
from support.random_programs import random_problem
from xdsl.ir import Operation

from shardir.testing.random_layouts import random_form

ORDERS = {
    "before the layouts": (
        "distributed-autodiff",
        "propagate-strategies",
        "insert-redistributions",
    ),
    "before redistribution": (
        "propagate-strategies",
        "distributed-autodiff",
        "insert-redistributions",
    ),
    "in the local view": (
        "propagate-strategies",
        "insert-redistributions",
        "lower-to-spmd",
        "distributed-autodiff",
    ),
    "last": (
        "propagate-strategies",
        "insert-redistributions",
        "lower-to-spmd",
        "simplify-communication",
        "fuse-communication",
        "distributed-autodiff",
    ),
}


@pytest.mark.parametrize("order", ORDERS)
def test_differentiation_at_other_positions(order: str):
    """It can be run before and after propagation, and in the local view."""
    for seed in range(1000, 1000 + extent(1, 60)):
        p = random_problem(seed)
        module, mesh = random_form(p.module, seed)
        compiled(module, (*ORDERS[order], "lower-to-spmd"))
        assert not p.errors(module, 100), f"seed {seed} on {mesh}"


def test_collectives_of_the_local_view_stay():
    """The forward part is the function as it was written: its collectives, and the other ops, which
    may have further results that the backward part reads."""

    def shown(ops: Sequence[Operation]) -> list[tuple[str, dict[str, str], list[str]]]:
        return [
            (
                op.name,
                {n: str(a) for n, a in op.properties.items()},
                [str(v.type) for v in op.results],
            )
            for op in ops
        ]

    seen: set[str] = set()
    for seed in range(1000, 1000 + extent(8, 20)):
        module, _ = random_form(random_problem(seed).module, seed)
        compiled(module, ORDERS["last"][:-1])
        before = shown(list(function(module, "f").body.block.ops)[:-1])
        apply(module, "distributed-autodiff")
        after = shown(parts(module, "g")[0])
        for (name, properties, types), (new_name, new_properties, new_types) in zip(
            before, after, strict=True
        ):
            seen.add(name)
            if not name.startswith("nn."):
                assert (name, properties, types) == (new_name, new_properties, new_types), seed
            assert name == new_name and properties.items() <= new_properties.items(), seed
            assert types == new_types[: len(types)], seed
    assert {"dist.all_reduce", "dist.all_gather", "dist.all_slice"} <= seen
