"""Functions over the same parameters: one layout of each."""

from itertools import product
from typing import Any

import pytest
from xdsl.dialects.builtin import TensorType

from shardir import compile
from shardir.dialects.dist import LocalAttr
from shardir.dialects.train import arguments
from shardir.rewriting.functions import bodies

MESH = "dist.mesh @m <dp = 2, tp = 2>\n"

LOSS = """
func.func private @{name}(
    %x: tensor<64x512xf32> {{train.input = #train.init<normal>}},
    %w: tensor<512x512xf32{w}> {{train.{w_role} = "w", train.init = #train.init<normal>}},
    %v: tensor<512x512xf32{v}> {{train.{v_role} = "v", train.init = #train.init<normal>}}
) -> tensor<f32> {{
  %h = nn.matmul %x, %w : (tensor<64x512xf32>, tensor<512x512xf32{w}>) -> tensor<64x512xf32>
  %y = nn.matmul %h, %v : (tensor<64x512xf32>, tensor<512x512xf32{v}>) -> tensor<64x512xf32>
  %s = nn.square %y : (tensor<64x512xf32>) -> tensor<64x512xf32>
  %l = nn.reduce <mean> %s dims <0, 1> : (tensor<64x512xf32>) -> tensor<f32>
  func.return %l : tensor<f32>
}}
"""


def loss(name: str, trained: str, w: str = "", v: str = "") -> str:
    """A function that trains some of its weights, which are annotated by layouts."""
    layouts = {k: f", #dist.layout<@m, [{x}]>" if x else "" for k, x in (("w", w), ("v", v))}
    roles = {f"{k}_role": "parameter" if k in trained else "state" for k in "wv"}
    return LOSS.format(name=name, **layouts, **roles)


STEPS = """
train.step @one of @loss_w <adam, lr = 0.01>
train.step @two of @loss_v <adam, lr = 0.01>
"""


def layouts_of(text: str, **options: Any) -> dict[str, dict[str, str]]:
    """The layouts of each weight in the functions of a program."""
    program, found = compile(text, **options), dict[str, dict[str, str]]()
    for f, block in bodies(program.module):
        for a, v in zip(arguments(f), block.args, strict=True):
            if a.key in ("w", "v"):
                assert isinstance(v.type, TensorType) and isinstance(v.type.encoding, LocalAttr)
                found.setdefault(a.key, {})[f.sym_name.data] = str(v.type.encoding)
    return found


CASES = [
    ({}, {"plan": "fsdp(dp)"}),
    *product(
        ({}, {"w": "{tp}, {dp}"}, {"v": "{}, {tp}"}, {"w": "{tp}, {}", "v": "{}, {dp}"}),
        ({}, {"mode": "auto"}),
    ),
]  # fmt: skip


@pytest.mark.parametrize(("annotated", "options"), CASES)
def test_a_weight_has_one_layout_in_two_steps(
    annotated: dict[str, str], options: dict[str, str]
) -> None:
    """Which is annotated where it is trained; the other step reads it."""
    own = {k: {k: x} for k, x in annotated.items()}
    text = MESH + loss("loss_w", "w", **own.get("w", {})) + loss("loss_v", "v", **own.get("v", {}))
    found = layouts_of(text + STEPS, **options)
    assert all(f.keys() == {"one", "two"} for f in found.values())
    assert all(len({*f.values()}) == 1 for f in found.values()), found
    for key, layout in annotated.items():
        assert f"[{layout}]" in found[key]["one"]


def test_annotations_that_differ_are_a_warning() -> None:
    text = MESH + loss("loss_w", "w", w="{dp}, {}") + loss("loss_v", "v", w="{}, {dp}") + STEPS
    with pytest.warns(UserWarning, match=r"expected w in one layout, .* as in @loss_w, got .*@los"):
        found = layouts_of(text)
    assert len({*found["w"].values()}) == 2
