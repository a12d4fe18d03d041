"""`outline-blocks`: a loop computes the same as the equal blocks that it replaces, to the last bit,
in the interpreter and in torch, and holds no more memory.

Blocks are random: ops whose operands are results of the block, of the block before it, of two
blocks before (no loop has that), values of all blocks, or one of each block; in some, one block
is of another kind, or reads another value.
"""

import random
import re
from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from bench.programs import gpt, mlp, recurrent, transformer
from support.emitted import functions_of
from support.extent import extent, sampled
from xdsl.context import Context
from xdsl.dialects.builtin import ModuleOp

from shardir import compile
from shardir.backend.torch.emit import program
from shardir.backend.torch.shardir_runtime import runtime as rt
from shardir.dialects import train
from shardir.interpret.equivalence import random_arguments
from shardir.interpret.evaluator import function, run
from shardir.pipelines import build
from shardir.syntax.parser import parse
from shardir.tools import bench

LAYOUT = bench.load("search").LAYOUT
TYPE = "tensor<3xf64>"
UNARY, BINARY = ("tanh", "neg", "sin", "square"), ("add", "mul", "sub", "max")
BOUNDED = ("tanh", "neg", "sin", "cos")


def passed(module: ModuleOp, pipeline: str) -> ModuleOp:
    made = module.clone()
    for p in build(pipeline):
        p.apply(Context(), made)
    made.verify()
    return made


def loops(module: ModuleOp) -> int:
    return sum(isinstance(op, train.RepeatOp) for op in module.walk())


