"""Ready-made clusters, and clusters in files."""

import re
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest

import shardir
from shardir.algebra.cluster import DEFAULT, HOST_LINK, Cluster, Level
from shardir.algebra.notation import NotationError, parse_cluster
from shardir.cost.clusters import READY, load, names
from shardir.diagnostics import ShardirError

DEVICES = {"gloo": 16, "h100": 512, "h200": 512, "ascend910": 8, "pod2048": 2048, "shm": 16}


def test_all_are_known() -> None:
    assert names() == tuple(sorted(DEVICES))


@pytest.mark.parametrize("name", DEVICES)
def test_a_ready_made_cluster_is_a_program_and_a_value(name: str) -> None:
    cluster = load(name)
    assert cluster.units[-1] == DEVICES[name]
    assert cluster.memory and cluster.memory_bandwidth and cluster.overhead > 0
    assert dict(cluster.flops)["f32"] > 0
    assert parse_cluster(str(cluster)) == cluster
    path = READY / f"{name}.ir"
    text = path.read_text() if path.exists() else f"dist.cluster @{name} <{DEFAULT}>\n"
    assert f"@{name} <{cluster}>" in shardir.compile(text, "").text
    mesh = f"dist.mesh @m <d = {DEVICES[name]}> on @{name}\n"
    assert shardir.compile(text + mesh, "").text


def test_a_cluster_of_any_of_the_fields_is_read_as_it_is_written() -> None:
    """Each two fields without the others, and all."""
    full = load("shm")
    fields = str(replace(full, interference=0.5, host=HOST_LINK)).partition("], ")
    each = re.findall(r"[a-z]\w+ (?:= [^{}, ]+(?: {[^}]*})?|{[^}]*})", fields[2])
    assert len(each) == 13
    for some in [*combinations(each, 2), each]:
        text = ", ".join([f"{fields[0]}]", *some])
        assert str(parse_cluster(text)) == text
    with pytest.raises(NotationError, match="expected a cluster"):
        parse_cluster(f"{fields[0]}], {each[1]}, {each[0]}")


def test_levels_are_slower_the_further_out() -> None:
    for name in DEVICES:
        rates = [(l.bandwidth, -l.latency) for l in load(name).levels]
        assert rates == sorted(rates, reverse=True)


def test_a_file(tmp_path: Path) -> None:
    path = tmp_path / "ours.ir"
    path.write_text(
        "// mine\ndist.cluster @ours <levels [box = 2 {bandwidth = 1e9,\n  latency = 0}]>\n"
    )
    assert load(path) == load(str(path)) == Cluster((Level("box", 2, 1e9, 0.0),))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("levels [a = 2]", "expected one cluster; use dist.cluster @name"),
        ("dist.cluster @a <levels [a = 2]>", r"expected a cluster.* got '\]'"),
        (
            None,
            "expected a cluster, got .*; use a readable file or ascend910, gloo, h100, "
            "h200, pod2048, shm",
        ),
    ],
)
def test_what_is_no_cluster_is_refused(tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "x.ir"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ShardirError, match=message):
        load(path)


def test_a_part_is_full_units_and_the_start_of_the_next() -> None:
    pod = load("pod2048")
    counts = {n: [l.count for l in pod.part(n).levels] for n in (1, 3, 8, 32, 64, 2048)}
    assert counts == {
        1: [1], 3: [3], 8: [4, 2], 32: [4, 2, 4], 64: [4, 2, 4, 2], 2048: [4, 2, 4, 64]
    }  # fmt: skip
    assert pod.part(8).memory == pod.memory and pod.part(2048) == pod
    with pytest.raises(
        ShardirError,
        match=r"\[M5\] expected a number of devices that fills units of the cluster, got 6",
    ):
        pod.part(6)
    with pytest.raises(
        ShardirError, match=r"\[M5\] expected at most the 2048 devices of the cluster, got 4096"
    ):
        pod.part(4096)
