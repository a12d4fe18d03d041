"""Strategies of hypothesis: meshes, axes cut into sub-axes, layouts.

Hypothesis validates a strategy at its first use, which takes longer than to draw from it; so those
of equal arguments are one object.
"""

from functools import cache
from itertools import pairwise
from typing import Any, TypeVar

from hypothesis import settings
from hypothesis import strategies as st

from shardir.algebra.layout import Layout, Shape
from shardir.algebra.mesh import Axes, Axis, Mesh, SizedAxes, shard_bounds
from support.extent import extent

T = TypeVar("T")
SIZES = (1, 2, 3, 4, 6, 8)
quick = settings(max_examples=extent(40, 150), deadline=None, derandomize=True)
"""Those of laws that take a second or so."""


@cache
def among(values: tuple[T, ...]) -> st.SearchStrategy[T]:
    return st.sampled_from(values)


@cache
@st.composite
def meshes(draw: Any, most: int = 24) -> Mesh:
    """One to three axes, `most` devices together."""
    sizes: list[int] = []
    for _ in range(draw(st.integers(1, 3))):
        left = most
        for s in sizes:
            left //= s
        sizes.append(draw(among(tuple(s for s in SIZES if s <= left))))
    return Mesh("m", tuple(zip("abc", sizes, strict=False)))


@cache
def chains(size: int) -> tuple[tuple[int, ...], ...]:
    """The ways to cut an axis: chains of divisors from 1 to its size."""
    found: list[tuple[int, ...]] = [(1,)]
    done: list[tuple[int, ...]] = []
    while found:
        chain = found.pop()
        if chain[-1] == size:
            done.append(chain)
        for n in range(2, size // chain[-1] + 1):
            if size % (chain[-1] * n) == 0:
                found.append((*chain, chain[-1] * n))
    return (*done,)


@cache
@st.composite
def sub_axes(draw: Any, mesh: Mesh) -> Axes:
    """Every axis of a mesh, some of them cut into sub-axes, in any order."""
    out: list[Axis] = []
    for name, size in mesh.axes:
        chain = draw(among(chains(size)))
        if len(chain) <= 2:
            out.append(Axis(name))
        else:
            out += [Axis(name, lo, hi // lo) for lo, hi in pairwise(chain)]
    return tuple(draw(st.permutations(out)))


@cache
@st.composite
def layouts_on(
    draw: Any, mesh: Mesh, rank: int, partial: bool = True, reductions: tuple[str, ...] = ("sum",)
) -> Layout:
    """A layout whose axes are dealt to dimensions, to the partial ones, and to none."""
    hands: list[list[Axis]] = [[] for _ in range(rank + 2)]
    for a in draw(sub_axes(mesh)):
        hands[draw(st.integers(0, rank + partial))].append(a)
    dims = tuple(mesh.simplify(tuple(h)) for h in hands[1 : rank + 1])
    kept = mesh.simplify(tuple(sorted(hands[rank + 1], key=mesh.order)))
    return Layout(mesh.name, dims).with_partial(kept, draw(among(reductions)))


@cache
def shapes(rank: int, most: int = 9) -> st.SearchStrategy[Shape]:
    return st.tuples(*[st.integers(0, most)] * rank)


@cache
@st.composite
def with_sizes(draw: Any, mesh: Mesh, shape: Shape, layout: Layout) -> Layout:
    """The layout, with explicit sizes for the shards of some of the dimensions: any, or the usual
    ones."""
    for d, n in enumerate(shape):
        parts = mesh.extent(layout.dims[d])
        if parts > 1 and draw(st.integers(0, 3)) == 0:
            cuts = [shard_bounds(n, parts, k)[0] for k in range(1, parts)]
            if draw(st.booleans()):
                cuts = draw(st.lists(st.integers(0, n), min_size=parts - 1, max_size=parts - 1))
            sizes = tuple(b - a for a, b in pairwise([0, *sorted(cuts), n]))
            layout = layout.with_dim(d, SizedAxes(layout.dims[d], sizes))
    return layout


@cache
@st.composite
def laid_out_shapes(draw: Any, partial: bool = True) -> tuple[Mesh, Shape, Layout]:
    """A mesh, a shape (uneven and empty dimensions included) and a layout for it."""
    mesh = draw(meshes())
    shape = draw(shapes(draw(st.integers(0, 3))))
    layout = draw(layouts_on(mesh, len(shape), partial))
    return mesh, shape, draw(with_sizes(mesh, shape, layout))
