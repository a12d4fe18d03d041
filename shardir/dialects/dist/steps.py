"""The ops of collectives by their records, and the steps of redistributions as ops."""

from typing import cast

from xdsl.ir import Attribute, SSAValue

from shardir.algebra.collectives import COLLECTIVES, CollectiveStep
from shardir.dialects.dist import collectives, windows
from shardir.dialects.dist.base import PREFIX, CollectiveOp

OPS = {
    kind.name.removeprefix(PREFIX): cast(type[CollectiveOp], kind)
    for module in (collectives, windows)
    for kind in vars(module).values()
    if isinstance(kind, type) and issubclass(kind, CollectiveOp) and "name" in vars(kind)
}
"""The op of each collective, by the name of its record."""


LOCAL = tuple(kind for name, kind in OPS.items() if not COLLECTIVES[name].communicates)
"""The ops whose records do not communicate."""


def step_op(step: CollectiveStep, value: SSAValue, out: Attribute) -> CollectiveOp:
    """Return the op of one step of a redistribution."""
    kind = OPS[step.kind]
    return kind.create(
        operands=[value], result_types=[out], properties=kind.properties_of(step)
    )  # fmt: skip
