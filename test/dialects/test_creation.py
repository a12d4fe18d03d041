"""Ops are made and read as xDSL makes and reads them, but faster."""

import subprocess
import sys
from collections.abc import Callable

import pytest
from xdsl.dialects.builtin import StringAttr, TensorType, f32
from xdsl.ir import Block, Operation, Region
from xdsl.irdl import IRDLOperation
from xdsl.irdl.operations import BaseAccessor, get_accessors_from_op_def

from shardir.dialects import DIALECTS

OPS = [op for dialect in DIALECTS.values() for op in dialect().operations]
T = TensorType(f32, [2])


@pytest.mark.parametrize("with_region", [False, True])
def test_an_op_is_as_xdsl_makes_it(with_region: bool):
    """Its results, the uses of its operands, and its regions."""
    block = Block(arg_types=[T, T])
    x, y = block.args
    for kind in OPS:
        assert issubclass(kind, IRDLOperation)
        made, expected = (
            create(
                kind, operands=[x, y, x], result_types=[T, T], attributes={"a": StringAttr("b")},
                regions=[Region(Block())] if with_region else [],
            )
            for create in (kind.create.__func__, Operation.create.__func__)
        )  # fmt: skip
        assert type(made) is type(expected) is kind
        assert made.properties == expected.properties
        assert made.attributes == expected.attributes
        assert made.location == expected.location
        assert len(made.regions) == len(expected.regions) == with_region
        assert all(r.parent is made for r in made.regions)
        assert [v.type for v in made.results] == [v.type for v in expected.results]
        assert [(v.op, v.index) for v in made.results] == [(made, 0), (made, 1)]
        uses = [sorted(u.index for u in v.uses if u.operation is made) for v in (x, y)]
        assert uses == [[0, 2], [1]]
        assert list(made.operands) == list(expected.operands)
        made.erase()
        expected.erase()
        assert not x.uses
        assert not y.uses


def found(read: Callable[[], object]) -> object:
    """Return what is read, or the class of the error."""
    try:
        return read()
    except Exception as e:
        return type(e)


@pytest.mark.parametrize("operands", range(5))
def test_operands_and_results_are_those_that_xdsl_finds(operands: int):
    """Of each op with any number of them, by their names."""
    block = Block(arg_types=[T] * operands)
    for kind in OPS:
        op = Operation.create.__func__(kind, operands=block.args, result_types=[T] * operands)
        assert isinstance(op, IRDLOperation)
        members = get_accessors_from_op_def(op.get_irdl_definition(), None)
        for name, accessor in members.items():
            if isinstance(accessor, BaseAccessor):
                expected = found(lambda accessor=accessor, op=op: accessor.__get__(op))
                got = found(lambda name=name, op=op: getattr(op, name))
                assert type(got) is type(expected)
                assert got == expected
        op.erase()


IN_C = """
from random import Random
from xdsl.dialects.builtin import i32
from xdsl.dialects.test import TestOp
from xdsl.ir import Block, Region, SSAValues
from xdsl.ir.core import IRWithName
from shardir.dialects.blocks import hash_in_c, ops_of

NAMES = ["x", "_", "x1", "x_1", "x_1_2", "a.b", "$c", "é", "1x", "", "x y", "x²", None]


def named(v, name):
    try:
        v.name_hint = name
    except ValueError:
        return ValueError
    return v.name_hint


def facts():
    block = Block(arg_types=[i32])
    first, second = (TestOp(operands=[block.args[0]] * 2, result_types=[i32] * 3) for _ in "ab")
    block.add_ops([first, second])
    x, v = block.args[0], first.results[1]
    assert (x.owner, v.owner, v.type) == (block, first, i32)
    uses = [(use.operation, use.index) for use in x.uses]
    assert uses == [(second, 1), (second, 0), (first, 1), (first, 0)], uses
    assert (first.next_op, second.prev_op, second.next_op) == (second, first, None)
    part = first.results[1:]
    assert type(part) is SSAValues and part == (v, first.results[2]) and part.types == (i32, i32)
    assert first.results[-1] is first.results[2] and v in {v} and first != second
    return [named(v, name) for name in NAMES]


def lists(random):
    block, outer = Region([Block()]).block, TestOp(regions=[Region([Block()])])
    for _ in range(100):
        ops, new = list(block.ops), TestOp()
        change = random.randrange(5) if len(ops) > 2 else 0
        if change == 0:
            block.add_op(new)
        elif change < 3:
            insert = block.insert_op_before if change == 1 else block.insert_op_after
            insert(new, random.choice(ops))
        else:
            (block.detach_op if change == 3 else block.erase_op)(random.choice(ops))
        assert list(ops_of(block)) == list(block.ops)
    second = block.split_before(random.choice(list(block.ops)))
    for part in block, second:
        assert list(ops_of(part)) == list(part.ops)
    for op, to in (second.last_op, block), (outer, outer.regions[0].block):
        try:
            to.add_op(op)
        except ValueError:
            continue
        raise AssertionError(op)


before = facts()
hash_in_c()
assert facts() == before, (facts(), before)
for seed in range(10):
    lists(Random(seed))
"""


def test_a_process_of_ours_reads_what_xdsl_does():
    """Fields, parts of values, and names, also those that xDSL changes or refuses; and the ops of a
    block after each change of it."""
    subprocess.run([sys.executable, "-c", IN_C], check=True, timeout=60)
