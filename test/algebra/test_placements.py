"""Layouts as DTensor's placements: each rank has the shard that DTensor gives it, on real objects.

The process group is fake: one process plays the ranks one after another, and nothing is sent.
"""

import itertools
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import tensor as dt
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.placement_types import _MaskPartial, _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

import shardir
from shardir.algebra.layout import Layout
from shardir.algebra.mesh import Axes, Axis, Mesh
from shardir.algebra.notation import parse_layout
from shardir.algebra.placements import (
    Partial,
    Replicate,
    Shard,
    from_placements,
    sub_axes,
    to_placements,
)
from shardir.diagnostics import ShardirError

SQUARE = Mesh("m", (("a", 2), ("b", 2)))
CUBE = Mesh("m", (("a", 2), ("b", 2), ("c", 2)))
ODD = Mesh("m", (("a", 3), ("d", 4)))


@contextmanager
def one_of(ranks: int, rank: int) -> Iterator[None]:
    """This process as one rank of several."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        dist.destroy_process_group()


def device_mesh(sizes: tuple[int, ...], names: tuple[str, ...] | None = None) -> DeviceMesh:
    return init_device_mesh("cpu", sizes, mesh_dim_names=names)


def distributed(full: torch.Tensor, mesh: DeviceMesh, placements: Any) -> dt.DTensor:
    """The tensor as DTensor cuts it, every rank from its own copy."""
    return dt.distribute_tensor(full, mesh, placements, src_data_rank=None)


def numbered(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel()).reshape(shape)


def layouts(mesh: Mesh, parts: Axes, rank: int) -> list[Layout]:
    """Every layout over some of the axes, complete."""
    found = set()
    for order in itertools.permutations(parts):
        for places in itertools.product(range(rank + 1), repeat=len(order)):
            dims: list[list[Axis]] = [[] for _ in range(rank + 1)]
            for a, d in zip(order, places, strict=True):
                dims[d].append(a)
            found.add(Layout(mesh.name, tuple(map(tuple, dims[:rank]))).simplified(mesh))
    return sorted(found, key=str)


CASES = [
    (SQUARE, SQUARE.names, [(4, 8), (3, 5), (7, 1), (0, 6), (6, 2)], 11),
    (CUBE, CUBE.names, [(8, 8), (5, 7), (6, 15)], 49),
    (ODD, (Axis("a"), Axis("d", 1, 2), Axis("d", 2, 2)), [(12, 24), (11, 5)], 49),
]


@pytest.mark.parametrize(("mesh", "parts", "shapes", "count"), CASES, ids=str)
def test_each_rank_has_the_shard_of_dtensor(
    mesh: Mesh, parts: Axes, shapes: list[tuple[int, ...]], count: int
) -> None:
    cases = list(itertools.product(shapes, layouts(mesh, parts, 2)))
    assert len(cases) == count * len(shapes)
    differ: set[tuple[Any, ...]] = set()
    refused: set[tuple[Any, ...]] = set()
    given: dict[tuple[Any, ...], Any] = {}
    for shape, layout in cases:
        try:
            given[shape, layout] = shardir.to_dtensor(layout, mesh, shape)
        except ShardirError:
            refused.add((shape, layout))
            even = tuple(n * mesh.size for n in shape)  # the placements that it would have
            given[shape, layout] = shardir.to_dtensor(layout, mesh, even)
    back: dict[tuple[Any, ...], Layout] = {}
    strided: set[tuple[Any, ...]] = set()
    for rank in range(mesh.size):
        with one_of(mesh.size, rank):
            meshes = {key: device_mesh(*key) for key in {(s, n) for n, s, _ in given.values()}}
            for case, (names, sizes, placements) in given.items():
                shape, layout = case
                full = numbered(shape)
                theirs = distributed(full, meshes[sizes, names], placements)
                if not torch.equal(theirs.to_local(), full[layout.slices(mesh, shape, rank)]):
                    differ.add(case)
                if rank == 0:
                    try:
                        back[case], _ = shardir.from_dtensor(theirs, mesh)
                    except ShardirError:
                        strided.add(case)
                        continue
                    assert shardir.to_dtensor(back[case], mesh, shape)[2] == tuple(placements)
                    assert (back[case] == layout) == (case not in refused)
                if case in back:
                    ours = full[back[case].slices(mesh, shape, rank)]
                    assert torch.equal(theirs.to_local(), ours)
    assert refused == differ
    assert differ and len(differ) < len(cases) / 2
    assert strided < differ
    order = mesh.order  # Shard after Shard gives ranges in order; a layout can have their sizes
    assert all(any([*d] != sorted(d, key=order) for d in layout.dims) for _, layout in strided)


@pytest.mark.parametrize("size", [4, 8])
def test_every_placement_has_its_layout_or_none_has_its_shards(size: int) -> None:
    """Over 2 ranks times an axis that strides cut in two places, one of which is not its middle;
    also with strides that follow from no order of the mesh dims."""
    mesh, shape = Mesh("m", (("a", 2), ("d", size))), (12 * size,)
    cuts = [Axis("d", n, 2) for n in (1, 2, 4) if n < size]
    candidates = [l for n in range(5) for p in itertools.combinations((Axis("a"), *cuts), n)
                  for l in layouts(mesh, p, 1)]  # fmt: skip
    each: list[Any] = [Replicate(), *(Shard(0, n) for n in (1, 2, 3, 4, 8))]
    pairs = list(itertools.product(each, repeat=2))
    held = list[list[torch.Tensor]]()
    for rank in range(mesh.size):
        with one_of(mesh.size, rank):
            ranks = device_mesh((2, size))
            held.append([distributed(numbered(shape), ranks, [*map(_dtensors, pair)]).to_local()
                         for pair in pairs])  # fmt: skip
    for pair, shards in zip(pairs, zip(*held, strict=True), strict=True):

        def holds(layout: Layout, shards: Sequence[torch.Tensor] = shards) -> bool:
            ours = [numbered(shape)[layout.slices(mesh, shape, r)] for r in range(mesh.size)]
            return all(map(torch.equal, ours, shards))

        try:
            assert holds(from_placements(pair, mesh, shape)), pair
        except ShardirError:
            assert not any(map(holds, candidates)), pair


def _dtensors(p: Replicate | Shard) -> Any:
    """Return torch's own placement."""
    if isinstance(p, Replicate):
        return dt.Replicate()
    return dt.Shard(0) if p.split_factor == 1 else _StridedShard(0, split_factor=p.split_factor)


