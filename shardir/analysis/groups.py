"""Sharding groups: values that have one layout."""

from xdsl.ir import Block, SSAValue

from shardir.diagnostics import Failure, Located
from shardir.dialects.dist import ShardingGroupOp
from shardir.dialects.locations import maker
from shardir.dialects.nn.types import unsharded_type


def sharding_groups(block: Block) -> list[dict[SSAValue, ShardingGroupOp]]:
    """The values that must have one layout, group by group, each with the op that says so. Groups
    that share a value are one.

    Raises:
        Failure: values of a group have different shapes.
    """
    found: list[dict[SSAValue, ShardingGroupOp]] = []
    ids: list[set[int]] = []
    for op in block.ops:
        if not isinstance(op, ShardingGroupOp):
            continue
        members, numbers = {op.value: op}, {op.group.value.data}
        for i in reversed(range(len(found))):
            if op.value in found[i] or not numbers.isdisjoint(ids[i]):
                members, numbers = found.pop(i) | members, ids.pop(i) | numbers
        found.append(members)
        ids.append(numbers)
    errors: list[Located] = []
    for members in found:
        first, *others = members
        for v in others:
            if unsharded_type(v).get_shape() != unsharded_type(first).get_shape():
                shapes = [list(unsharded_type(w).get_shape()) for w in (v, first)]
                message = (
                    f"[P2] the values of sharding group {members[v].group.value.data} are to have "
                    f"one shape, but {maker(v)} is {shapes[0]}, and {maker(first)} is {shapes[1]}; "
                    "leave one of them out"
                )
                errors.append((members[v], message))
    if errors:
        raise Failure(errors)
    return found


def contradiction(
    op: ShardingGroupOp, one: tuple[SSAValue, object], other: tuple[SSAValue, object]
) -> str:
    """The message for two values of a group that are annotated with different layouts."""
    said = [f"{maker(v)} lies as [{where}]" for v, where in (one, other)]
    return (
        f"[P3] the values of sharding group {op.group.value.data} are to lie alike, but {said[0]}, "
        f"and {said[1]}; state one of them, or both alike"
    )
