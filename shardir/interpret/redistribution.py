"""A planned redistribution in numpy, on the shards of all ranks."""

from xdsl.dialects.builtin import f64
from xdsl.ir import Block

from shardir.algebra.redistribution import Redistribution
from shardir.dialects import dist
from shardir.dialects.nn.base import Array
from shardir.interpret.collectives import run_collective


def redistribute(plan: Redistribution, parts: list[Array]) -> list[Array]:
    """Run the plan's steps on the shards of all ranks; return the new shards.

    The shards may have any element type.
    """
    layout = plan.source
    for step in plan.steps:
        before = dist.local(f64, plan.shape, layout, plan.mesh)
        after = dist.local(f64, plan.shape, step.layout, plan.mesh)
        op = dist.step_op(step, Block(arg_types=[before]).args[0], after)
        (parts,) = run_collective(op, [parts], plan.mesh)
        layout = step.layout
    return parts
