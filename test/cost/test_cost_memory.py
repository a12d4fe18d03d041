"""The memory model against what lives while torch runs the emitted program, and cases by hand."""

import random
import weakref
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.emitted import functions_of
from support.extent import sampled
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from xdsl.dialects.builtin import ModuleOp, TensorType

import shardir
from shardir.backend.torch.emit.program import program_text
from shardir.backend.torch.shardir_runtime import runtime as rt
from shardir.cost.functions import functions
from shardir.cost.memory import LiveStorages, MemoryUse, memory_of
from shardir.dialects.nn.types import unsharded_type
from shardir.syntax.parser import parse

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
TYPES = {
    "f32": torch.float32, "bf16": torch.bfloat16, "f64": torch.float64, "i64": torch.int64,
    "i32": torch.int32,
}  # fmt: skip


def uses(module: ModuleOp) -> dict[str, MemoryUse]:
    return {f.sym_name.data: memory_of(f, mesh) for f, mesh in functions(module)}


class Alive(TorchDispatchMode):
    """The most bytes in storages of living tensors, whenever torch has run something."""

    def __init__(self, tensors: list[torch.Tensor]):
        super().__init__()
        self.alive = [weakref.ref(t) for t in tensors]
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.alive += [weakref.ref(t) for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
        self.alive = [r for r in self.alive if r() is not None]
        storages = {
            s.data_ptr(): s.nbytes() for r in self.alive if (s := _storage(r())) is not None
        }
        self.peak = max(self.peak, sum(storages.values()))
        return out


def _storage(t: torch.Tensor | None) -> Any:
    return None if t is None else t.untyped_storage()


def measured(module: ModuleOp, name: str) -> int:
    """The peak of one call of a function, its arguments included."""
    space = functions_of(program_text(module, single=True))
    f = next(f for f, _ in functions(module) if f.sym_name.data == name)
    given = [_random(unsharded_type(a)) for a in f.body.block.args]
    mode = Alive(given)
    with mode:
        results = space[name](SimpleNamespace(device="cpu"), *given)
    assert results is not None
    return mode.peak


@pytest.fixture
def one_of_two() -> Iterator[Any]:
    """The first of two ranks, whose collectives end at once and give anything."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        yield rt.Mesh([("d", 2)], 0)
    finally:
        dist.destroy_process_group()


def measured_on(mesh: Any, module: ModuleOp, name: str) -> int:
    """The peak of one call of a function of the local view on that rank."""
    space = functions_of(program_text(module))
    f = next(f for f, _ in functions(module) if f.sym_name.data == name)
    given = [_random(unsharded_type(a)) for a in f.body.block.args]
    with Alive(given) as mode:
        assert space[name](mesh, *given) is not None
    return mode.peak


def _random(t: TensorType) -> torch.Tensor:
    return torch.zeros(t.get_shape(), dtype=TYPES[str(t.element_type)])


STEP = """func.func private @loss(
    %x: tensor<8x6x4xf32> {{train.input = #train.init<normal>}},
    %w: tensor<4x10xf32> {{train.parameter = "w", train.init = #train.init<normal>}},
    %v: tensor<60x{n}xf32> {{train.parameter = "v", train.init = #train.init<normal>}}
) -> tensor<f32> {{
  %y = nn.matmul %x, %w : (tensor<8x6x4xf32>, tensor<4x10xf32>) -> tensor<8x6x10xf32>
  %t = nn.tanh %y : (tensor<8x6x10xf32>) -> tensor<8x6x10xf32>
  %p = nn.transpose %t perm <0, 2, 1> : (tensor<8x6x10xf32>) -> tensor<8x10x6xf32>
  %r = nn.reshape %p : (tensor<8x10x6xf32>) -> tensor<8x60xf32>
  %z = nn.matmul %r, %v : (tensor<8x60xf32>, tensor<60x{n}xf32>) -> tensor<8x{n}xf32>
  %e = nn.exp %z : (tensor<8x{n}xf32>) -> tensor<8x{n}xf32>
  %s = nn.reduce <sum> %e dims <0, 1> : (tensor<8x{n}xf32>) -> tensor<f32>
  func.return %s : tensor<f32>
}}
train.step @step of @loss <{optimizer}>
"""


@pytest.mark.parametrize("n", [1, 9, 80])
@pytest.mark.parametrize("optimizer", ["sgd, lr = 0.1", "momentum, lr = 0.1, momentum = 0.9"])
def test_a_step_needs_what_torch_needs(n: int, optimizer: str) -> None:
    """A view and its copy, freed activations, gradients, and updates in place."""
    text = STEP.format(n=n, optimizer=optimizer)
    module = shardir.compile(text, "single-device").module
    use = uses(module)["step"]
    assert use.peak == measured(module, "step") == sum(use.parts.values())
    assert use.parts["parameters"] == 4 * (40 + 60 * n)
    assert use.parts["states"] == (0 if "sgd" in optimizer else use.parts["parameters"])
    assert use.parts["inputs"] == 8 * 6 * 4 * 4


def test_an_example_needs_what_torch_needs() -> None:
    """In a function that is no step nothing is freed before the return. nn.pick allocates a little
    within itself, which is not counted."""
    module = shardir.compile_file(EXAMPLES / "digits.ir", "single-device").module
    found = uses(module)
    assert found["step"].peak == measured(module, "step")
    assert 0.99 * measured(module, "accuracy") < found["accuracy"].peak
    assert found["accuracy"].peak <= measured(module, "accuracy")


TYPES_OF = {
    "$x": "tensor<4x8xf32, #dist.local<@m, [{d}, {}]>>",
    "$s": "tensor<4x8xf32, #dist.local<@m, [{}, {}], partial sum {d}>>",
    "$w": "tensor<4x8xf32, #dist.local<@m, [{}, {}]>>",
    "$g": "tensor<16x8xf32, #dist.local<@m, [{}, {}]>>",
}
ALONE = """func.func @f(%x: $s) -> $w attributes {train.step} {
  %y = nn.neg %x : ($s) -> $s
  %z = dist.all_reduce <sum> %y over <d> : ($s) -> $w
  func.return %z : $w
}
"""
KEPT = """func.func @f(%x: $s) -> $w attributes {train.step} {
  %z = dist.all_reduce <sum> %x over <d> : ($s) -> $w
  func.return %z : $w
}
"""
FUSED = """func.func @f(%x: $s) -> $w attributes {train.step} {
  %y = nn.neg %x : ($s) -> $s
  %a, %b = dist.all_reduce <sum> %y, %x over <d> : ($s, $s) -> ($w, $w)
  %c = nn.neg %a : ($w) -> $w
  %e = nn.neg %c : ($w) -> $w
  func.return %e : $w
}
"""
GATHERED = """func.func @f(%x: $x) -> $g attributes {train.step} {
  %z = dist.all_gather %x dim 0 over <d> : ($x) -> $g
  func.return %z : $g
}
"""
IN_FLIGHT = """func.func @f(%x: $x, %y: $g) -> ($g, $g) attributes {train.step} {
  %z = dist.all_gather %x dim 0 over <d> async : ($x) -> $g
  %n = nn.neg %y : ($g) -> $g
  %e = dist.wait %z : ($g) -> $g
  func.return %e, %n : $g, $g
}
"""


@pytest.mark.parametrize(
    ("text", "values", "at"),
    [
        (ALONE, 1 + 1, "nn.neg"),  # the all-reduce writes where its operand was
        (KEPT, 1 + 1, "dist.all_reduce"),  # not into what is the caller's
        (FUSED, 1 + 1 + 2, "dist.all_reduce"),  # both results in one flat buffer
        (GATHERED, 1 + 4, "dist.all_gather"),
        (IN_FLIGHT, 1 + 4 + 4 + 4, "nn.neg"),
    ],
    ids=["alone", "kept", "fused", "gathered", "in flight"],
)
def test_collectives(text: str, values: int, at: str) -> None:
    """In values of 4 x 8 f32, 128 B."""
    for short, full in TYPES_OF.items():
        text = text.replace(short, full)
    use = uses(shardir.compile("dist.mesh @m <d = 4>\n" + text, "").module)["f"]
    assert (use.peak, use.op.name) == (values * 128, at)


@pytest.mark.parametrize("op", ["all_reduce <sum> %x, %y", "reduce_scatter <sum> %x, %y dim 0"])
def test_alone_nothing_is_held(op: str) -> None:
    """Over an axis of one device results are operands: two of 128 B."""
    t = "tensor<4x8xf32, #dist.local<@m, [{}, {}], partial sum {d}>>"
    ends = ["{}", "{d}"]["scatter" in op]
    out = f"tensor<4x8xf32, #dist.local<@m, [{ends}, {{}}]>>"
    module = shardir.compile(
        f"dist.mesh @m <d = 1>\nfunc.func @f(%x: {t}, %y: {t}) -> ({out}, {out}) {{\n"
        f"  %a, %b = dist.{op} over <d> : ({t}, {t}) -> ({out}, {out})\n"
        f"  func.return %a, %b : {out}, {out}\n}}\n",
        "",
    ).module
    assert uses(module)["f"].peak == 2 * 128


MOVES = [
    ("all_reduce <sum>", "", "$sums", "$full", "f32"),
    ("all_gather", "dim 0", "$rows", "$full", "f32"),
    ("all_gather", "dim 1", "$columns", "$full", "f32"),
    ("reduce_scatter <sum>", "dim 0", "$sums", "$rows", "f32"),
    ("reduce_scatter <sum>", "dim 1", "$sums", "$columns", "f32"),
    ("reduce_scatter <sum>", "dim 0", "$sums", "$rows", "bf16"),
    ("reduce_scatter <sum>", "dim 1", "$sums", "$columns", "bf16"),
    ("all_to_all", "split 0 concat 1", "$columns", "$rows", "f32"),
    ("all_to_all", "split 1 concat 0", "$rows", "$columns", "f32"),
]


SIDES = 8, 512
"""Of a side of 8, 64 values are gathered by way of copies."""


@pytest.mark.parametrize(
    ("move", "count", "side", "started"),
    sampled(product(MOVES, (1, 2, 3), SIDES, (False, True)), 36), ids=str,
)  # fmt: skip
def test_collectives_need_what_the_runtime_needs(
    move: tuple[str, str, str, str, str], count: int, side: int, started: bool, one_of_two: Any
) -> None:
    """Of one value, and of several in one buffer. That of an all-to-all may still be there while
    what has arrived is taken apart, for Gloo's thread lets go of what it has sent a moment later. A
    buffer of what is reduced is freed before the sums, which of bf16 are in f32."""
    op, along, source, target, element = move
    full, half = f"{side}x{side}", side // 2
    types = {
        "$sums": f"tensor<{full}x{element}, #dist.local<@m, [{{}}, {{}}], partial sum {{d}}>>",
        "$full": f"tensor<{full}x{element}, #dist.local<@m, [{{}}, {{}}]>>",
        "$rows": f"tensor<{half}x{side}x{element}, #dist.local<@m, [{{d}}, {{}}]>>",
        "$columns": f"tensor<{side}x{half}x{element}, #dist.local<@m, [{{}}, {{d}}]>>",
    }
    given, ends = types[source], ", ".join([types[target]] * count)
    xs, ys, zs = (", ".join(f"%{n}{i}" for i in range(count)) for n in "xyz")
    arguments = ", ".join(f"%x{i}: {given}" for i in range(count))
    how, wait = " async" if started else "", f"  {zs} = dist.wait {ys} : ({ends}) -> ({ends})\n"
    module = shardir.compile(
        f"dist.mesh @m <d = 2>\n"
        f"func.func @f({arguments}) -> ({ends}) attributes {{train.step}} {{\n"
        f"  {ys} = dist.{op} {xs} {along} over <d>{how} : "
        f"({', '.join([given] * count)}) -> ({ends})\n"
        + (wait if started else "")
        + f"  func.return {zs if started else ys} : {ends}\n}}\n",
        "",
    ).module
    sent = count * half * side * 4 if count > 1 and op == "all_to_all" else 0
    found = measured_on(one_of_two, module, "f")
    assert found <= uses(module)["f"].peak <= found + sent


WIDTHS = (1, 4, 32)


@pytest.mark.parametrize("seed", range(8))
def test_each_op_needs_what_lives_then(seed: int) -> None:
    """Of random products: the arguments, which live throughout, and each value from the op that
    makes it to the last that reads it, or the return. The largest need is that of torch."""
    draw = random.Random(seed)
    types = {f"w{m}_{n}": f"tensor<{m}x{n}xf32>" for m, n in product(WIDTHS, repeat=2)}
    arguments = ", ".join(f"%{v}: {t}" for v, t in {"x": "tensor<8x4xf32>", **types}.items())
    width, ops = {"x": 4}, list[tuple[str, str]]()
    for i in range(draw.randint(4, 12)):
        x, n = draw.choice([*width][-3:]), draw.choice(WIDTHS)
        ops.append((x, f"v{i}"))
        width[f"v{i}"] = n
    lines = [
        f"  %{y} = nn.matmul %{x}, %w{width[x]}_{width[y]} : "
        f"(tensor<8x{width[x]}xf32>, {types[f'w{width[x]}_{width[y]}']}) -> "
        f"tensor<8x{width[y]}xf32>"
        for x, y in ops
    ]  # fmt: skip
    read = {x: i for i, (x, _) in enumerate(ops)}
    ends = [y for _, y in ops if y not in read]
    results = ", ".join(f"tensor<8x{width[v]}xf32>" for v in ends)
    returned = ", ".join(f"%{v}" for v in ends)
    module = parse("\n".join([
        f"func.func @f({arguments}) -> ({results}) attributes {{train.step}} {{",
        *lines, f"  func.return {returned} : {results}", "}",
    ]))  # fmt: skip
    given = 4 * (8 * 4 + sum(m * n for m, n in product(WIDTHS, repeat=2)))
    wanted = [
        given + sum(4 * 8 * width[y] for j, (_, y) in enumerate(ops)
                    if j <= i <= read.get(y, len(ops)))
        for i in range(len(ops) + 1)
    ]  # fmt: skip
    ((f, mesh),) = functions(module)
    assert LiveStorages(f, mesh).needed == wanted
    assert max(wanted) == measured(module, "f")
