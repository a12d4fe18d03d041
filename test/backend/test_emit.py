"""The torch emitter: every op, in every layout that its factors allow, against numpy."""

import itertools

import numpy as np
import pytest
import torch
from op_cases import CASES
from support.each import check_each
from support.emitted import MESH, TYPES, functions_of, tensor
from support.extent import LONG, extent, sampled
from support.harness import ELEMENTS, numbers, program
from xdsl.dialects.func import FuncOp
from xdsl.utils.exceptions import VerifyException

from shardir.backend.torch.emit.literals import number_text, round_to
from shardir.backend.torch.emit.program import program_text
from shardir.backend.torch.ops import FAMILIES
from shardir.backend.torch.ops.dist import TORCH_DIST
from shardir.backend.torch.shardir_runtime import runtime as rt
from shardir.dialects import dist, nn, train
from shardir.dialects.nn.base import Composite, TensorOp
from shardir.dialects.nn.types import unsharded_type
from shardir.interpret.evaluator import run
from shardir.interpret.values import round_to_element
from shardir.syntax.parser import parse
from shardir.testing.emission import (
    DIAGONALS,
    array_of,
    local_module,
    op_errors,
    placement_errors,
    placements,
)

torch.set_num_threads(1)

RUNS = [(c, c.elements[i % len(c.elements)]) for i, c in enumerate(CASES)]
"""Each case with one of its element types, which alternate."""
EACH = extent(1, 4)
SPLIT = [run for op in dict.fromkeys(c.op for c in CASES)
         for mine in [[r for r in RUNS if r[0].op is op]]
         for run in mine[:: -(-len(mine) // EACH)]]  # fmt: skip
"""Up to EACH cases of each op."""


def module_of(line):
    """Return a function of an op alone: `@f(%0, %1) -> its results`."""
    _, _, types = line.rpartition(" : ")
    if "nn.constant" in line or "nn.iota" in line:
        ins, outs, n = "", line.rpartition("-> ")[2], 1
    else:
        ins, outs = types.split(" -> ")
        n = outs.count("tensor<")
    given = [t.strip() for t in ins.strip("()").split(",")] if ins else []
    # argument names are %0 and %1 in the lines: as names they have letters
    for i in range(len(given)):
        line = line.replace(f"%{i}", f"%a{i}")
    args = ", ".join(f"%a{i}: {t}" for i, t in enumerate(given))
    results = ", ".join(f"%r{i}" for i in range(n))
    text = f"""func.func @f({args}) -> ({outs.strip("()")}) {{
      {results} = {line}
      func.return {results} : {outs.strip("()")}
    }}"""
    return parse(text, "case.ir", verify=True), len(given)


def sample(case, element):
    """Return the function of an op alone, and arguments."""
    args = case.args(element)
    kinds = [*case.kinds, *["normal"] * len(args)]
    rng = np.random.default_rng(len(str(case)))
    given = [numbers(rng, a.element, a.shape, k) for a, k in zip(args, kinds, strict=False)]
    return program(args, case.body(element)), given


def the_op(module):
    (f,) = [f for f in module.body.ops if isinstance(f, FuncOp)]
    op = f.body.block.first_op
    assert isinstance(op, TensorOp)
    return op


def test_op_equals_numpy():
    check_each(lambda run_of: check_op(*run_of), sampled(RUNS, 120))


def check_op(case, element):
    module, given = sample(case, element)
    message = op_errors(module, given)
    assert not message, message


@pytest.mark.filterwarnings("error")  # nor does an empty shard make torch say anything
@pytest.mark.parametrize("case, element", sampled(SPLIT, 50), ids=str)
def test_op_in_every_layout(case, element):
    module, given = sample(case, element)
    op = the_op(module)
    placements_of_op = placements(op, names_matter=LONG)
    if isinstance(op, Composite):
        with pytest.raises(VerifyException, match="expected ops of the local view"):
            local_module(op, next(placements_of_op))
        return
    want = run(module, "f", given)
    for i, placement in enumerate(placements_of_op):
        alone = extent(DIAGONALS[i % 2], range(MESH.size))
        message = placement_errors(op, placement, given, want, alone)
        assert not message, f"{[*map(str, placement.operands)]}: {message}"


MEAN = "nn.reduce <{}> %0 dims <{}> : (tensor<{}x{}>) -> tensor<{}{}>"
KINDS = {"mean": lambda x, d: x.mean(d), "sum": lambda x, d: x.sum(d),
         "max": lambda x, d: x.max(d), "min": lambda x, d: x.min(d)}  # fmt: skip
HALVES = {"f16": (2.0**-11, 60000.0), "bf16": (2.0**-8, 1e36)}
"""The rounding of a type, and values near to its largest ones."""


@pytest.mark.parametrize(("kind", "element"), [*itertools.product(KINDS, HALVES)])
def test_reductions_in_half_precision_are_rounded_once(kind: str, element: str) -> None:
    """In every split, even and uneven: what each rank has is that of f64, times its part of a mean,
    rounded to the type. A mean of large values is finite where their sum is not."""
    rounding, large = HALVES[element]
    for shape, dims in itertools.product(((7, 6), (8, 5), (1, 9)), ((0,), (1,), (0, 1))):
        rest = "".join(f"{n}x" for d, n in enumerate(shape) if d not in dims)
        text = MEAN.format(
            kind, ", ".join(map(str, dims)), "x".join(map(str, shape)), element, rest, element
        )
        module, _ = module_of(text)
        op, count = the_op(module), np.prod([shape[d] for d in dims])
        given = np.random.default_rng(0).uniform(0.5, 1.0, shape) * (large if kind != "sum" else 1)
        x = array_of(tensor(given, element), element)
        for placement in placements(op):
            emitted = functions_of(program_text(local_module(op, placement)[0]))
            for rank in range(MESH.size):
                mine = x[placement.operands[0].slices(MESH, shape, rank)]
                if not mine.size:
                    continue
                got = emitted["f"](rt.Mesh(MESH.axes, rank), tensor(mine, element))
                assert got.dtype == TYPES[element]
                exact = mine.astype(np.float64)
                wanted = KINDS["sum"](exact, dims) / count if kind == "mean" else (
                    KINDS[kind](exact, dims)
                )  # fmt: skip
                off = np.abs(array_of(got, element).astype(np.float64) / wanted - 1)
                assert (off <= rounding * (1 + 1e-3)).all(), f"{text}, {placement}, rank {rank}"


@pytest.mark.parametrize("element", ["f32", "f16", "bf16"])
def test_literals_are_rounded_as_by_torch(element: str) -> None:
    """To nearest, and halfway between two numbers to the even one: numbers that have one more bit
    than the type, and those beside them; in the program and in the interpreter."""
    bits = {"f32": 23, "f16": 10, "bf16": 7}[element]
    rng = np.random.default_rng(0)
    ties = 1 + (2 * rng.integers(0, 1 << bits, 100) + 1) * 2.0 ** -(bits + 1)
    ties = np.concatenate([ties, [1 + 2.0**-bits - 2.0 ** -(bits + 1), 2 - 2.0 ** -(bits + 1)]])
    near = np.concatenate([ties, ties * (1 + 2.0**-20), ties * (1 - 2.0**-20)])
    given = np.concatenate([near, -near, near * 2.0**-13, near * 2.0**12])
    wanted = torch.tensor(given).to(TYPES[element]).double().tolist()
    assert [round_to(x, element) for x in given.tolist()] == wanted
    assert [float(number_text(x, element)) for x in given.tolist()] == pytest.approx(
        wanted, rel=1e-7, abs=0
    )
    assert round_to_element(given, ELEMENTS[element]).tolist() == wanted


def test_every_op_has_its_text():
    """It is in the file of its family's name; a composite has none, since its parts have theirs."""
    for family, ops in nn.FAMILIES.items():
        plain_ops = {op for op in ops if not issubclass(op, Composite)}
        assert plain_ops == set(FAMILIES.get(family, {})), family
    updates = [*train.UPDATES, *train.SCALARS]
    assert {*train.UPDATES} == set(FAMILIES["updates"])
    assert {*train.SCALARS, *train.MARKS, *train.LOOP} == set(FAMILIES["train"])
    assert set(FAMILIES) <= {*nn.FAMILIES, "train", "updates"}
    sends = dist.SendOp, dist.RecvOp, dist.WaitOp
    assert {*dist.OPS.values(), *sends, *dist.RING_PRODUCTS} == set(TORCH_DIST)
    assert {*nn.Nn.operations, *updates} - {nn.YieldOp} == {case.op for case in CASES}


def test_an_index_out_of_range_is_an_error():
    lines = [
        "nn.gather %0, %1 axis 0 : (tensor<7x4xf32>, tensor<3xi32>) -> tensor<3x4xf32>",
        "nn.gather %0, %1 axis 1 : (tensor<4x7xf32>, tensor<3xi32>) -> tensor<4x3xf32>",
        "nn.pick %0, %1 : (tensor<3x7xf32>, tensor<3xi32>) -> tensor<3xf32>",
        "nn.cross_entropy %0, %1 : (tensor<3x7xf32>, tensor<3xi32>) -> tensor<3xf32>",
    ]
    for line, bad in itertools.product(lines, (-1, 7, -100)):
        module, _ = module_of(line)
        op = the_op(module)
        for placement in placements(op):
            local, _ = local_module(op, placement)
            program = functions_of(program_text(local))
            x = np.zeros(unsharded_type(op.operands[0]).get_shape(), np.float32)
            ids = np.full(3, bad)
            raised = 0
            for rank in range(4):
                mine = [
                    tensor(v[l.slices(MESH, v.shape, rank)], e)
                    for v, l, e in zip((x, ids), placement.operands, ("f32", "i32"), strict=True)
                ]
                try:
                    program["f"](rt.Mesh(MESH.axes, rank), *mine)
                except (IndexError, RuntimeError) as error:
                    raised += "out of" in str(error)
            holders = sum(
                len(ids[placement.operands[1].slices(MESH, (3,), r)]) > 0 for r in range(4)
            )
            assert raised == holders


def test_constants_of_equal_elements_keep_their_type():
    """Python makes equal tuples of one file the same object."""
    text = "nn.constant dense<[1.0, 2.0]> : tensor<2xf32> -> tensor<2xf32>"
    other = text.replace("f32", "f64")
    lines = f"%a = {text}\n%b = {other}\nfunc.return %a, %b : tensor<2xf32>, tensor<2xf64>"
    module = parse(f"func.func @f() -> (tensor<2xf32>, tensor<2xf64>) {{\n{lines}\n}}")
    a, b = functions_of(program_text(module))["f"](rt.Mesh(()))
    assert (a.dtype, b.dtype) == (torch.float32, torch.float64)


@pytest.mark.parametrize("line", [
    "nn.leaky_relu %0 slope INF : (tensor<3xf32>) -> tensor<3xf32>",
    "nn.elu %0 alpha INF : (tensor<3xf32>) -> tensor<3xf32>",
    "nn.hardtanh %0 min 0.0 max INF : (tensor<3xf32>) -> tensor<3xf32>",
    "nn.clamp %0 max INF : (tensor<3xf32>) -> tensor<3xf32>",
    "nn.pad %0 low <1> high <1> value INF : (tensor<3xf32>) -> tensor<5xf32>",
    "nn.sinusoid <interleaved> %0 base INF : (tensor<3xi32>) -> tensor<3x4xf32>",
])  # fmt: skip
def test_infinite_properties_are_emitted(line):
    """Python has no literal of an infinity."""
    module, _ = module_of(line.replace("INF", "1.0e400"))
    (want,) = run(module, "f", [x := np.array([-1.0, 1.0, 2.0])])
    given = tensor(x, str(unsharded_type(the_op(module).operands[0]).element_type))
    got = functions_of(program_text(module))["f"](rt.Mesh(()), given)
    np.testing.assert_allclose(got.numpy(), want, rtol=1e-6)
