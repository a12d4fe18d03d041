"""Faults that a reader from outside found, each held by one small program."""

import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).parents[2] / "shardir/backend"))  # as beside a program

import shardir  # noqa: E402
from shardir.backend import runtime as rt  # noqa: E402

# ---- constants ----


def constant(numbers: str, type: str) -> Any:
    """What an emitted program makes of a constant."""
    text = f"""
        func.func @f() -> {type} {{
          %c = nn.constant dense<{numbers}> : {type} -> {type}
          func.return %c : {type}
        }}"""
    space: dict[str, Any] = {"__name__": "program"}
    exec(shardir.compile(text).program, space)
    return space["f"](rt.Mesh([], 0))


@pytest.mark.parametrize("type", ["tensor<f32>", "tensor<3xf32>"])
def test_greatest_f32_is_a_constant(type: str) -> None:
    """Masks are made of it. Its shortest text is a double beyond f32, which torch refuses."""
    greatest = torch.finfo(torch.float32).max
    assert (constant("3.4028235e+38", type) == greatest).all()
    assert (constant("-3.4028235e+38", type) == -greatest).all()


@pytest.mark.parametrize(("type", "shape"), [("0x3xf32", (0, 3)), ("2x0xf32", (2, 0))])
def test_constant_without_elements(type: str, shape: tuple[int, ...]) -> None:
    assert constant("1.0", f"tensor<{type}>").shape == shape
