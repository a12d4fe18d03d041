"""The names that the text of programs uses: no value, argument or function has one of them."""

import ast
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest
import torch
from support.emitted import functions_of
from support.extent import sampled

from shardir.backend.torch.backend import TorchBackend
from shardir.backend.torch.directory import RUNTIME
from shardir.backend.torch.emit.imports import MODULES, NAMES
from shardir.backend.torch.emit.names import RESERVED, Names
from shardir.backend.torch.emit.program import emit
from shardir.backend.torch.shardir_runtime import runtime as rt
from shardir.dialects.nn.custom import forget_custom_op, register_custom_op
from shardir.syntax.parser import default_parser, parse

F32, I32, KEY, IMAGE = "tensor<4x6xf32>", "tensor<4x6xi32>", "tensor<i64>", "tensor<2x4x8xf32>"
F64, SQUARE = "tensor<f64>", "tensor<256x256xf32>"
ROWS = "tensor<2x6xf32, #dist.local<@m, [{a}, {}]>>"
COLUMNS = "tensor<4x3xf32, #dist.local<@m, [{}, {a}]>>"
ALL = "tensor<4x6xf32, #dist.local<@m, [{}, {}]>>"

# By name: an op whose text uses it, the type of its operands, and the types of its results.
USES = {
    "torch": ("nn.max %A, %A", F32, [F32]),
    "F": ("nn.gelu %A", F32, [F32]),
    "aten": ("nn.sigmoid_grad %A, %A", F32, [F32]),
    "fallback": (
        'nn.custom "test.i0e"(%A) with {op = "special_i0e.default", tensors = ["self"]}',
        F32,
        [F32],
    ),
    "mesh": ("dist.all_gather %A dim 0 over <a>", ROWS, [ALL]),
    "rt": ("dist.all_gather %A dim 0 over <a>", ROWS, [ALL]),
    "moves": ("dist.exchange %A over <a>", ROWS, [COLUMNS]),
    "ops": ("nn.topk %A k 2 axis 1", F32, ["tensor<4x2xf32>", "tensor<4x2xi64>"]),
    "ops_attention": ("nn.attention %A, %A, %A causal logsumexp", F32, [F32, "tensor<4xf32>"]),
    "ops_positions": ("nn.sinusoid <halves> %A base 1.0e4", I32, ["tensor<4x6x8xf32>"]),
    "ops_products": ("nn.matmul %A, %A", SQUARE, [SQUARE]),
    "ops_random": ("nn.random <normal> %A stream 1", KEY, [F32]),
    "ops_updates": ("train.adagrad %A, %A, %A, %A eps 0.1 weight_decay 0.0", F64, [F64] * 2),
    "sliding": ("nn.max_pool_grad %A, %A window <3> padding <1, 1>", IMAGE, [IMAGE]),
    "windows": ("nn.unfold %A dim 1 step 2 offset 0", F32, ["tensor<4x2x3xf32>"]),
}

HARD = sorted({*NAMES, "shardir_runtime", "float", "class", "_"})
NEUTRAL = [f"x{'y' * i}" for i in range(len(HARD))]


@pytest.fixture(autouse=True)
def _called_by_torch() -> Iterator[None]:
    """The op of `fallback`, as the importer registers it."""
    register_custom_op("test.i0e", torch=f"{MODULES['fallback']}:call")
    yield
    forget_custom_op("test.i0e")


def program(name: str, values: list[str], arguments: list[str], functions: list[str]) -> str:
    """Functions that each end in the op of a name, on the last of the values; these follow from
    each other, the first one from the last argument."""
    op, given, results = USES[name]
    last = f"%{values[-1]}"
    types = ", ".join([given] * op.count("%A"))
    text = "dist.mesh @m <a = 2>\n"
    for function in functions:
        text += f"func.func @{function}({', '.join(f'%{a}: {given}' for a in arguments)})"
        text += f" -> {results[0]} {{\n"
        for value, before in zip(values, [arguments[-1], *values], strict=False):
            text += f"  %{value} = nn.neg %{before} : ({given}) -> {given}\n"
        outs = [f"%out{'z' * i}" for i in range(len(results))]
        text += f"  {', '.join(outs)} = {op.replace('%A', last)} : ({types}) -> "
        text += f"({', '.join(results)})\n  func.return %out : {results[0]}\n}}\n"
    return text


def outcomes(name: str, **names: list[str]) -> list[torch.Tensor]:
    """Return the results of the functions of the program with these names, on one rank."""
    default = {"values": ["v"], "arguments": ["input"], "functions": ["f"]}
    text = emit(parse(program(name, **{**default, **names}), "p.ir", verify=True)).text
    space, found = functions_of(text), []
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef):
            assert name in {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
            mesh = rt.Mesh([("a", 1)])
            given = [sample(USES[name][1], i) for i in range(len(node.args.args) - 1)]
            found.append(space[node.name](mesh, *given))
    return found


def sample(text: str, seed: int) -> torch.Tensor:
    """Return a tensor of a type, for a mesh of one rank."""
    shape = {KEY: (), F64: (), IMAGE: (2, 4, 8), SQUARE: (256, 256)}.get(text, (4, 6))
    x = (torch.arange(torch.Size(shape).numel()).view(shape) + seed) % 7
    if text == F64:
        return x.double() - 3
    return x if text == KEY else x.int() if text == I32 else x.float() - 3


@pytest.mark.parametrize(
    ("name", "kind"), sampled(product(sorted(USES), ["values", "arguments", "functions"]), 16)
)
def test_no_name_hides_a_name_of_the_text(name: str, kind: str) -> None:
    hard, neutral = outcomes(name, **{kind: HARD}), outcomes(name, **{kind: NEUTRAL})
    assert len(hard) == len(neutral) == (len(HARD) if kind == "functions" else 1)
    for x, y in zip(hard, neutral, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0)


def test_every_name_has_an_op_that_uses_it() -> None:
    others = {"stages"}  # of tables outside of functions
    of_arenas = {"arena", "ops_memory", "runtime_arena"}
    assert set(USES) == NAMES - others - of_arenas


def test_reserved_names_are_not_given_out() -> None:
    assert not [name for name in RESERVED if Names().new(name) == name]


def test_a_directory_has_the_program_and_the_runtime(tmp_path: Path) -> None:
    module = parse(program("rt", ["v"], ["input"], ["f"]), "p.ir", verify=True)
    out = tmp_path / "out"
    TorchBackend().emit_directory(default_parser().ctx, module, None, out)
    assert {p.name for p in out.iterdir()} == {"program.py", "plan.json", RUNTIME.name}
    files = {p.relative_to(RUNTIME): p.read_text() for p in RUNTIME.rglob("*.py")}
    copies = {p.relative_to(out / RUNTIME.name): p for p in out.rglob("*/*") if p.is_file()}
    assert {path: p.read_text() for path, p in copies.items()} == files
    names = {module for module in MODULES.values() if not module.startswith("torch")}
    assert names <= {f"{RUNTIME.name}.{'.'.join(path.with_suffix('').parts)}" for path in files}