def test_placements() -> None:
    def shown(text: str, mesh: Mesh, shape: tuple[int, ...]) -> str:
        dims, placements = to_placements(parse_layout(text), mesh, shape)
        return " ".join(f"{a}: {p}" for a, p in zip(dims, placements, strict=True))

    assert shown("@m, [{a, b}, {}]", SQUARE, (4, 4)) == "a: Shard(dim=0) b: Shard(dim=0)"
    assert shown("@m, [{b, a}, {}]", SQUARE, (4, 4)) == (
        "a: _StridedShard(dim=0, sf=2) b: Shard(dim=0)"
    )
    assert shown("@m, [{}, {b}], partial mean {a}", SQUARE, (4, 4)) == (
        "a: Partial(avg) b: Shard(dim=1)"
    )
    assert shown("@m, [{d:(2)2, a}, {}]", ODD, (12, 4)) == (
        "a: _StridedShard(dim=0, sf=2) d:(1)2: Replicate() d:(2)2: Shard(dim=0)"
    )


def test_one_device_mesh_for_several_layouts() -> None:
    rows, columns = parse_layout("@m, [{d:(1)2}, {}]"), parse_layout("@m, [{}, {d}]")
    dims = sub_axes(ODD, rows, columns)
    assert dims == (Axis("a"), Axis("d", 1, 2), Axis("d", 2, 2))
    for layout in (rows, columns):
        _, placements = to_placements(layout, ODD, (4, 4), dims)
        assert from_placements(placements, ODD, (4, 4), dims) == layout
    with pytest.raises(ShardirError, match=r"a dim of the device mesh \{a, d\}, got d:\(1\)2"):
        to_placements(rows, ODD, (4, 4), ODD.names)
    six = Mesh("m", (("d", 6),))
    with pytest.raises(ShardirError, match="expected sub-axes of d, of size 6, that do not cross"):
        sub_axes(six, parse_layout("@m, [{d:(1)2}]"), parse_layout("@m, [{d:(1)3}]"))


def test_layouts_that_dtensor_cannot_express() -> None:
    with pytest.raises(ShardirError, match=r"expected a partial sum, mean, max, min.* partial any"):
        to_placements(parse_layout("@m, [{}], partial any {a}"), SQUARE, (4,))
    with pytest.raises(ShardirError, match=r"\[L1\]"):
        to_placements(parse_layout("@m, [{a}]"), SQUARE, (4, 4))
    with pytest.raises(ShardirError) as e:
        to_placements(parse_layout("@m, [{a, b}]"), SQUARE, (5,))
    assert str(e.value) == (
        "dimension 0 of size 5 over {a, b}: expected elements 2 to 3 on rank 1, got elements 2 to "
        "2 by DTensor, which cuts by one mesh dim after another; use a size that 4 divides, or "
        "DTensor's shards, {a, b} sizes [2, 1, 1, 1]"
    )
    sized = parse_layout("@m, [{a, b} sizes [2, 1, 1, 1]]")
    _, placements = to_placements(sized, SQUARE, (5,))
    assert from_placements(placements, SQUARE, (5,)) == sized
    with pytest.raises(
        ShardirError, match=r"elements 0 to 2 on rank 0, got elements 0 to 1 by DTensor"
    ):
        to_placements(parse_layout("@m, [{a, b} sizes [3, 2, 1, 2]]"), SQUARE, (8,))


