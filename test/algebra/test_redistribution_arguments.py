"""Arguments of shardir.plan_redistribution that are refused."""

import re
from typing import Any

import pytest

import shardir
from shardir.algebra.cluster import Cluster, Level
from shardir.algebra.mesh import Mesh
from shardir.algebra.notation import mesh_of, parse_layout
from shardir.diagnostics import ShardirError


def test_redistribution_of_another_mesh_is_refused() -> None:
    """A step between two meshes was planned."""
    mesh = mesh_of("m", "a = 2")
    layouts = [parse_layout(f"@{name}, [{{a}}, {{}}]") for name in "km"]
    with pytest.raises(ShardirError, match=r"\[R3\] expected a layout of mesh @m, got \[@k"):
        shardir.plan_redistribution((4, 4), "f32", mesh, layouts[0], layouts[1])


def test_empty_sizes_are_refused() -> None:
    with pytest.raises(ShardirError, match="got '\\]'"):
        parse_layout("@m, [{a} sizes []]")


DEVICES = Cluster((Level("node", 2, 1e9, 1e-6),))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cluster": "h200"}, "expected a Cluster, got 'h200'"),
        ({"shape": (-4,)}, "integers of 0 or more, got (-4,)"),
        ({"shape": (4.0,)}, "integers of 0 or more, got (4.0,)"),
        ({"shape": (4, 4)}, "a layout of 2 dimensions"),
        ({"source": "@m, [{a}]"}, "expected a Layout, got '@m, [{a}]'"),
        ({"dtype": "f31"}, "expected an element type, got f31"),
    ],
)
def test_wrong_arguments_of_a_plan(change: dict[str, Any], message: str) -> None:
    layout = parse_layout("@m, [{a}]")
    given: dict[str, Any] = {
        "shape": [4], "dtype": "f32", "mesh": Mesh("m", (("a", 2),)), "source": layout,
        "target": layout, "cluster": DEVICES,
    }  # fmt: skip
    assert not shardir.plan_redistribution(**given).steps
    with pytest.raises(ShardirError, match=re.escape(message)):
        shardir.plan_redistribution(**given | change)
