"""Ops are made as xDSL makes them, but faster."""

import pytest
from xdsl.dialects.builtin import StringAttr, TensorType, f32
from xdsl.ir import Block, Operation, Region
from xdsl.irdl import IRDLOperation

from shardir.dialects import DIALECTS

OPS = [op for dialect in DIALECTS.values() for op in dialect().operations]
T = TensorType(f32, [2])


@pytest.mark.parametrize("with_region", [False, True])
def test_an_op_is_as_xdsl_makes_it(with_region: bool):
    """Its results, the uses of its operands, and its regions."""
    block = Block(arg_types=[T, T])
    x, y = block.args
    for kind in OPS:
        assert issubclass(kind, IRDLOperation)
        made, expected = (
            create(
                kind, operands=[x, y, x], result_types=[T, T], attributes={"a": StringAttr("b")},
                regions=[Region(Block())] if with_region else [],
            )
            for create in (kind.create.__func__, Operation.create.__func__)
        )  # fmt: skip
        assert type(made) is type(expected) is kind
        assert made.properties == expected.properties
        assert made.attributes == expected.attributes
        assert made.location == expected.location
        assert len(made.regions) == len(expected.regions) == with_region
        assert all(r.parent is made for r in made.regions)
        assert [v.type for v in made.results] == [v.type for v in expected.results]
        assert [(v.op, v.index) for v in made.results] == [(made, 0), (made, 1)]
        uses = [sorted(u.index for u in v.uses if u.operation is made) for v in (x, y)]
        assert uses == [[0, 2], [1]]
        assert list(made.operands) == list(expected.operands)
        made.erase()
        expected.erase()
        assert not x.uses
        assert not y.uses
