"""Random programs of all ops: after each pass, on any mesh, results and gradients are torch's.

`make programs PROGRAMS=2000` runs more of them than the tests do, and others each time.
"""

import os

import pytest
from extent import extent
from harness import PIPELINE, apply
from hypothesis import HealthCheck, Phase, given, note, settings
from hypothesis import strategies as st
from op_laws import OPS
from random_layouts import random_form
from random_programs import Writer, random_problem, usable

from shardir.dialects import train
from shardir.dialects.nn.base import TensorOp

PARTS = 4
COUNT = int(os.environ.get("PROGRAMS", extent(32, 4000))) // PARTS
FACTOR = 100
"""The tolerance of a program, as a multiple of that of one op."""


@pytest.mark.parametrize("part", range(PARTS))
def test_random_programs(part: int):
    @settings(
        max_examples=COUNT,
        derandomize="PROGRAMS" not in os.environ,
        deadline=None,
        database=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=[HealthCheck.too_slow],
    )
    @given(st.integers(part << 24, ((part + 1) << 24) - 1), st.integers(5, 40))
    def check(seed: int, ops: int) -> None:
        p = random_problem(seed, ops)
        note(str(p.module))
        single = apply(p.module.clone(), "distributed-autodiff")
        assert not p.errors(single, FACTOR), "one device"
        module, mesh = random_form(p, seed)
        note(str(module))
        for name in PIPELINE:
            assert not p.errors(apply(module, name), FACTOR), f"on {mesh}, after {name}"

    check()


def test_every_op_is_drawn_from():
    """All but one, which has no form in double precision."""
    assert set(OPS) - set(usable()) == {train.NextLossScaleOp}


@pytest.mark.parametrize("op", [op for op in OPS if op in usable()], ids=lambda op: op.name)
def test_every_op_can_occur(op: type[TensorOp]):
    writer = Writer(0)
    assert any(writer.grow(op) for _ in range(20))
