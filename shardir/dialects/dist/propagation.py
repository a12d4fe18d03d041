"""What a program says about the spreading of layouts: which values are to lie alike, and where
layouts stop. Both have had their effect when every value has a layout, and calculate nothing."""

from xdsl.dialects.builtin import IntegerAttr as Int
from xdsl.dialects.builtin import TensorType, i64
from xdsl.ir import SSAValue
from xdsl.irdl import (
    IRDLOperation,
    irdl_attr_definition,
    irdl_op_definition,
    operand_def,
    prop_def,
    result_def,
    traits_def,
)
from xdsl.traits import Pure
from xdsl.utils.exceptions import VerifyException

from shardir.algebra.factors import Factors
from shardir.dialects.dist.redistribute import RedistributeOp
from shardir.dialects.dist.types import check_types, is_local
from shardir.dialects.text import WordAttr, word


@irdl_attr_definition
class DirectionAttr(WordAttr):
    """`<none>`, `<forward>` (from the operand to the result) or `<backward>`."""

    name = "dist.direction"

    @classmethod
    def words(cls) -> tuple[str, ...]:
        return "none", "forward", "backward"


class _OfGlobalValues(IRDLOperation):
    """An op that is about the layouts of values of the global view."""

    def verify_(self) -> None:
        check_types(self)
        if any(is_local(v.type) for v in (*self.operands, *self.results)):
            raise VerifyException(
                f"[P1] {self.name} of a value of the local view, whose layout is decided: leave "
                "it out"
            )


@irdl_op_definition
class ShardingGroupOp(_OfGlobalValues):
    """The value lies as all others of this group of the function do: what propagation or search
    finds out of one holds for all."""

    name = "dist.sharding_group"
    value = operand_def(TensorType)
    group = prop_def(Int.constr(type=i64))
    assembly_format = "$value `group` $group attr-dict `:` type($value)"


@irdl_op_definition
class PropagationBarrierOp(_OfGlobalValues):
    """The same value, behind which layouts may be others: they spread in the direction that is
    said, from operand to result (`forward`), from result to operand, or not at all."""

    name = "dist.propagation_barrier"
    allowed = prop_def(DirectionAttr)
    value = operand_def(TensorType)
    out = result_def(TensorType)
    traits = traits_def(Pure())
    assembly_format = "$allowed $value attr-dict `:` functional-type(operands, results)"

    def verify_(self) -> None:
        super().verify_()
        have, want = self.value.type, self.out.type
        assert isinstance(have, TensorType) and isinstance(want, TensorType)
        if have.get_shape() != want.get_shape() or have.element_type != want.element_type:
            raise VerifyException("[R2] a propagation barrier keeps the shape and the element type")

    def reversed(self, cotangent: SSAValue) -> "PropagationBarrierOp":
        """The barrier of the result's cotangent, which goes the other way."""
        other = {"forward": "backward", "backward": "forward"}.get(self.allowed.data, "none")
        return PropagationBarrierOp.create(
            operands=[cotangent], result_types=[cotangent.type],
            properties={"allowed": word(DirectionAttr, other)}, location=self.location,
        )  # fmt: skip

    def factors(self) -> Factors:
        """Each dimension of the result is the operand's."""
        assert isinstance(self.value.type, TensorType)
        shape = self.value.type.get_shape()
        names = [f"d{i}" for i in range(len(shape))]
        return Factors.of([names], [names], [shape, shape], linear="any")


SAME_VALUE = (RedistributeOp, PropagationBarrierOp)
"""The ops of the global view that hand a value on as it is, and change its layout at most."""
