"""The bytes in the comment of a collective: those of its message, as nccl-tests defines its size.

Of the message of an all-reduce a device of a group of n receives 2 (n - 1) / n; of an all-gather, a
reduce-scatter, an all-to-all, a gather or a scatter (n - 1) / n; of a broadcast or a transfer all.
So the message is n shards, or the value that is replicated or partial.
"""

import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.emitted import mesh_op
from xdsl.dialects.builtin import ModuleOp, TensorType, bf16, f32, f64, i64
from xdsl.dialects.func import FuncOp, ReturnOp
from xdsl.ir import Attribute, Block, Operation, Region, SSAValue

import shardir
from shardir.algebra.collectives import COLLECTIVES, AxisState, Collective, CollectiveStep
from shardir.algebra.layout import replicated
from shardir.algebra.mesh import Mesh
from shardir.algebra.notation import mesh_of
from shardir.backend.torch.emit.program import outline_copy, program_text, public_functions
from shardir.dialects import dist
from shardir.rewriting.composites import expand_module
from shardir.syntax.parser import parse

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
WINDOWS = Path(__file__).parents[1] / "filecheck" / "lower-to-spmd" / "windows.ir"
NAMES = [
    "dlrm",
    "loss_parallel",
    "mixed_precision",
    "overlap",
    "redistributions_4_devices",
    "reid",
    "ring_attention",
    "ulysses",
]
"""Examples that compile fast, and that together have collectives of each kind."""

BYTES = {"f64": 8, "i64": 8, "f32": 4, "i32": 4, "f16": 2, "bf16": 2, "i1": 1}
UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}

MESSAGE: dict[str, Callable[[int, int, int], int]] = {
    "all-reduce": lambda operand, result, n: operand,
    "all-gather": lambda operand, result, n: n * operand,
    "reduce-scatter": lambda operand, result, n: n * result,
    "all-to-all": lambda operand, result, n: operand,
    "exchange": lambda operand, result, n: max(operand, result),
    "halo": lambda operand, result, n: max(operand, result),
    "broadcast": lambda operand, result, n: result,
    "gather": lambda operand, result, n: n * operand,
    "scatter": lambda operand, result, n: n * result,
    "permute": lambda operand, result, n: operand,
    "send": lambda operand, result, n: operand,
    "receive": lambda operand, result, n: result,
}
"""The bytes of the message of one value, from those of the operand and the result on a device."""

COMMENT = re.compile(r"# ([a-z-]+)[^\n]*? over [^()\n]*\((\d+) ranks\), ([\d.]+) ([KMG]?i?B)\b")


def bytes_of(v: SSAValue) -> int:
    assert isinstance(v.type, TensorType)
    return math.prod(v.type.get_shape()) * BYTES[str(v.type.element_type)]


def collectives(module: ModuleOp) -> Iterator[tuple[Operation, int]]:
    """Yield each op that moves bytes, with the size of its groups, in program order."""
    meshes = dist.meshes_of(module)
    (mesh,) = meshes.values()
    for f in public_functions(module):
        for op in f.body.block.ops:
            if isinstance(op, dist.LOCAL):
                continue
            if isinstance(op, dist.CollectiveOp | dist.SendOp | dist.RecvOp):
                n = mesh.extent(op.axes.data)
                if n > 1:
                    yield op, n


def written(text: str) -> list[tuple[str, int, float, int]]:
    """Yield of each comment the kind, the size of the groups, and the bytes with their unit."""
    joined = re.sub(r"\n +#   ", " ", text)
    return [
        (kind, int(n), float(number), UNITS[unit])
        for kind, n, number, unit in COMMENT.findall(joined)
    ]


def check(module: ModuleOp) -> set[str]:
    """Compare all comments of a program with its ops; return the kinds of collectives."""
    ops = list(collectives(outline_copy(expand_module(module))))
    comments = written(program_text(module))
    assert len(comments) == len(ops)
    for (op, n), (kind, ranks, number, unit) in zip(ops, comments, strict=True):
        operands = [v for v in op.operands if isinstance(v.type, TensorType)]
        sides = zip(
            map(bytes_of, operands or op.results),
            map(bytes_of, op.results or operands),
            strict=True,
        )
        want = sum(MESSAGE[kind](before, after, n) for before, after in sides)
        assert ranks == n, op
        assert abs(number * unit - want) <= (0.0501 * unit if unit > 1 else 0), (
            str(op),
            number,
            want,
        )
        assert unit == 1 or number >= 1
        assert number <= 1024 or unit == UNITS["GiB"]
    return {kind for kind, *_ in comments}


def test_comments_of_examples_have_the_bytes_of_messages() -> None:
    kinds = set()
    for name in NAMES:
        kinds |= check(shardir.compile_file(EXAMPLES / f"{name}.ir").module)
    kinds |= check(shardir.compile_file(WINDOWS).module)
    assert kinds >= {"all-reduce", "all-gather", "reduce-scatter", "all-to-all", "halo"}


MESH = mesh_of("m", "a = 2, b = 3, c = 2")
AXES = (MESH.names[1], MESH.names[0])
KINDS = [c for c in COLLECTIVES.values() if c.communicates and not c.name.startswith("halo")]


def module_of(
    record: Collective, element: Attribute, shape: tuple[int, ...], mesh: Mesh
) -> ModuleOp:
    """Return a function of one collective over AXES."""
    both = record.start is record.end is AxisState.SHARDED
    plain, dim, concat = replicated("m", 2), 0, 1 if both else -1
    before = plain
    if record.start is AxisState.SHARDED or record.start is None:
        before = plain.with_dim(concat if both else 0, AXES)
    elif record.start is AxisState.PARTIAL:
        before = plain.with_partial(AXES)
    pairs = (0, 1, 1, 0, 2, 5) if record.name == "permute" else ()
    step = CollectiveStep(record.name, AXES, plain.with_dim(1, AXES), dim, concat, "sum", 1, pairs)
    layout = record.after(mesh, before, step)
    step = CollectiveStep(record.name, AXES, layout, dim, concat, "sum", 1, pairs)
    types = [dist.local(element, shape, l, mesh) for l in (before, layout)]
    block = Block(arg_types=types[:1])
    op = dist.step_op(step, block.args[0], types[1])
    block.add_ops([op, ReturnOp(*op.results)])
    return ModuleOp([mesh_op(mesh), FuncOp("f", (types[:1], types[1:]), Region(block))])


@pytest.mark.parametrize("record", KINDS, ids=lambda c: c.name)
def test_comments_of_each_collective_have_the_bytes_of_messages(record: Collective) -> None:
    for element, shape in ((f32, (12, 18)), (f64, (6, 6000)), (bf16, (600, 6)), (i64, (12, 12))):
        kinds = check(module_of(record, element, shape, MESH))
        assert len(kinds) == 1


def test_comments_of_transfers_have_the_bytes_of_values() -> None:
    sent = "tensor<3x5xf32, #dist.local<@m, [{}, {}]>>"
    received = "tensor<3x5xf32, #dist.local<@m, [{}, {}], partial any {a}>>"
    module = parse(f"""dist.mesh @m <a = 2>
    func.func @f(%x: {sent}) -> {received} {{
      dist.send %x from 0 to 1 over <a> : {sent}
      %y = dist.recv from 0 to 1 over <a> : {received}
      func.return %y : {received}
    }}""", verify=True)  # fmt: skip
    assert check(module) == {"send", "receive"}
