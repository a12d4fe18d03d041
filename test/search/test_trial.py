"""Trials: a function is lowered without the others of its module."""

from typing import Any

import pytest
from xdsl.dialects.func import FuncOp
from xdsl.ir import Operation

from shardir.dialects.nn.base import TensorOp
from shardir.search.measure.trial import lowered
from shardir.syntax.parser import parse

FUNCTION = """
func.func @f{i}(%x: tensor<4xf32>) -> tensor<4xf32> {{
  %y = nn.tanh %x : (tensor<4xf32>) -> tensor<4xf32>
  func.return %y : tensor<4xf32>
}}
train.gradient @g{i} of @f{i} wrt <0>
"""


def test_other_functions_are_not_copied(monkeypatch: pytest.MonkeyPatch):
    """Otherwise the trials of all functions would take the square of their number."""
    copied = list[Operation]()
    clone = Operation.clone_without_regions

    def counted(op: Operation, *args: Any, **options: Any) -> Operation:
        copied.append(op)
        return clone(op, *args, **options)

    module = parse("dist.mesh @m <d = 2>\n" + "".join(FUNCTION.format(i=i) for i in range(3)))
    f = [op for op in module.body.ops if isinstance(op, FuncOp)][1]
    monkeypatch.setattr(Operation, "clone_without_regions", counted)
    found = lowered(module, f, lambda _: monkeypatch.undo(), "distributed-autodiff")
    assert [g.sym_name.data for g in found] == ["f1", "g1"]
    inside = set(f.walk())
    others = [op for op in module.walk() if isinstance(op, FuncOp | TensorOp) and op not in inside]
    assert copied
    assert not set(others).intersection(copied)