def blocks_of(seed: int) -> str:
    """The text of a program of random equal blocks."""
    draw = random.Random(seed)
    size, count, shared = draw.randint(3, 8), draw.randint(2, 7), draw.randint(1, 2)
    plan = []
    for i in range(size):
        places = ["all", "own", "before"] + ["here"] * (2 if i else 0) + ["two"] * (seed % 7 == 0)
        kinds = draw.choice((UNARY, BINARY))
        plan.append((draw.choice(kinds), [
            (draw.choice(places), draw.randrange(size), draw.randrange(shared))
            for _ in range(1 if kinds is UNARY else 2)
        ]))  # fmt: skip
    odd = draw.randrange(count) if draw.random() < 0.3 else -1
    other = draw.choice((-1, 0, 0, count // 2))
    reverse = draw.random() < 0.5
    args = [f"%s{k}" for k in range(shared)]
    args += [f"%w{j}_{i}" for j in range(count) for i in range(size)]
    args += [f"%b{k}_{i}" for k in range(2) for i in range(size)]
    lines = []
    for k in range(count):
        own = count - 1 - k if reverse else k
        for i, (kind, operands) in enumerate(plan):
            texts = []
            for place, j, s in operands:
                place = "all" if (k, i) == (other, size - 1) else place
                depth = {"here": 0, "before": 1, "two": 2}.get(place, 0)
                index = j % i if place == "here" else j
                made = f"%v{k - depth}_{index}" if k >= depth else f"%b{k % 2}_{index}"
                texts.append({"all": f"%s{s}", "own": f"%w{own}_{i}"}.get(place, made))
            name = "exp" if k == odd and i == size // 2 and kind in UNARY else kind
            types = ", ".join([TYPE] * len(texts))
            lines.append(f"  %v{k}_{i} = nn.{name} {', '.join(texts)} : ({types}) -> {TYPE}")
    results = [f"%v{count - 1}_{size - 1}"]
    results += [f"%v{k}_{draw.randrange(size)}" for k in range(count) if draw.random() < 0.3]
    head = ", ".join(f"{a}: {TYPE}" for a in args)
    outs = ", ".join([TYPE] * len(results))
    body = "\n".join(lines)
    returned = f"  func.return {', '.join(results)} : {outs}"
    return f"func.func @f({head}) -> ({outs}) {{\n{body}\n{returned}\n}}\n"


def walk_of(seed: int) -> str:
    """The text of a program of equal steps, and of steps back, from the last to the first, each of
    which reads values of one step: between some there is another op, so that steps back may read
    values of several loops, and of steps in none. In some, values of the steps are also read one by
    one in between, by a loop or not. All values are bounded."""
    draw = random.Random(seed)
    size, count = draw.randint(2, 4), draw.randint(8, 24)
    kinds = [draw.choice(BOUNDED) for _ in range(size)]
    read = [draw.randrange(size) for _ in range(draw.randint(1, 4))]
    share, lines = draw.choice((0.0, 0.1, 0.2)), list[str]()

    def op(made: str, kind: str, *operands: str) -> str:
        types, given = ", ".join([TYPE] * len(operands)), ", ".join(f"%{v}" for v in operands)
        lines.append(f"  %{made} = nn.{kind} {given} : ({types}) -> {TYPE}")
        return made

    def steps() -> list[int]:
        return sorted(range(count), reverse=draw.random() < 0.5)

    x = "x"
    for k in range(count):
        if draw.random() < share:
            x = op(f"odd{k}", "sigmoid", op(f"less{k}", "tanh", x))
        for i, kind in enumerate(kinds):
            x = op(f"v{k}_{i}", kind, x)
    total, equal, between = "w", draw.random() < 0.5, draw.random() < 0.5
    for k in steps() if between else ():
        total = op(f"part{k}", BINARY[2 * (0 if equal else draw.randrange(2))], total, f"v{k}_0")
    d = x
    for k in reversed(range(count)):
        if draw.random() < share / 2:
            d = op(f"back_odd{k}", "cos", d)
        for n, i in enumerate(read):
            d = op(f"d{k}_{n}", BINARY[(i + n) % 4], d, f"v{k}_{i}")
        total = op(f"sum{k}", "add", total, d)
    head, outs = f"%x: {TYPE}, %w: {TYPE}", f"{TYPE}, {TYPE}"
    body = "\n".join(lines)
    returned = f"  func.return %{d}, %{total} : {outs}"
    return f"func.func @f({head}) -> ({outs}) {{\n{body}\n{returned}\n}}\n"


def emitted(text: str, name: str, given: list[Any]) -> Any:
    """A function of a program, and its arguments."""
    mesh = rt.Mesh((), 0)
    tensors = [torch.from_numpy(np.array(a)) for a in given]
    return lambda: functions_of(text)[name](mesh, *tensors)


def arrays(results: Any) -> list[Any]:
    return [x.numpy() for x in (results if isinstance(results, tuple) else (results,))]


def peak(work: Any) -> tuple[Any, int]:
    """The results of a call, and the most bytes that it held at once, of what it allocated."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        results = work()
    assert profile.profiler is not None and profile.profiler.kineto_results is not None
    events = profile.profiler.kineto_results.events()
    memory: list[Any] = [e for e in events if e.name() == "[memory]"]
    memory.sort(key=lambda e: e.start_ns())
    return results, int(np.cumsum([e.nbytes() for e in memory]).max())


@pytest.mark.parametrize("text_of", [blocks_of, walk_of])
def test_a_loop_computes_what_its_blocks_do(text_of: Callable[[int], str]) -> None:
    found = 0
    for seed in range(extent(20, 3000)):
        before = parse(text_of(seed))
        after = passed(before, "outline-blocks")
        given = random_arguments(function(before, "f"), before, seed)
        want, got = run(before, "f", given), run(after, "f", given)
        in_torch = arrays(emitted(program.program_text(before), "f", given)())
        for x, y, z in zip(want, got, in_torch, strict=True):
            assert np.array_equal(x, y, equal_nan=True), f"seed {seed}"
            assert np.allclose(x, z, rtol=1e-12, equal_nan=True), f"seed {seed}"
        found += loops(after) > 0
    assert found >= extent(7, 1000)


SIZES: dict[str, Any] = {"layers": 5, "batch": 4, "mesh": (2, 2)}
STEPS = {
    "gpt": gpt(seq=8, hidden=16, heads=2, vocab=16, **SIZES),
    "transformer": transformer(seq=8, hidden=16, heads=2, **SIZES),
    "mlp": mlp(dim=8, hidden=16, **SIZES),
}
OPTIMIZERS = ("<adamw, lr = 0.01>", "<momentum, lr = 0.1, momentum = 0.9>", "<lamb, lr = 0.01>")
SEVERAL = " accumulate <mean, microbatches = 2>"


ALL = list(product(STEPS, OPTIMIZERS, ("", SEVERAL)))


@pytest.mark.parametrize(("name", "optimizer", "several"), sampled(ALL, 3))
def test_a_step_is_the_same_with_loops(
    name: str, optimizer: str, several: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = re.sub(r"<sgd, lr = [\d.]+>", optimizer + several, STEPS[name])
    single = passed(parse(text), "single-device")
    assert loops(passed(single, "outline-blocks")) >= 1
    given = random_arguments(function(single, "step"), single)
    looped = program.program_text(single)
    monkeypatch.setattr(program, "outline_copy", lambda module: module)
    flat = program.program_text(single)
    assert len(looped.splitlines()) < len(flat.splitlines())
    want, most = peak(emitted(flat, "step", given))
    got, held = peak(emitted(looped, "step", given))
    assert all(map(np.array_equal, arrays(want), arrays(got)))
    assert held <= 1.02 * most


@pytest.mark.parametrize("name", sampled(STEPS, 1))
@pytest.mark.parametrize("pipeline", extent(["train"], ["train", "auto"]))
def test_the_local_view_is_the_same_with_loops(name: str, pipeline: str) -> None:
    before = passed(parse(STEPS[name]), pipeline)
    after = passed(before, "outline-blocks")
    assert loops(after) >= 1
    given = random_arguments(function(before, "step"), before)
    want, got = run(before, "step", given), run(after, "step", given)
    assert all(map(np.array_equal, want, got))


RECURRENT = list(product((1, 2, 3), (1, 2), ("fsdp", "zero1", "data", "fsdp(dp)"), (5, 28)))
"""Layers, directions, plan and steps."""


@pytest.mark.parametrize(
    ("layers", "directions", "plan", "steps"),
    extent([(1, 2, "zero1", 9)], RECURRENT),
)
def test_a_recurrence_is_the_same_with_loops(
    layers: int, directions: int, plan: str, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients of weights are sums over steps, and partial on each rank until the last step. The
    program of one device has equal results with and without loops."""
    text = LAYOUT.sub("", recurrent(steps=steps, layers=layers, directions=directions))
    compiled = compile(text, plan=plan)
    before, after = compiled.module, passed(compiled.module, "outline-blocks")
    assert loops(after) >= 2 * layers and compiled.program
    given = random_arguments(function(before, "step"), before)
    want, got = run(before, "step", given), run(after, "step", given)
    assert all(map(np.array_equal, want, got))
    single = passed(parse(text), "single-device")
    given = random_arguments(function(single, "step"), single)
    looped = emitted(program.program_text(single), "step", given)
    monkeypatch.setattr(program, "outline_copy", lambda module: module)
    flat = emitted(program.program_text(single), "step", given)
    assert all(map(np.array_equal, arrays(flat()), arrays(looped())))


@pytest.mark.parametrize("name", sampled(STEPS, 1))
@pytest.mark.parametrize("pipeline", extent(["train"], ["train", "auto", "single-device"]))
def test_an_outlined_module_has_the_program_of_the_module(name: str, pipeline: str) -> None:
    module = passed(parse(STEPS[name]), pipeline)
    text = program.program_text(module)
    program.outline(module)
    assert loops(module) >= 1
    assert program.program_text(module) == text


def test_a_module_without_equal_blocks_stays() -> None:
    lines = [f"%c{i} = nn.constant dense<2.0> : tensor<f64> -> tensor<f64>" for i in range(2)]
    lines += [
        f"%y{i} = nn.mul %x, %c{i} : (tensor<f64>, tensor<f64>) -> tensor<f64>" for i in range(2)
    ]
    body = "\n".join([*lines, "func.return %y0, %y1 : tensor<f64>, tensor<f64>"])
    module = parse(f"func.func @f(%x: tensor<f64>) -> (tensor<f64>, tensor<f64>) {{\n{body}\n}}")
    assert str(passed(module, "outline-blocks")) == str(module)


def test_a_list_of_which_a_loop_takes_all_is_emptied() -> None:
    """A loop takes back the value that another one saves in each run, the last first: values are
    freed one by one."""
    one, both, lines = f"({TYPE}) -> {TYPE}", f"({TYPE}, {TYPE}) -> {TYPE}", list[str]()
    for i in range(COUNT := 9):
        lines.append(f"%t{i} = nn.tanh %x{i} : {one}")
        lines.append(f"%x{i + 1} = nn.neg %t{i} : {one}")
    for i in range(COUNT):
        lines.append(f"%u{i} = nn.mul %d{i}, %t{COUNT - 1 - i} : {both}")
        lines.append(f"%d{i + 1} = nn.neg %u{i} : {one}")
    body = "\n".join([*lines, f"func.return %d{COUNT} : {TYPE}"])
    module = parse(f"func.func @f(%x0: {TYPE}, %d0: {TYPE}) -> {TYPE} {{\n{body}\n}}")
    assert ".pop()" in program.program_text(module)
