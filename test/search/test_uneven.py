"""Uneven shards in the search: of a vocabulary that the devices do not divide."""

import re
from math import prod
from pathlib import Path

import numpy as np
import pytest
from support.extent import LONG, sampled

from shardir import compile
from shardir.algebra.mesh import Mesh
from shardir.backend.runs import Options
from shardir.backend.torch.launch.start import run
from shardir.dialects.dist import type_layout
from shardir.interpret.equivalence import check_pass
from shardir.rewriting.functions import bodies
from shardir.rewriting.marks import found_by_search
from shardir.syntax.parser import parse
from shardir.tools import bench

laws, programs, search = bench.load("program_laws"), bench.load("programs"), bench.load("search")
ratios = bench.load("ratios")

CLUSTER = "<levels [node = {} {{bandwidth = 1e+12, latency = 1e-9}}], flops {{f32 = 1e+9}}>"
"""Links so fast that only computation counts."""


def language_model(vocabulary: int, *mesh: int) -> str:
    """Return a step of a language model without layouts. Only its heads and its vocabulary have
    more elements than there are devices."""
    text = search.LAYOUT.sub(
        "",
        programs.gpt(layers=1, batch=1, seq=3, hidden=9, heads=3, vocab=vocabulary),
    )
    axes = ", ".join(f"{n} = {s}" for n, s in zip("ab", mesh, strict=False))
    declared = f"dist.cluster @c {CLUSTER.format(prod(mesh))}\ndist.mesh @m <{axes}> on @c"
    return re.sub(r"dist\.mesh [^\n]*", declared, text)


@pytest.mark.parametrize("mesh", sampled([(2, 2), (4,)], 1), ids=str)
def test_a_vocabulary_is_split_unevenly(mesh: tuple[int, ...]):
    """257 rows are 65, 65, 65 and 62. The objective is the time of the lowered program, which
    computes the same, and not above that with a vocabulary of 260."""
    plan, objective = searched(language_model(257, *mesh))
    ((f, _),) = bodies(plan)
    table = f.function_type.inputs.data[2]
    layout, all_axes = type_layout(table), Mesh("m", tuple(zip("ab", mesh, strict=False))).names
    assert layout is not None and layout.dims == (all_axes, ())
    lowered = compile(plan, "lower-plan").module
    assert "tensor<65x9xf32, #dist.local<@m, " in str(lowered)
    assert laws.lowered_seconds(plan) == pytest.approx(objective, rel=ratios.ROUNDING)
    check_pass(parse(str(plan)), lowered, "lower-plan")
    _, padded = searched(language_model(260, *mesh))
    assert objective <= padded


def searched(text: str):
    options = "inline-calls,distributed-autodiff,search-strategies{overlap=false}"
    plan = compile(text, options).module
    ((f, _),) = bodies(plan)
    return plan, found_by_search(f)["objective"]


if LONG:  # test_programs.py has a vocabulary of 11 on two ranks

    def test_it_trains_on_ranks_as_on_one_device(tmp_path: Path):
        pytest.importorskip("torch")
        program = compile(language_model(257, 2), "auto{overlap=false}")
        assert "tensor<129x9xf32" in str(program.module)
        directory, losses = program.save(tmp_path / "out"), []
        for name in ("program.py", "single.py"):
            dump = tmp_path / f"{name}.npz"
            report = run(directory, Options(timeout=60, dump=dump, steps=3), program=name)
            losses.append(report.losses["step"])
        np.testing.assert_allclose(*losses, rtol=2e-5)
        ours, one = (dict(np.load(tmp_path / f"{p}.npz")) for p in ("program.py", "single.py"))
        np.testing.assert_allclose(ours["states/wte"], one["states/wte"], rtol=1e-4, atol=2e-6)
