"""The redistribution of the global view: a value in another layout."""

from xdsl.dialects.builtin import IntegerAttr as Int
from xdsl.dialects.builtin import TensorType, i64
from xdsl.irdl import (
    IRDLOperation,
    operand_def,
    opt_prop_def,
    result_def,
    traits_def,
)
from xdsl.traits import Pure
from xdsl.utils.exceptions import VerifyException

from shardir.algebra.transitions import check_reachable
from shardir.diagnostics import coded
from shardir.dialects.definition import op_definition
from shardir.dialects.dist.types import check_types, is_local, layout_of, type_change, verification


@op_definition
class RedistributeOp(IRDLOperation):
    """The operand in another layout. Redistributions with equal `fusion` indices communicate in
    one buffer."""

    name = "dist.redistribute"
    value = operand_def(TensorType)
    fusion = opt_prop_def(Int.constr(type=i64))
    out = result_def(TensorType)
    traits = traits_def(Pure())
    assembly_format = "$value (`fusion` $fusion^)? attr-dict `:` functional-type(operands, results)"

    def verify_(self) -> None:
        check_types(self)
        have, want = self.value.type, self.out.type
        a, b = layout_of(self.value), layout_of(self.out)
        if a is None or b is None or is_local(have) or is_local(want):
            message = f"expected types with a #dist.layout, got {have} and {want}"
            raise VerifyException(coded("R1", message))
        if message := type_change(self.value, self.out):
            raise VerifyException(coded("R2", message))
        if a.mesh != b.mesh:
            message = f"expected a result on mesh @{a.mesh}, as the operand is, got @{b.mesh}"
            raise VerifyException(coded("R3", message))
        with verification():
            check_reachable(a, b)
