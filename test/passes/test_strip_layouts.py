"""strip-layouts leaves the program of a single device."""

from support.harness import (
    compiled,
)
from support.pass_inputs import SEEDS, every_value
from support.random_programs import random_problem

from shardir.dialects.dist import layout_of
from shardir.interpret import run
from shardir.testing.random_layouts import random_form


def test_stripping_layouts_leaves_the_single_device_program():
    for seed in SEEDS:
        p = random_problem(seed)
        module, _ = random_form(p.module, seed)
        compiled(module, ("strip-layouts", "distributed-autodiff"))
        assert not p.errors(module, 100)
        assert all(layout_of(v) is None for v in every_value(module))
        other = compiled(p.module.clone(), ("distributed-autodiff",))
        for x, y in zip(*(run(m, p.name, p.arguments) for m in (module, other)), strict=True):
            assert (x == y).all()
