"""A planned redistribution, done in numpy on the parts of all ranks."""

from xdsl.dialects.builtin import f64
from xdsl.ir import Block

from shardir.algebra.redistribution import Redistribution
from shardir.dialects import dist
from shardir.interpret.collectives import run_collective
from shardir.interpret.values import Array


def redistribute(plan: Redistribution, parts: list[Array]) -> list[Array]:
    """What each rank holds afterwards, from what each holds before, step by step.

    The element type of the arrays is theirs; only the layouts and the shape come from the plan.
    """
    layout = plan.source
    for step in plan.steps:
        before = dist.local(f64, plan.shape, layout, plan.mesh)
        after = dist.local(f64, plan.shape, step.layout, plan.mesh)
        op = dist.step_op(step, Block(arg_types=[before]).args[0], after)
        (parts,) = run_collective(op, [parts], plan.mesh)
        layout = step.layout
    return parts
