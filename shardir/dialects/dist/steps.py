"""The ops of collectives by their records, and the steps of redistributions as ops."""

from dataclasses import replace
from typing import cast

from xdsl.ir import Attribute, SSAValue

from shardir.algebra.collectives import COLLECTIVES, CollectiveStep
from shardir.algebra.mesh import Mesh
from shardir.dialects.dist import collectives, windows
from shardir.dialects.dist.base import PARAMETERS, PREFIX, CollectiveOp, parameter

OPS = {
    kind.name.removeprefix(PREFIX): cast(type[CollectiveOp], kind)
    for module in (collectives, windows)
    for kind in vars(module).values()
    if isinstance(kind, type) and issubclass(kind, CollectiveOp) and "name" in vars(kind)
}
"""The op of each collective, by the name of its record."""


LOCAL = tuple(kind for name, kind in OPS.items() if not COLLECTIVES[name].communicates)
"""The ops whose records do not communicate."""


def step_of(op: CollectiveOp, value: SSAValue, out: SSAValue, mesh: Mesh) -> CollectiveStep:
    """Return the step of an op for one of its values."""
    step = op.as_step(out)
    if isinstance(op, windows.HaloOp):
        return replace(step, windows=op.windows(value, out, mesh))
    return step


def step_op(step: CollectiveStep, value: SSAValue, out: Attribute) -> CollectiveOp:
    """Return the op of one step of a redistribution."""
    kind = OPS[step.kind]
    wanted = kind.get_irdl_definition().properties
    return kind.create(
        operands=[value], result_types=[out],
        properties={n: parameter(n, step) for n in wanted if n in PARAMETERS},
    )  # fmt: skip
