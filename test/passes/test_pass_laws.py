"""The laws of all passes, on random programs. test/filecheck has the cases of each pass."""

import pytest
from support.harness import (
    PIPELINE,
    Arg,
    compiled,
    problem,
    program,
)
from support.pass_inputs import SEEDS, forms
from support.random_programs import random_problem

from shardir.interpret import check_pass
from shardir.interpret.equivalence import NotEquivalentError
from shardir.testing.random_layouts import random_form


@pytest.mark.parametrize("name", PIPELINE)
def test_a_pass_is_deterministic_and_a_second_run_changes_nothing(name: str):
    for module, _, _ in forms(name):
        other = module.clone()
        once = str(compiled(module, (name,)))
        assert str(compiled(other, (name,))) == once
        assert str(compiled(module, (name,))) == once


@pytest.mark.parametrize("left_out", ["recompute", "simplify-communication", "fuse-communication"])
def test_a_pass_can_be_left_out(left_out: str):
    for seed in SEEDS:
        p = random_problem(seed)
        module, _ = random_form(p.module, seed)
        compiled(module, tuple(n for n in PIPELINE if n != left_out))
        assert not p.errors(module, 100)


def test_the_check_of_equivalence_notices_a_change():
    p = problem([Arg("f32", (4, 4))], lambda b, x: b.neg(x))
    for change in (lambda b, x: b.scale(x, -1.001), lambda b, x: b.reshape(x, (16,))):
        other = program([Arg("f32", (4, 4))], change)
        with pytest.raises(
            NotEquivalentError, match=r"after some-pass: .*(result 0|another signature)"
        ):
            check_pass(p.module, other, "some-pass")
