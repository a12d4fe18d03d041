"""Updates by torch's fused kernels: those in a row with the same numbers are one call."""

# ruff: noqa: E501 (texts of programs)

from typing import Any

import pytest
import torch
from support.emitted import functions_of

import shardir
from shardir.backend.torch.emit.program import program_text
from shardir.backend.torch.shardir_runtime import runtime as rt
from shardir.syntax.parser import parse

NAMES, STEPS = ("a", "b", "c", "d"), 3

TEXT = """
func.func @loss({arguments}) -> tensor<f64> {{
{squares}
  %u = nn.add %ta, %tb : (tensor<f64>, tensor<f64>) -> tensor<f64>
  %v = nn.add %tc, %td : (tensor<f64>, tensor<f64>) -> tensor<f64>
  %l = nn.add %u, %v : (tensor<f64>, tensor<f64>) -> tensor<f64>
  func.return %l : tensor<f64>
}}
train.step @step of @loss <{optimizer}, lr = 0.1, weight_decay = 0.5>
"""


def text_of(optimizer: str, own: dict[str, dict[str, float]]) -> str:
    arguments, squares = [], []
    for name in NAMES:
        attributes = "".join(f", train.{k} = {v}" for k, v in own.get(name, {}).items())
        init = "train.init = #train.init<normal>"
        arguments.append(
            f'%{name}: tensor<3xf64> {{train.parameter = "{name}", {init}{attributes}}}'
        )
        squares += [
            f"  %s{name} = nn.square %{name} : (tensor<3xf64>) -> tensor<3xf64>",
            f"  %t{name} = nn.reduce <sum> %s{name} dims <0> : (tensor<3xf64>) -> tensor<f64>",
        ]
    given = {"arguments": ", ".join(arguments), "squares": "\n".join(squares)}
    return TEXT.format(optimizer=optimizer, **given)


@pytest.mark.parametrize(
    ("optimizer", "of_torch", "states"),
    [
        ("adam", torch.optim.Adam, 2),
        ("adamw", torch.optim.AdamW, 2),
        ("adagrad", torch.optim.Adagrad, 1),
    ],
)
@pytest.mark.parametrize(
    ("own", "calls"),
    [
        ({}, 1),
        ({"c": {"weight_decay": 0.0}}, 3),
        ({"d": {"weight_decay": 0.25}}, 2),
        ({"c": {"lr_scale": 3.0}, "d": {"lr_scale": 3.0}}, 2),
    ],
)
def test_updates_in_a_row_are_one_call(
    optimizer: str, of_torch: Any, states: int, own: dict[str, dict[str, float]], calls: int
) -> None:
    compiled = shardir.compile(text_of(optimizer, own), mode="stand_alone")
    program = program_text(compiled.module)
    assert program.count("ops_updates.") == calls
    step = functions_of(program)["step"]
    ws = list(torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))
    expected = [w.clone().requires_grad_() for w in ws]
    groups = [
        {
            "params": [w],
            "lr": 0.1 * own.get(name, {}).get("lr_scale", 1.0),
            "weight_decay": own.get(name, {}).get("weight_decay", 0.5),
        }
        for name, w in zip(NAMES, expected, strict=True)
    ]
    optimiser = of_torch(groups, foreach=False)
    counts = [torch.tensor(0)] if optimizer != "adagrad" else []
    own_states = [torch.zeros_like(w) for w in ws for _ in range(states)]
    for _ in range(STEPS):
        _, *updated = step(rt.Mesh([]), *ws, *own_states, *counts)
        rows = [updated[i : i + 1 + states] for i in range(0, 4 * (1 + states), 1 + states)]
        ws, own_states = [row[0] for row in rows], [x for row in rows for x in row[1:]]
        counts = updated[4 * (1 + states) :]
        optimiser.zero_grad()
        torch.stack([(w**2).sum() for w in expected]).sum().backward()
        optimiser.step()
    for mine, wanted in zip(ws, expected, strict=True):
        torch.testing.assert_close(mine, wanted.detach(), rtol=1e-12, atol=0)


SCALAR = "tensor<f64>"
UPDATES = [
    f"%{new}, %{state} = train.adagrad %{w}, %{g}, %{old}, %lr eps 0.1 weight_decay 0.0 : ({', '.join([SCALAR] * 4)}) -> ({SCALAR}, {SCALAR})"
    for new, state, w, g, old in ("cuags", "dvbct")
]
CHAIN = f"""
func.func @f(%a: {SCALAR}, %b: {SCALAR}, %g: {SCALAR}, %s: {SCALAR}, %t: {SCALAR}, %lr: {SCALAR}) -> ({SCALAR}, {SCALAR}) {{
  {"  ".join(UPDATES)}
  func.return %c, %d : {SCALAR}, {SCALAR}
}}
"""  # the updates are of one line, as those of a training step


def test_an_update_by_what_another_one_makes_is_after_it() -> None:
    program = program_text(parse(CHAIN))
    assert program.count("ops_updates.") == 2
    numbers = [torch.tensor(x, dtype=torch.float64) for x in (3.0, 5.0, 2.0, 0.0, 0.0, 0.5)]
    c, d = functions_of(program)["f"](rt.Mesh([]), *numbers)
    want = 3 - 0.5 * 2 / (2 + 0.1)
    assert c.item() == pytest.approx(want)
    assert d.item() == pytest.approx(5 - 0.5 * want / (want + 0.1))
