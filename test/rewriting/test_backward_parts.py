"""The backward part of a stage in two: of all splits that with the fewest bytes kept in between."""

import random
from collections.abc import Collection
from itertools import combinations

from support.extent import extent
from xdsl.dialects.func import FuncOp
from xdsl.ir import Operation, SSAValue

import shardir
from shardir.dialects.nn.types import size_of
from shardir.rewriting.backward_parts import ops_of_weights

MATRIX, ROW = "tensor<4x4xf32>", "tensor<4xf32>"


def _random_ops(chance: random.Random) -> tuple[list[SSAValue], list[Operation]]:
    """Return the arguments and the ops of a function of matrices and rows."""
    matrices, rows, lines = ["%a", "%b", "%c"], ["%r"], []
    for i in range(chance.randint(6, 10)):
        x, y, r = chance.choice(matrices), chance.choice(matrices), chance.choice(rows)
        kind = chance.choice(["matmul", "matmul", "mul", "reduce", "broadcast", "broadcast"])
        lines.append(
            {
                "matmul": f"%{i} = nn.matmul {x}, {y} : ({MATRIX}, {MATRIX}) -> {MATRIX}",
                "mul": f"%{i} = nn.mul {x}, {y} : ({MATRIX}, {MATRIX}) -> {MATRIX}",
                "reduce": f"%{i} = nn.reduce <sum> {x} dims <0> : ({MATRIX}) -> {ROW}",
                "broadcast": f"%{i} = nn.broadcast {r} dims <1> : ({ROW}) -> {MATRIX}",
            }[kind]
        )
        (rows if kind == "reduce" else matrices).append(f"%{i}")
    arguments = f"%a: {MATRIX}, %b: {MATRIX}, %c: {MATRIX}, %r: {ROW}"
    text = "\n".join([f"func.func @f({arguments}) {{", *lines, "func.return\n}"])
    f = next(iter(shardir.parse(text).body.ops))
    assert isinstance(f, FuncOp)
    return list(f.body.block.args), list(f.body.block.ops)[:-1]


def _after(op: Operation) -> set[Operation]:
    """Return the ops that depend on one."""
    users = {use.operation for v in op.results for use in v.uses if use.operation.results}
    return users.union(*map(_after, users))


def _kept(
    second: set[Operation], storages: dict[SSAValue, SSAValue], live: Collection[SSAValue]
) -> int:
    """Return the bytes of the storages that are there without some ops, which read them."""
    read = {storages[v] for op in second for v in op.operands if v not in live}
    there = {root for v, root in storages.items() if v.owner not in second}
    return sum(map(size_of, read & there))


def test_the_fewest_bytes_are_kept() -> None:
    chance, splits = random.Random(3), 0
    for _ in range(extent(150, 3000)):
        arguments, ops = _random_ops(chance)
        live = arguments[:1]
        awaited = [v for op in ops for v in op.results if chance.random() < 0.15]
        storages: dict[SSAValue, SSAValue] = {v: v for v in arguments[1:]}
        for op in ops:
            x, v = op.operands[0], op.results[0]
            storages[v] = storages[x] if op.name == "nn.broadcast" else v
        late = {*ops_of_weights(ops, awaited, storages)}

        waits = {v.owner for v in awaited}
        products = {op for op in ops if op.name == "nn.matmul"}
        must = {op for op in products if not {op, *_after(op)} & waits | _after(op) & products}
        never = waits | products - must
        subsets = (set(some) for n in range(len(ops) + 1) for some in combinations(ops, n))
        allowed = [
            some for some in subsets
            if must <= some and not some & never and all(_after(op) <= some for op in some)
        ]  # fmt: skip
        if must:
            splits += 1
            assert late in allowed
            assert _kept(late, storages, live) == min(_kept(s, storages, live) for s in allowed)
        else:
            assert not late
    assert splits > 10
