"""lower-to-spmd: every value is local, and ops that cannot be computed are errors."""

import pytest
from support.harness import (
    MESH,
    Arg,
    apply,
    compiled,
    laid_out,
    layout,
    program,
)
from support.pass_inputs import every_value, forms

from shardir.compat.xdsl import set_type
from shardir.diagnostics import Failure
from shardir.dialects import dist
from shardir.dialects.dist import is_local, layout_of
from shardir.dialects.nn.types import unsharded_type


def test_every_value_is_local_afterwards():
    for module, _, _ in forms("lower-to-spmd"):
        compiled(module, ("lower-to-spmd",))
        assert all(is_local(v.type) for v in every_value(module))
        assert not any(isinstance(op, dist.RedistributeOp) for op in module.walk())


def test_each_op_that_is_not_computable_is_an_error():
    def body(b, x, y):
        return [b.add(x, y), b.neg(x), b.mul(x, y)]

    module = laid_out(
        program([Arg("f32", (4, 4))] * 2, body), MESH, [layout("[{a}, {}]"), layout("[{}, {a}]")]
    )
    for v in every_value(module):
        if layout_of(v) is None:
            set_type(v, dist.with_layout(unsharded_type(v), layout("[{a}, {}]")))
    with pytest.raises(Failure) as e:
        apply(module, "lower-to-spmd")
    assert len(e.value.errors) == 2 and all("[T3]" in message for _, message in e.value.errors)
