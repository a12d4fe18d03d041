"""Constants of emitted programs."""

from typing import Any

import pytest
import torch
from support.emitted import functions_of

import shardir
from shardir.backend.torch.shardir_runtime import runtime as rt


def constant(numbers: str, type: str) -> Any:
    """Return the value of a constant in an emitted program."""
    text = f"""
        func.func @f() -> {type} {{
          %c = nn.constant dense<{numbers}> : {type} -> {type}
          func.return %c : {type}
        }}"""
    return functions_of(shardir.compile(text).program)["f"](rt.Mesh([], 0))


@pytest.mark.parametrize("type", ["tensor<f32>", "tensor<3xf32>"])
def test_largest_f32_is_a_constant(type: str) -> None:
    """Masks contain it. Its shortest literal is a double beyond f32, which torch refuses."""
    largest = torch.finfo(torch.float32).max
    assert (constant("3.4028235e+38", type) == largest).all()
    assert (constant("-3.4028235e+38", type) == -largest).all()


@pytest.mark.parametrize(("type", "shape"), [("0x3xf32", (0, 3)), ("2x0xf32", (2, 0))])
def test_constant_without_elements(type: str, shape: tuple[int, ...]) -> None:
    assert constant("1.0", f"tensor<{type}>").shape == shape
