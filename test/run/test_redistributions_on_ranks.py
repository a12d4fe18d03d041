"""Redistributions on real ranks: the value after each is the value before, bit for bit.

Random pairs of layouts on 8 ranks, with sub-axes and uneven shards, some of them through a
partial value. Values are integers, so that the order of a sum does not matter.
"""
# ruff: noqa: E402 (torch may not be installed)

import random
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from support.extent import extent

torch = pytest.importorskip("torch")

import shardir
from shardir.algebra.layout import Layout
from shardir.algebra.mesh import Axis, Mesh
from shardir.backend.runs import Options
from shardir.backend.torch.launch.start import run
from shardir.dialects.random import fill

MESH = Mesh("m", (("a", 2), ("b", 4)))
AXES = [
    [Axis("a"), Axis("b")],
    [Axis("a"), Axis("b", 1, 2), Axis("b", 2, 2)],
]
SHAPES = [(8, 16), (16, 8), (7, 9), (3, 10), (5, 1), (1, 8), (8, 6, 5), (2, 3, 4)]
PAIRS, PARTIAL = extent((40, 18), (300, 60))


def layout(draw: random.Random, rank: int, partial: bool = False) -> Layout:
    """Return a random layout of `rank` dimensions; with `partial`, it is partial over one axis."""
    candidates = draw.choice(AXES)
    axes = draw.sample(candidates, len(candidates))
    reduced = [axes.pop()] if partial else []
    dims: list[tuple[Axis, ...]] = [()] * rank
    for a in axes[: draw.randint(0, len(axes))]:
        d = draw.randrange(rank)
        dims[d] = (*dims[d], a)
    return Layout("m", tuple(dims)).with_partial(tuple(reduced)).simplified(MESH)


def program(draw: random.Random) -> tuple[str, dict[str, tuple[int, ...]]]:
    """Return a program with a function per pair of layouts, and the shapes of their values."""
    lines, shapes = [f"dist.mesh {MESH}"], {}
    for i in range(PAIRS):
        shape = draw.choice(SHAPES)
        chain = [layout(draw, len(shape)), layout(draw, len(shape))]
        if i < PARTIAL:
            chain.insert(1, layout(draw, len(shape), partial=True))
        types = [f"tensor<{'x'.join(map(str, shape))}xi32, #dist.layout<{x}>>" for x in chain]
        name = f"f{i}"
        shapes[name] = shape
        init = "{train.input = #train.init<integers, low = -1000, high = 1000>}"
        lines.append(f"func.func @{name}(%x{i}: {types[0]} {init}) -> {types[-1]} {{")
        value = f"%x{i}"
        for k, (before, after) in enumerate(pairwise(types)):
            lines.append(f"  %y{k} = dist.redistribute {value} : ({before}) -> {after}")
            value = f"%y{k}"
        lines.append(f"  func.return {value} : {types[-1]}\n}}")
    return "\n".join(lines), shapes


def test_random_pairs_on_8_ranks(tmp_path: Path) -> None:
    text, shapes = program(random.Random(0))
    compiled = shardir.compile(text, "lower-to-spmd", "pairs.ir")
    assert compiled.text.count("dist.exchange") > 10
    assert compiled.text.count("dist.reduce_scatter") > 5
    compiled.save(tmp_path / "program")
    dump = tmp_path / "dump.npz"
    run(tmp_path / "program", Options(steps=1, dump=dump, timeout=60))
    found = np.load(dump)
    for name, shape in shapes.items():
        key = f"0/x{name[1:]}"
        bounds = {"low": -1000, "high": 1000}
        expected = fill("integers", bounds, shape, None, key, np.int32)
        np.testing.assert_array_equal(found[f"results/{name}/0"], expected, err_msg=name)
