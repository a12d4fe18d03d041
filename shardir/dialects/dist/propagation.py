"""Sharding groups, whose values get one layout, and propagation barriers. Neither computes: they
are resolved once every value has a layout."""

from xdsl.dialects.builtin import IntegerAttr as Int
from xdsl.dialects.builtin import TensorType, i64
from xdsl.ir import SSAValue
from xdsl.irdl import (
    IRDLOperation,
    irdl_attr_definition,
    operand_def,
    prop_def,
    result_def,
    traits_def,
)
from xdsl.traits import Pure
from xdsl.utils.exceptions import VerifyException

from shardir.algebra.factors import Factors
from shardir.diagnostics import coded
from shardir.dialects.definition import op_definition
from shardir.dialects.dist.redistribute import RedistributeOp
from shardir.dialects.dist.types import check_types, is_local, type_change
from shardir.dialects.text import WordAttr, word


@irdl_attr_definition
class DirectionAttr(WordAttr):
    """`<none>`, `<forward>` (from the operand to the result), `<backward>` or `<both>`."""

    name = "dist.direction"

    @classmethod
    def words(cls) -> tuple[str, ...]:
        return "none", "forward", "backward", "both"


class _OfGlobalValues(IRDLOperation):
    """An op on values of the global view, which affects their layouts only."""

    def verify_(self) -> None:
        check_types(self)
        if any(is_local(v.type) for v in (*self.operands, *self.results)):
            message = (
                f"expected a value of the global view in {self.name}, got one of the local view"
            )
            raise VerifyException(coded("P1", message))


@op_definition
class ShardingGroupOp(_OfGlobalValues):
    """The values of a group of a function get one layout, by propagation or search."""

    name = "dist.sharding_group"
    value = operand_def(TensorType)
    group = prop_def(Int.constr(type=i64))
    assembly_format = "$value `group` $group attr-dict `:` type($value)"


@op_definition
class PropagationBarrierOp(_OfGlobalValues):
    """The operand, perhaps in another layout. Layouts propagate from operand to result only
    (`forward`), from result to operand only (`backward`), not at all (`none`), or as over any op
    (`both`), where one of the two has an annotation of its own."""

    name = "dist.propagation_barrier"
    allowed = prop_def(DirectionAttr)
    value = operand_def(TensorType)
    out = result_def(TensorType)
    traits = traits_def(Pure())
    assembly_format = "$allowed $value attr-dict `:` functional-type(operands, results)"

    def verify_(self) -> None:
        super().verify_()
        if message := type_change(self.value, self.out):
            raise VerifyException(coded("R2", message))

    def reversed(self, cotangent: SSAValue) -> "PropagationBarrierOp":
        """Return the barrier of the result's cotangent, in the other direction."""
        other = {"forward": "backward", "backward": "forward"}.get(
            self.allowed.data, self.allowed.data
        )
        return PropagationBarrierOp.create(
            operands=[cotangent], result_types=[cotangent.type],
            properties={"allowed": word(DirectionAttr, other)}, location=self.location,
        )  # fmt: skip

    def factors(self) -> Factors:
        """Return one factor for each dimension of operand and result."""
        assert isinstance(self.value.type, TensorType)
        shape = self.value.type.get_shape()
        names = [f"d{i}" for i in range(len(shape))]
        return Factors.of([names], [names], [shape, shape], linear="any")


SAME_VALUE = (RedistributeOp, PropagationBarrierOp)
"""The ops of the global view whose result is the operand, perhaps in another layout."""
