"""Random programs of all ops: after each pass, on any mesh, results and gradients are torch's.

With NaN, infinities and zeros in the arguments the results are those of one device, and in half
precision about as precise. `make programs PROGRAMS=2000` runs more of them than the tests do, and
others each time.
"""

import os
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, note, settings
from hypothesis import strategies as st
from support.extent import extent
from support.harness import ELEMENTS, PIPELINE, Array, Problem, apply, compiled, function
from support.op_laws import OPS
from support.random_programs import ProgramWriter, random_problem, usable
from support.special_values import FINITE, UNDEFINED, WITHOUT_NAN, with_special
from xdsl.dialects.builtin import ModuleOp
from xdsl.ir import Operation

import shardir
from shardir.diagnostics import ShardirError
from shardir.dialects import nn, train
from shardir.interpret import run
from shardir.interpret.values import round_to_element
from shardir.testing.random_layouts import random_form

PARTS = extent(1, 4)
COUNT = int(os.environ.get("PROGRAMS", extent(8, 4000))) // PARTS
FACTOR = 100
"""The tolerance of a program, as a multiple of that of one op."""
EPSILON = {"f16": 2.0**-11, "bf16": 2.0**-8}
"""The relative error of rounding."""


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
    @given(st.integers(part << 24, ((part + 1) << 24) - 1), st.integers(5, extent(25, 40)))
    def check(seed: int, ops: int) -> None:
        p = random_problem(seed, ops)
        note(str(p.module))
        single = apply(p.module.clone(), "distributed-autodiff")
        assert not p.errors(single, FACTOR), "one device"
        module, mesh = random_form(p.module, seed)
        note(str(module))
        for name in PIPELINE:
            assert not p.errors(apply(module, name), FACTOR), f"on {mesh}, after {name}"

    check()


def is_loose(op: Operation) -> bool:
    """Whether an op may have NaN where another order of its formula has an infinity: one that is
    listed, or a gradient, whose formula is another one where it is decomposed."""
    return isinstance(op, (*FINITE, *UNDEFINED, *WITHOUT_NAN)) or op.name.endswith("_grad")


@pytest.mark.parametrize("part", range(PARTS))
def test_special_values_in_random_programs(part: int):
    """NaN, infinities and zeros in the arguments: laid out, a program has the results of one
    device. What those are on one device is a law of ops (test_special_values.py)."""
    count = -(-COUNT // (2 * PARTS))
    first = int.from_bytes(os.urandom(4)) if "PROGRAMS" in os.environ else part * count
    for seed in range(first, first + count):
        p = random_problem(seed, 6)
        f = function(p.module, "f")
        if any(is_loose(op) for op in f.walk()):
            continue
        rng, given = np.random.default_rng(seed), len(f.body.block.args)
        special = [with_special(rng, x, 0.1) for x in p.arguments[:given]]
        p = replace(p, arguments=[*special, *p.arguments[given:]])
        single = apply(p.module.clone(), "distributed-autodiff")
        p = replace(p, wanted=run(single, p.name, p.arguments))
        module, mesh = random_form(p.module, seed)
        assert not p.errors(compiled(module), FACTOR), f"seed {seed} on {mesh}"


def in_half_precision(p: Problem, element: str) -> ModuleOp | None:
    """Return the program in another element type, or None if an op has only f32 or f64 there."""
    try:
        return shardir.parse(str(p.module).replace("f64", element))
    except ShardirError:
        return None


@pytest.mark.parametrize("element", ["f16", "bf16"])
def test_random_programs_in_half_precision(element: str):
    """Laid out, a program has the errors of one device: the distance of its results from those in
    double precision is at most a few times the largest that one device has for this argument and
    for others that differ from it by rounding."""
    count = -(-COUNT // (2 * PARTS))
    first = int.from_bytes(os.urandom(4)) if "PROGRAMS" in os.environ else 0
    unit = EPSILON[element]

    def near(x: Array, rng: np.random.Generator) -> Array:
        noise = 1 + 2 * unit * rng.uniform(-1, 1, x.shape)
        return round_to_element(x * noise, ELEMENTS[element]) if x.dtype.kind == "f" else x

    for seed in range(first, first + count):
        p = random_problem(seed, 6)
        module = in_half_precision(p, element)
        if module is None:
            continue
        rng = np.random.default_rng(seed)
        given = [
            round_to_element(x, ELEMENTS[element]) if x.dtype.kind == "f" else x
            for x in p.arguments
        ]
        exact = run(apply(p.module.clone(), "distributed-autodiff"), p.name, given)
        single = apply(module.clone(), "distributed-autodiff")
        samples = [run(single, p.name, [near(x, rng) for x in given]) for _ in range(3)]
        samples.append(run(single, p.name, given))
        form, mesh = random_form(module, seed)
        found = run(compiled(form), p.name, given)
        for i, (x, y) in enumerate(zip(found, exact, strict=True)):
            others = [s[i] for s in samples]
            if y.dtype.kind != "f":
                if not all(np.array_equal(s, y) for s in others):
                    break  # rounding decides, and what follows depends on it
                assert np.array_equal(x, y), f"seed {seed} on {mesh}: result {i}"
            elif y.size:
                scale = max(1.0, float(np.abs(y).max()))
                allowed = max(float(np.abs(s - y).max()) for s in others) + unit * scale
                assert np.abs(x - y).max() <= 4 * allowed, f"seed {seed} on {mesh}: result {i}"


def test_every_op_is_drawn_from():
    """All but one, which has no form in double precision."""
    assert set(OPS) - set(usable()) == {train.NextLossScaleOp, nn.BitcastOp}


def test_every_op_can_occur():
    for op in (op for op in OPS if op in usable()):
        writer = ProgramWriter(0)
        assert any(writer.grow(op) for _ in range(20)), op.name
