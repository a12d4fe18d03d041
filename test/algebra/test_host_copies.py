"""Copies between devices and hosts in plans of redistributions, against every place that they could
have."""

import random
from dataclasses import replace
from math import prod

import numpy as np
import pytest

from shardir.algebra.cluster import HostLink, default
from shardir.algebra.layout import Layout
from shardir.algebra.mesh import Mesh
from shardir.algebra.notation import mesh_of, parse_layout, parse_local
from shardir.algebra.redistribution import Redistribution, plan_redistribution
from shardir.algebra.steps import step_seconds
from shardir.dialects.random import fill
from shardir.interpret.redistribution import redistribute
from shardir.interpret.values import split

MESH = replace(mesh_of("m", "a = 2, b = 3"), cluster=replace(default(6), host=HostLink(1e9, 1e-6)))
SHAPE = (12, 18)
SPLITS = ["[{}, {}]", "[{a}, {}]", "[{}, {a}]", "[{a}, {b}]", "[{a, b}, {}]", "[{b}, {a}]"]


def planned(source: Layout, target: Layout) -> Redistribution:
    return plan_redistribution(SHAPE, "f32", MESH, source, target)


def bytes_of(mesh: Mesh, layout: Layout) -> int:
    return 4 * prod(layout.local_shape(mesh, SHAPE))


@pytest.mark.parametrize("hosts", [(True, False), (False, True), (True, True)])
def test_copies_are_where_they_move_the_minimum(hosts: tuple[bool, bool]) -> None:
    """Between all pairs: devices communicate from their own memory, by the plan without hosts; the
    copies are of the smallest shards of all places that this allows."""
    for one in SPLITS:
        for other in SPLITS:
            splits = zip((one, other), hosts, strict=True)
            ends = [replace(parse_layout(f"@m, {s}"), host=h) for s, h in splits]
            plan = planned(*ends)
            inner = planned(*(l.on_device for l in ends)).steps
            steps = [s for s in plan.steps if s.kind != "copy"]
            assert [(s.kind, s.layout.on_device) for s in steps] == [
                (s.kind, s.layout) for s in inner
            ]
            assert not any(s.communicates(MESH) and s.layout.host for s in steps)
            layouts = [ends[0].on_device, *(s.layout for s in inner)]
            moving = [i for i, s in enumerate(inner) if s.communicates(MESH)]
            up = layouts[: moving[0] + 1] if moving else layouts
            down = layouts[moving[-1] + 1 :] if moving else layouts
            minimum = 0
            if not (all(hosts) and not moving):
                minimum += min(bytes_of(MESH, l) for l in up) if hosts[0] else 0
                minimum += min(bytes_of(MESH, l) for l in down) if hosts[1] else 0
            copies = [s for s in plan.steps if s.kind == "copy"]
            assert sum(bytes_of(MESH, s.layout) for s in copies) == minimum
            before, seconds = ends[0], 0.0
            for s in plan.steps:
                if s.kind == "copy":
                    assert s.layout.host is not before.host
                    seconds += 1e-6 + bytes_of(MESH, before) / 1e9
                else:
                    assert s.layout.host is before.host
                    seconds += step_seconds(MESH, SHAPE, before, s, 4)
                before = s.layout
            assert before == ends[1].simplified(MESH)
            assert plan.seconds == pytest.approx(seconds)


def test_a_copied_value_is_the_same() -> None:
    r = random.Random(0)
    x = fill("normal", {"mean": 0.0, "std": 1.0}, SHAPE, None, "0/x", np.float64)
    for _ in range(20):
        source, target = (
            replace(parse_layout(f"@m, {r.choice(SPLITS)}"), host=r.random() < 0.7)
            for _ in range(2)
        )
        parts = redistribute(planned(source, target), split(x, source, MESH))
        for got, want in zip(parts, split(x, target, MESH), strict=True):
            assert (got == want).all()


@pytest.mark.parametrize(
    "text", ["@m, [{a}, {}], on host", "@m, [{}, {b}], partial sum {a}, on host"]
)
def test_its_text_is_parsed_again(text: str) -> None:
    assert str(parse_layout(text)) == text and parse_layout(text).host
    assert str(parse_local(f"{text}, of [5, 3]")) == f"{text}, of [5, 3]"
