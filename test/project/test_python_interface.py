"""The names of `import shardir`, and its own errors in place of those of Python."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import shardir
from shardir.algebra.mesh import Mesh
from shardir.backend.runs import Options
from shardir.dialects import nn

ONE = """func.func @f() -> tensor<2xf32> {
  %x = nn.constant dense<1.0> : tensor<2xf32> -> tensor<2xf32>
  func.return %x : tensor<2xf32>
}
"""
MESH = Mesh("m", (("d", 2),))


def test_packages_are_attributes() -> None:
    from shardir.cost import report

    assert shardir.cost.report is report
    assert not hasattr(shardir, "costs") and not hasattr(shardir, "_cost")


def test_names_are_completed() -> None:
    names = dir(shardir)
    assert {"compile", "run", "load", "Mesh", "Cluster", "ShardirError", "cost", "build"} <= {
        *names
    }
    assert all(hasattr(shardir, name) for name in names)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Options.of({"observer": print}), "a run has no option observer; it has steps,"),
        (lambda: Options.of({"callback": 3}), "expected a function as callback, got 3"),
        (lambda: Options.of({"step": 3}), "a run has no option step; did you mean steps?"),
        (lambda: Options.of({"steps": "3"}), "option steps of a run: expected int, got '3'"),
        (lambda: Options.of({"steps": True}), "option steps of a run: expected int, got True"),
        (lambda: shardir.compile(3), "expected text or a module, got 3"),  # type: ignore - wrong
        (
            lambda: shardir.plan_redistribution((4,), "f32", "m", "@m, [{d}]", "@m, [{}]"),  # type: ignore - wrong
            "expected a Mesh, got 'm'",
        ),
        (
            lambda: shardir.plan_redistribution((4,), "f32", MESH, "@m, [{d}]", "@m, [{}]"),  # type: ignore - wrong
            "expected a Layout, got '@m, [{d}]'; use shardir.algebra.notation.parse_layout",
        ),
        (lambda: nn.MatmulOp(None, None), "expected the parts of nn.matmul by name, got values"),  # type: ignore - wrong
    ],
)
def test_errors_are_our_own(call: Callable[[], object], message: str) -> None:
    with pytest.raises(shardir.ShardirError) as error:
        call()
    assert message in str(error.value)


def test_options_of_a_run() -> None:
    given = {"steps": 3, "timeout": 60, "dump": "a.npz"}
    assert Options.of(given) == Options(steps=3, timeout=60.0, dump=Path("a.npz"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "expected an .npz file of named arrays, got another one"),
        (b"x,y\n1,2\n", "expected an .npz file of named arrays, got another one"),
        (np.array(["a", {}], dtype=object), "expected an array of numbers, got Python objects in"),
    ],
)
def test_data_that_are_no_numbers(
    tmp_path: Path, content: bytes | np.ndarray, message: str
) -> None:
    file = tmp_path / "d.npz"
    if isinstance(content, bytes):
        file.write_bytes(content)
    else:
        np.savez(file, x=content)
    argument = '%y: tensor<2xf32> {train.input = #train.init<file, path = "d.npz", array = "x">}'
    text = ONE.replace("@f()", f"@f({argument})")
    with pytest.raises(shardir.ShardirError) as error:
        shardir.compile(text, "single-device", base_dir=tmp_path).save(tmp_path / "out")
    assert message in str(error.value) and "pickle" not in str(error.value)