WRONG: list[tuple[list[Any], str]] = [
    ([Shard(0)], "expected 2 placements, one for each dim of the mesh, got 1"),
    ([Shard(2), Replicate()], r"a placement of a tensor of 2 dimensions, got Shard\(dim=2\)"),
    (
        [Shard(0, 2), Replicate()],
        "mesh dim 0: expected a split factor that fits the later mesh dims",
    ),
    ([Partial("product"), Replicate()], r"got Partial\(product\); redistribute it"),
    ([Partial("sum"), Partial("max")], "expected Partial of one reduction, got sum and max"),
]


@pytest.mark.parametrize(("placements", "message"), WRONG)
def test_placements_without_a_layout(placements: list[Any], message: str) -> None:
    with pytest.raises(ShardirError, match=message):
        from_placements(placements, SQUARE, (4, 4))


def spec(mesh: DeviceMesh, placements: Any, shape: tuple[int, ...], **options: Any) -> Any:
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    meta = TensorMeta(torch.Size(shape), torch.empty(shape).stride(), torch.float32)
    return DTensorSpec(mesh, tuple(placements), meta, **options)


def test_from_torch() -> None:
    with one_of(4, 0):
        named, plain = device_mesh((2, 2), ("dp", "tp")), device_mesh((2, 2))
        layout, mesh = shardir.from_dtensor(spec(named, [dt.Partial("avg"), dt.Shard(1)], (4, 6)))
        assert mesh == Mesh("m", (("dp", 2), ("tp", 2)))
        assert layout == parse_layout("@m, [{}, {tp}], partial mean {dp}")
        cut = spec(plain, [dt.Shard(0), dt.Replicate()], (4, 6))
        assert str(shardir.from_dtensor(cut)[0]) == "@m, [{d0}, {}]"
        assert str(shardir.from_dtensor(cut, SQUARE)[0]) == "@m, [{a}, {}]"
        with pytest.raises(ShardirError, match=r"expected a Shard, .*redistribute it"):
            shardir.from_dtensor(spec(plain, [_MaskPartial(), dt.Replicate()], (4, 6)))
        with pytest.raises(ShardirError, match="expected mesh dims that are the axes of @m"):
            shardir.from_dtensor(cut, Mesh("m", (("d", 4),)))
        with pytest.raises(ShardirError, match=r"expected an axis of mesh @m .*got dp"):
            shardir.from_dtensor(spec(named, [dt.Shard(0)] * 2, (4, 6)), SQUARE)
        sub_axis = device_mesh((2, 2), ("d:(1)2", "d:(2)2"))
        with pytest.raises(ShardirError, match=r"got the sub-axis d:\(1\)2"):
            shardir.from_dtensor(spec(sub_axis, [dt.Shard(0), dt.Replicate()], (4, 6)))
        turned = DeviceMesh("cpu", [[0, 2], [1, 3]])
        with pytest.raises(ShardirError, match="expected ranks 0 to 3 in row-major order"):
            shardir.from_dtensor(spec(turned, [dt.Shard(0), dt.Replicate()], (4, 6)))
        bad = device_mesh((2, 2), ("d p", "tp"))
        with pytest.raises(ShardirError, match=r"mesh dims .*expected"):
            shardir.from_dtensor(spec(bad, [dt.Shard(0), dt.Replicate()], (4, 6)))


def test_the_order_of_a_spec() -> None:
    """A spec can have the order beside its placements; both forms describe the same shards."""
    from torch.distributed.tensor import _dtensor_spec

    with one_of(8, 0):
        cube = device_mesh((2, 2, 2), ("a", "b", "c"))
        for order in itertools.permutations(range(3)):
            entry = _dtensor_spec.ShardOrderEntry(tensor_dim=0, mesh_dims=order)
            by_order = spec(cube, [dt.Shard(0)] * 3, (8, 8), shard_order=(entry,))
            layout, _ = shardir.from_dtensor(by_order)
            assert [a.name for a in layout.dims[0]] == ["abc"[d] for d in order]
            _, _, placements = shardir.to_dtensor(layout, CUBE, (8, 8))
            assert shardir.from_dtensor(spec(cube, placements, (8, 8)))[0] == layout
