"""Dominance: a definition precedes each use on every path. xDSL does not check it."""

from collections.abc import Callable, Iterable, Sequence

from xdsl.ir import Block, Operation, Region, SSAValue
from xdsl.traits import IsolatedFromAbove

from shardir.compat.xdsl import operands_of
from shardir.dialects.blocks import ops_of


def check_dominance(module: Operation, report: Callable[..., None]) -> None:
    """Report the uses that are not dominated by their definitions."""
    # A worklist instead of recursion; `seen` has the ids of the values that a region may use.
    todo: list[tuple[Region, frozenset[int] | set[int]]] = [(r, set()) for r in module.regions]
    while todo:
        region, outer = todo.pop()
        for block, seen in blocks_with_scope(region, outer):
            for arg in block.args:
                seen.add(id(arg))
            for op in ops_of(block):
                if not seen.issuperset(map(id, operands_of(op))):
                    for i, operand in enumerate(operands_of(op)):
                        if id(operand) not in seen:
                            report(op, undominated(op, i, operand))
                if op.regions:
                    isolated = op.has_trait(IsolatedFromAbove, value_if_unregistered=False)
                    todo += [(r, set() if isolated else set(seen)) for r in op.regions]
                seen.update(map(id, op.results))


def undominated(op: Operation, i: int, value: SSAValue) -> str:
    name = f"%{value.name_hint}" if value.name_hint else f"operand {i}"
    try:
        owner = value.owner
    except ValueError:
        return f"expected a definition of {name}, got none"
    inside = owner if isinstance(owner, Block) else owner.parent
    if inside is op.parent:
        return f"expected a definition of {name} before its use, got one after it"
    return f"expected a definition of {name} that dominates its use, got another"


def blocks_with_scope(region: Region, outer: Iterable[int]) -> Iterable[tuple[Block, set[int]]]:
    """Yield the blocks of a region, each with the ids of values in scope; the caller extends them
    by the block's own values."""
    if (first := region.first_block) is None:
        return
    if first is region.last_block:
        yield first, set(outer)
        return
    scopes: dict[Block, set[int]] = {}
    for block, above in dominator_tree(region):
        scopes[block] = set(outer) if above is None else set(scopes[above])
        yield block, scopes[block]


def dominator_tree(region: Region) -> list[tuple[Block, Block | None]]:
    """Return the reachable blocks, each after its immediate dominator (Cooper, Harvey, Kennedy)."""
    first = region.first_block
    assert first is not None
    order: list[Block] = []
    entered = {first}
    stack = [(first, iter(successors(first)))]
    while stack:
        block, unvisited = stack[-1]
        for s in unvisited:
            if s not in entered and s.parent is region:
                entered.add(s)
                stack.append((s, iter(successors(s))))
                break
        else:
            order.append(block)
            stack.pop()
    order.reverse()
    number = {b: i for i, b in enumerate(order)}
    before: dict[Block, list[Block]] = {b: [] for b in order}
    for b in order:
        for s in successors(b):
            if s in before:
                before[s].append(b)
    idom: dict[Block, Block] = {first: first}
    changed = True
    while changed:
        changed = False
        for b in order[1:]:
            new: Block | None = None
            for p in before[b]:
                if p in idom:
                    new = p if new is None else common_dominator(p, new, idom, number)
            assert new is not None
            if idom.get(b) is not new:
                idom[b], changed = new, True
    return [(b, None if b is first else idom[b]) for b in order]


def common_dominator(
    a: Block, b: Block, idom: dict[Block, Block], number: dict[Block, int]
) -> Block:
    while a is not b:
        while number[a] > number[b]:
            a = idom[a]
        while number[b] > number[a]:
            b = idom[b]
    return a


def successors(block: Block) -> Sequence[Block]:
    return () if block.last_op is None else block.last_op.successors
