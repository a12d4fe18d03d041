"""Repeated blocks: planted in random programs, and the layers of a GPT."""

import numpy as np
import pytest
from xdsl.dialects.func import FuncOp
from xdsl.ir import Block, SSAValue

from shardir.analysis.repeats import Repeat, repeats
from shardir.syntax.parser import parse
from shardir.tools import bench

T = "tensor<4x4xf32>"
KINDS = ["relu", "tanh", "exp", "neg", "sqrt"]
search = bench.load("search")


def block_of(text: str, name: str = "f") -> Block:
    module = parse(text)
    (f,) = (op for op in module.body.ops if isinstance(op, FuncOp) and op.sym_name.data == name)
    return f.body.block


class Program:
    """A random program of one value of a type after the other."""

    def __init__(self, rng: np.random.Generator):
        self.rng, self.lines, self.args = rng, list[str](), ["%x"]
        self.n = 0

    def op(self, kind: str, *operands: str) -> str:
        self.n += 1
        types = ", ".join([T] * len(operands))
        self.lines.append(f"%v{self.n} = nn.{kind} {', '.join(operands)} : ({types}) -> {T}")
        return f"%v{self.n}"

    def argument(self) -> str:
        self.args.append(f"%a{len(self.args)}")
        return self.args[-1]

    def text(self, last: str) -> str:
        args = ", ".join(f"{a}: {T}" for a in self.args)
        return "\n".join([f"func.func @f({args}) -> {T} {{", *self.lines,
                          f"func.return {last} : {T}", "}"])  # fmt: skip


def planted(seed: int) -> tuple[str, int, int, int]:
    """A program with `count` iterations of `length` ops from `start` on: each uses a parameter of
    its own, a shared value, the result of the iteration before and values of its own."""
    rng = np.random.default_rng(seed)
    p = Program(rng)
    shared, last = p.argument(), "%x"
    for _ in range(int(rng.integers(0, 6))):
        last = p.op("abs", last)
    start, length, count = p.n, int(rng.integers(3, 9)), int(rng.integers(2, 7))
    plan = [
        (("mul", "add", "sub")[rng.integers(3)], int(rng.integers(0, i + 1)))
        if rng.random() < 0.5 else (KINDS[rng.integers(len(KINDS))], int(rng.integers(0, i + 1)))
        for i in range(length - 2)
    ]  # fmt: skip
    for _ in range(count):
        own = [p.op("matmul", last, p.argument())]
        for kind, i in plan:
            own.append(p.op(kind, own[i]) if kind in KINDS else p.op(kind, own[-1], own[i]))
        last = p.op("max", own[-1], shared)
    for _ in range(int(rng.integers(0, 6))):
        last = p.op("floor", last)
    return p.text(last), start, length, count


def check(block: Block, found: Repeat) -> None:
    """Check that every iteration is the first one on its own inputs."""
    ops = list(block.ops)

    def shape(k: int) -> list:
        begin = found.start + k * found.length
        known: dict[SSAValue, object] = {}
        out: list = []
        for i, op in enumerate(ops[begin : begin + found.length]):
            given = [known.get(v) for v in op.operands]
            for j, v in enumerate(op.operands):
                if given[j] is None:
                    first = ops[found.start + i].operands[j]
                    columns = [c for c in found.inputs if c[k] is v and c[0] is first]
                    assert columns, (k, i, j)
                    given[j] = tuple(found.inputs.index(c) for c in columns)
            out.append((op.name, given, [str(v.type) for v in op.results]))
            known |= {v: (i, j) for j, v in enumerate(op.results)}
        inside = set(ops[begin : begin + found.length])
        used = {v for v in known if any(u.operation not in inside for u in v.uses)}
        assert used <= {c[k] for c in found.outputs}
        out.append([known[c[k]] for c in found.outputs])
        return out

    first = shape(0)
    assert all([o[0] for o in shape(k)[:-1]] == [o[0] for o in first[:-1]]
               and len(shape(k)) == len(first) and shape(k)[-1] == first[-1]
               for k in range(found.count))  # fmt: skip
    for k in range(1, found.count):
        for a, b in zip(first[:-1], shape(k)[:-1], strict=True):
            assert a[2] == b[2]
            for x, y in zip(a[1], b[1], strict=True):
                assert x == y or (isinstance(x[0], int) and set(x) & set(y))


@pytest.mark.parametrize("seed", range(60))
def test_a_planted_repetition_is_found(seed: int):
    text, start, length, count = planted(seed)
    block = block_of(text)
    found = repeats(block)
    for one in found:
        check(block, one)
    (best,) = [r for r in found if r.length == length and r.count == count]
    assert start <= best.start < start + length  # a rotation of it, at worst


@pytest.mark.parametrize("count", [2, 3, 8])
def test_interface_of_a_chain(count: int):
    """The carried value, the parameters, the shared value; and the value that leaves the last."""
    p = Program(np.random.default_rng(0))
    shared, last = p.argument(), "%x"
    for _ in range(count):
        last = p.op("add", p.op("matmul", last, p.argument()), shared)
    block = block_of(p.text(last))
    (found,) = repeats(block)
    outs = [op.results[0] for op in block.ops if op.name == "nn.add"]
    x, s, *own = block.args
    assert (found.start, found.length, found.count, found.end) == (0, 2, count, 2 * count)
    assert set(found.inputs) == {(x, *outs[:-1]), tuple(own), (s,) * count}
    assert found.outputs == (tuple(outs),) and found.shared == ((s,) * count,)


def test_ops_of_equal_kind_with_other_operands_do_not_repeat():
    p = Program(np.random.default_rng(0))
    a = p.op("relu", "%x")
    b = p.op("sub", a, "%x")
    c = p.op("relu", b)
    d = p.op("sub", b, c)
    assert repeats(block_of(p.text(d))) == []


def test_attributes_count():
    lines = [f"%v{i} = nn.leaky_relu %v{i - 1} slope 0.{i} : ({T}) -> {T}" for i in range(1, 5)]
    head = f"func.func @f(%v0: {T}) -> {T} {{"
    text = "\n".join([head, *lines, f"func.return %v4 : {T}", "}"])
    assert repeats(block_of(text)) == []


@pytest.mark.parametrize("layers", [2, 5])
def test_layers_of_a_gpt(layers: int):
    """Forward; in the step also backward, in the opposite order, and the updates of the layers."""
    sizes = {"batch": 8, "seq": 16, "hidden": 32, "heads": 4, "vocab": 32}
    text = search.LAYOUT.sub("", search.gpt(layers=layers, mesh=(2, 4), **sizes))
    (forward,) = repeats(block_of(text, "loss"))
    assert forward.count == layers and len(forward.outputs) == 1
    module = search.applied(text, "distributed-autodiff")
    (step,) = (f for f in module.body.ops if isinstance(f, FuncOp))
    found = repeats(step.body.block)
    assert [r.count for r in found] == [layers] * 3
    assert found[0].length == forward.length
    for one in found:
        check(step.body.block, one)
