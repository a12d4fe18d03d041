"""Faults that others reported: ranks compute what torch does on one device."""

import random
from dataclasses import replace

import pytest
import torch
from support.extent import long_form, sampled

from bugs_of_others import BUGS
from bugs_of_others.record import Bug, Results, key_of, on_one_device, on_ranks, text
from shardir import ShardirError
from shardir.testing.random_layouts import MESHES, random_layout

pytestmark = pytest.mark.filterwarnings("ignore")


def check(found: Results, expected: Results) -> None:
    assert found.keys() == {*expected, "sent"}
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name], value, rtol=1e-9, atol=1e-12, msg=lambda m, name=name: f"{name}: {m}"
        )


ALSO = [bug for bug in BUGS if bug.refused or "six_heads" in bug.name.lower()]
"""Those that planted errors need, and those without ranks."""


@pytest.mark.parametrize("bug", sampled(BUGS, len(BUGS) // 2, also=ALSO), ids=lambda bug: bug.name)
def test_ranks_compute_what_torch_does(bug: Bug) -> None:
    if bug.refused:
        with pytest.raises(ShardirError) as caught:
            on_ranks(bug)
        assert bug.prints in str(caught.value)
        return
    found = on_ranks(bug)
    check(found, on_one_device(bug))
    assert {name: text(found[name]) for name in bug.printed} == bug.printed


@long_form
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    "bug", [b for b in BUGS if not isinstance(b.program, type)], ids=lambda bug: bug.name
)
def test_other_layouts_compute_the_same(bug: Bug, seed: int) -> None:
    draw = random.Random(f"{bug.name} {seed}")
    mesh, (module, (batch,)) = draw.choice(MESHES), bug.build()
    plan = {
        key_of(name, batch): str(random_layout(draw, mesh, value.dim())).partition(", ")[2]
        for name, value in {**dict(module.named_parameters()), **batch}.items()
    }
    axes = ", ".join(f"{name} = {mesh.extent((name,))}" for name in mesh.names)
    check(on_ranks(replace(bug, mesh=axes, plan=plan)), on_one_device(bug))
