"""The global view's one op of its own: the same value in another layout."""

from xdsl.dialects.builtin import IntegerAttr as Int
from xdsl.dialects.builtin import TensorType, i64
from xdsl.irdl import (
    IRDLOperation,
    irdl_op_definition,
    operand_def,
    opt_prop_def,
    result_def,
    traits_def,
)
from xdsl.traits import Pure
from xdsl.utils.exceptions import VerifyException

from shardir.dialects.dist.types import check_types, is_local, layout_of


@irdl_op_definition
class RedistributeOp(IRDLOperation):
    """The same value in another layout. What it needs to communicate travels with all else that
    has the same `fusion` index."""

    name = "dist.redistribute"
    value = operand_def(TensorType)
    fusion = opt_prop_def(Int.constr(type=i64))
    out = result_def(TensorType)
    traits = traits_def(Pure())
    assembly_format = "$value (`fusion` $fusion^)? attr-dict `:` functional-type(operands, results)"

    def verify_(self) -> None:
        check_types(self)
        have, want = self.value.type, self.out.type
        assert isinstance(have, TensorType) and isinstance(want, TensorType)
        a, b = layout_of(self.value), layout_of(self.out)
        if a is None or b is None or is_local(have) or is_local(want):
            raise VerifyException("[R1] a redistribution goes from one #dist.layout to another")
        if have.get_shape() != want.get_shape() or have.element_type != want.element_type:
            raise VerifyException("[R2] a redistribution keeps the shape and the element type")
        if a.mesh != b.mesh:
            raise VerifyException(f"[R3] from mesh @{a.mesh} to mesh @{b.mesh}: one mesh only")
        if b.reduction == "any" and (a.reduction != "any" or a.partial != b.partial):
            raise VerifyException(
                "[L4] no value becomes a partial any, which is of different values; say sum"
            )
