"""A loop whose number of runs depends on values.

    %root, %runs = nn.while(%x, %n) cond {
    ^bb0(%a: tensor<f32>, %k: tensor<i32>):
      %zero = nn.constant dense<0> : tensor<i32> -> tensor<i32>
      %goes_on = nn.compare <gt> %k, %zero
      nn.yield %goes_on
    } do {
    ^bb0(%b: tensor<f32>, %l: tensor<i32>):
      ...
      nn.yield %c, %m
    } : (tensor<f32>, tensor<i32>) -> (tensor<f32>, tensor<i32>)

Both regions take the carried values, and use no others. Every device computes the whole loop, from
replicated values: all have the same condition, and none communicates in it.
"""

from collections.abc import Iterator, Sequence
from typing import ClassVar

from xdsl.dialects.builtin import TensorType, i1
from xdsl.ir import Attribute, Region, SSAValue
from xdsl.irdl import IRDLOperation, region_def, traits_def, var_operand_def, var_result_def
from xdsl.traits import IsTerminator
from xdsl.utils.exceptions import VerifyException

from shardir.algebra.factors import Factors
from shardir.diagnostics import ShardirError, coded
from shardir.dialects.blocks import ops_of
from shardir.dialects.definition import op_definition
from shardir.dialects.dist import tensor
from shardir.dialects.nn.base import STRATEGY, Array, Device, Props, TensorOp, Types, factor_names
from shardir.dialects.nn.random import Drawn
from shardir.dialects.nn.types import unsharded_type


@op_definition
class YieldOp(IRDLOperation):
    """The end of a region of `nn.while`: whether it goes on, or the carried values of the next
    run"""

    name = "nn.yield"
    xs = var_operand_def(TensorType)
    traits = traits_def(IsTerminator())
    assembly_format = "$xs attr-dict `:` type($xs)"


@op_definition
class WhileOp(TensorOp):
    """The carried values after the runs of `body`, as long as `condition` yields true. Each device
    computes the whole loop, from replicated operands. It has no gradient"""

    name = "nn.while"
    xs = var_operand_def(TensorType)
    outs = var_result_def(TensorType)
    condition = region_def("single_block")
    body = region_def("single_block")
    assembly_format = f"`(` $xs `)` `cond` $condition `do` $body {STRATEGY}"
    PRECISION: ClassVar[str] = "wide"

    @classmethod
    def infer(cls, operands: Types, props: Props) -> list[TensorType]:
        if not operands:
            raise ShardirError(coded("T14", "expected carried values, got none"))
        return list(operands)

    @classmethod
    def rule(cls, operands: Types, results: Types, props: Props) -> Factors:
        shapes = [t.get_shape() for t in operands]
        names = factor_names(sum(map(len, shapes)))
        unused = iter(names)
        dims = [[next(unused) for _ in shape] for shape in shapes]
        return Factors.of(dims, dims, [*shapes, *shapes], replicate=names)

    @property
    def changed(self) -> list[bool]:
        """Of each carried value whether a run may change it."""
        block = self.body.block
        assert block.last_op is not None
        return [a is not b for a, b in zip(block.args, block.last_op.operands, strict=True)]

    def evaluate(self, device: Device, *arrays: Array) -> Array | tuple[Array, ...]:
        raise AssertionError("nn.while is evaluated by the interpreter, op by op")

    def gradient(self, b: object, *cotangents: SSAValue | None) -> Sequence[SSAValue | None]:
        message = (
            "expected an op with a gradient, got nn.while: how often it runs depends on values"
        )
        use = "let it run a fixed number of times, or put nn.stop_gradient before it"
        raise ShardirError(coded("G8", message, use=use))

    def verify_(self) -> None:
        super().verify_()
        carried = [unsharded_type(v) for v in self.operands]
        for name, region, yielded in (
            ("condition", self.condition, [tensor(i1, ())]), ("body", self.body, carried),
        ):  # fmt: skip
            if errors := [*_region_errors(name, region, carried, yielded)]:
                raise VerifyException(errors[0])


def _region_errors(
    name: str, region: Region, carried: Sequence[Attribute], yielded: Sequence[Attribute]
) -> Iterator[str]:
    """Yield the errors of a region that takes and yields values of these types."""
    block = region.block
    for error in _type_errors("argument", f"of the {name}", carried, block.arg_types):
        yield coded("T14", error, use="write the types of the carried values")
    own: set[SSAValue] = {*block.args}
    ops, end = ops_of(block)[:-1], block.last_op
    for op in ops_of(block):
        if other := [v for v in op.operands if v not in own]:
            value = f"%{other[0].name_hint}" if other[0].name_hint else "another value"
            error = f"expected carried values and those of the {name} alone in it, got {value}"
            yield coded("T14", error)
        own.update(op.results)
    for op in ops:
        dialect = op.name.partition(".")[0]
        if not isinstance(op, TensorOp) or isinstance(op, Drawn) or dialect in ("dist", "train"):
            error = f"expected ops that compute the same in each run in the {name}, got {op.name}"
            yield coded("T14", error, use="move the op out of the loop")
        elif op.strategy is not None:
            error = f"expected ops without strategies in the {name}, got that of {op.name}"
            yield coded("T14", error, use="drop the strategy")
        for v in op.results:
            if isinstance(v.type, TensorType) and v.type != unsharded_type(v):
                error = f"expected values without layouts in the {name}, got {v.type} of {op.name}"
                yield coded("T14", error, use="drop the layout")
    if not isinstance(end, YieldOp):
        got = "none" if end is None else end.name
        error = f"expected nn.yield at the end of the {name}, got {got}"
        yield coded("T14", error, use="yield whether it goes on, or the carried values")
        return
    for error in _type_errors("value", f"that the {name} yields", yielded, end.operand_types):
        yield coded("T14", error, use="yield values of these types")


def _type_errors(
    what: str, of: str, wanted: Sequence[Attribute], got: Sequence[Attribute]
) -> Iterator[str]:
    """Yield the errors of types that are not those wanted."""
    for i, (want, have) in enumerate(zip(wanted, got, strict=False)):
        if want != have:
            yield f"expected {what} {i} {of} of type {want}, got {have}"
    if len(wanted) != len(got):
        yield f"expected {len(wanted)} {what}s {of}, got {len(got)}"
