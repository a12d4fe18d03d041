"""Sharding groups: values that have one layout."""

from xdsl.ir import Block, SSAValue

from shardir.diagnostics import Failure, Located, coded
from shardir.dialects.dist import ShardingGroupOp
from shardir.dialects.locations import describe_maker
from shardir.dialects.nn.types import unsharded_type


def sharding_groups(block: Block) -> list[dict[SSAValue, ShardingGroupOp]]:
    """Return the values of each sharding group, each with its op. Groups that share a value are
    merged.

    Raises:
        Failure: values of a group have different shapes.
    """
    groups: list[dict[SSAValue, ShardingGroupOp]] = []
    ids: list[set[int]] = []
    for op in block.ops:
        if not isinstance(op, ShardingGroupOp):
            continue
        members, numbers = {op.value: op}, {op.group.value.data}
        for i in reversed(range(len(groups))):
            if op.value in groups[i] or not numbers.isdisjoint(ids[i]):
                members, numbers = groups.pop(i) | members, ids.pop(i) | numbers
        groups.append(members)
        ids.append(numbers)
    errors: list[Located] = []
    for members in groups:
        first, *remaining = members
        for v in remaining:
            if unsharded_type(v).get_shape() != unsharded_type(first).get_shape():
                shapes = [
                    f"{list(unsharded_type(w).get_shape())} of {describe_maker(w)}"
                    for w in (v, first)
                ]
                group = members[v].group.value.data
                message = (
                    f"expected one shape in sharding group {group}, got {' and '.join(shapes)}"
                )
                errors.append((members[v], coded("P2", message)))
    if errors:
        raise Failure(errors)
    return groups


def contradiction(
    op: ShardingGroupOp, one: tuple[SSAValue, object], other: tuple[SSAValue, object]
) -> str:
    """Return the message for two values of a group with different annotated layouts."""
    got = " and ".join(f"[{layout}] of {describe_maker(v)}" for v, layout in (one, other))
    group = op.group.value.data
    return coded("P3", f"expected one layout in sharding group {group}, got {got}")
