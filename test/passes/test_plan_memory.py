"""plan-memory: no storage overwrites one that is read later, no higher peak, no longer step."""

from random import Random

import pytest
from xdsl.dialects.builtin import DenseArrayBase, ModuleOp
from xdsl.dialects.func import FuncOp
from xdsl.ir import BlockArgument, Operation, SSAValue

import shardir
from shardir.algebra.mesh import Mesh
from shardir.algebra.notation import mesh_of
from shardir.cost.functions import functions
from shardir.cost.memory import LiveStorages, memory_of
from shardir.cost.memory_plan import planned_memory
from shardir.cost.report import cost_of_function
from shardir.dialects import dist
from shardir.dialects.memory import OFFSETS
from shardir.dialects.nn.types import size_of
from shardir.tools import bench

programs, random_step = bench.load("programs"), bench.load("random_steps").random_step

GPTS = {"tp": programs.gpt(layers=2), "fsdp": programs.gpt(layers=2, fsdp=True)}


def planned(text: str, pipeline: str) -> tuple[tuple[ModuleOp, ModuleOp], list[FuncOp]]:
    """A lowered program before and after plan-memory, and its functions after it."""
    before = shardir.compile(text, pipeline=pipeline).module
    after = shardir.compile(before, pipeline="plan-memory").module
    return (before, after), [f for f, _ in functions(after)]


def replay(f: FuncOp, mesh: Mesh) -> int:
    """Run a function on a block in which a write ends the life of all that it overlaps: everything
    that an op reads must be there after its own writes. Return the bytes of the block."""
    root = LiveStorages(f, mesh).root
    there: dict[object, tuple[int, int]] = {}
    sent: dict[Operation, list[object]] = {}
    top = 0

    def write(name: object, low: int, size: int) -> None:
        nonlocal top
        for other, (a, b) in list(there.items()):
            if a < low + size and low < b:
                del there[other]
        there[name], top = (low, low + size), max(top, low + size)

    def check(name: object, op: Operation) -> None:
        if not isinstance(name, BlockArgument) and size(name):
            assert name in there, (name, op)

    def size(name: object) -> int:
        return size_of(name) if isinstance(name, SSAValue) else 1

    for op in f.body.block.ops:
        reads: list[object] = [root(v) for v in op.operands]
        found = op.attributes.get(OFFSETS)
        offsets = found.get_values() if isinstance(found, DenseArrayBase) else ()
        sizes = [size_of(v) for v in op.results]
        joint = [v for v in op.results if root(v) is not v and root(v) in op.results]
        for i, offset in enumerate(offsets):
            if i < len(op.results) and offset >= 0:
                more = sum(size_of(v) for v in joint if root(v) is op.results[i])
                write(op.results[i], offset, sizes[i] + more)
            elif offset >= 0:
                write(op, offset, 1)
                reads.append(op)
        if isinstance(op, dist.WaitOp):
            reads += sent.get(op.started, [])
        for name in reads:
            check(name, op)
        if dist.is_started(op):
            sent[op] = reads
    return top


@pytest.mark.parametrize("name", GPTS)
def test_a_gpt_is_planned_within_a_hundredth_of_the_bound(name: str):
    (before, after), _ = planned(GPTS[name], "train")
    for f, mesh in functions(after):
        plan = planned_memory(f)
        assert plan is not None
        assert replay(f, mesh) <= plan.size
        assert plan.gap < 0.01
    laws_hold(before, after)


@pytest.mark.parametrize("seed", range(6))
def test_a_random_step_is_planned(seed: int):
    random = Random(f"memory {seed}")
    text = random_step(mesh_of("m", "a = 2, b = 2"), random, 3)
    (before, after), _ = planned(text, ("data", "train")[seed % 2])
    for f, mesh in functions(after):
        plan = planned_memory(f)
        assert plan is not None
        assert plan.bound <= plan.size
        assert replay(f, mesh) <= plan.size
    laws_hold(before, after)


def laws_hold(before: ModuleOp, after: ModuleOp) -> None:
    """No higher peak, no longer step, the same collectives in the same order."""
    for (f, mesh), (g, _) in zip(functions(before), functions(after), strict=True):
        assert memory_of(g, mesh).peak <= memory_of(f, mesh).peak
        assert cost_of_function(g, mesh).seconds <= cost_of_function(f, mesh).seconds * (1 + 1e-9)
        assert communication(f) == communication(g)


def communication(f: FuncOp) -> list[str]:
    found = (dist.CollectiveOp, dist.WaitOp)
    ops = [op for op in f.body.block.ops if isinstance(op, found)]
    return [f"{op.name} {[v.type for v in op.results]} {dist.is_started(op)}" for op in ops]
