"""`-t stablehlo`: programs in both views, run by XLA, with torch's answers and our own layouts; and
read again by our importer."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from op_cases import CASES, Case
from support import xla
from support.extent import long_form
from support.harness import (
    ELEMENTS,
    PIPELINE,
    Problem,
    apply,
    compiled,
    differs,
    elements_of,
    function,
    problem_of,
)
from support.op_laws import OPS
from support.runlines import run_tool
from xdsl.dialects.builtin import ModuleOp
from xdsl.dialects.func import FuncOp

import shardir
from shardir.algebra.layout import replicated
from shardir.algebra.mesh import Mesh
from shardir.api.stablehlo import import_text
from shardir.dialects import dist, nn
from shardir.interpret import run
from shardir.interpret.evaluator import global_type, is_local_function
from shardir.interpret.values import assemble, round_to_element, split
from shardir.pipelines import build
from shardir.syntax.parser import default_parser

EXAMPLES = Path(__file__).parents[2] / "docs/examples"


# ---- each op ----


def exported(case: Case, element: str, forward: bool) -> tuple[Problem, str, ModuleOp, str]:
    """A case, and its text."""
    p = problem_of(case, element)
    module = p.module.clone()
    name = "f" if forward else p.name
    if name == "g":
        apply(module, "distributed-autodiff")
    return p, name, module, shardir.to_stablehlo(module, name)


def test_each_op_equals_torch():
    """One case of each op, all in one program; with gradients and all cases in the long form."""
    cases = list({c.op: c for c in reversed(CASES)}.values())
    assert {c.op for c in cases} == set(OPS)
    check_cases([(c, c.elements[0]) for c in cases], forward=True)


@long_form
def test_all_cases_and_gradients_equal_torch():
    every = [(c, e) for c in CASES for e in c.elements]
    for k in range(0, len(every), 150):
        check_cases(every[k : k + 150], forward=False)


def check_cases(cases: Sequence[tuple[Case, str]], forward: bool) -> None:
    texts, arguments, elements, wanted = [], [], [], []
    for case, element in cases:
        p, name, module, text = exported(case, element, forward)
        own = elements_of(function(module, name).function_type.inputs.data)
        texts.append(text)
        arguments += [
            round_to_element(x, ELEMENTS[e])
            for x, e in zip(p.arguments[: len(own)], own, strict=True)
        ]
        elements += own
        count = len(function(module, name).function_type.outputs)
        results = [*zip(p.wanted, p.elements, strict=True)][:count]
        wanted += [(f"{case} {element}, result {i}", *w) for i, w in enumerate(results)]
    (answer,) = xla.run([xla.Request(xla.merged(texts), arguments, elements)])
    assert not answer.error, answer.error
    wrong = [
        f"{what}: {message}"
        for x, (what, y, e) in zip(answer.results, wanted, strict=True)
        if (message := differs(x, y, e, 1.0))
    ]
    assert not wrong, "\n".join(wrong)


# ---- the local view, on partitions ----


class OfPartitions:
    """A function in the local view, its arguments as the partitions get them, and its text."""

    def __init__(self, module: ModuleOp, name: str, arguments: Sequence[Any]):
        self.f, self.meshes = function(module, name), dist.meshes_of(module)
        self.mesh = next(iter(self.meshes.values()))
        types: Sequence[Any] = self.f.function_type.inputs.data
        whole = [global_type(t, self.meshes) for t in types]
        shards = [
            split(round_to_element(x, w.element_type), self.layout(t), self.mesh, holder=i)
            for i, (x, w, t) in enumerate(zip(arguments, whole, types, strict=True))
        ]
        self.request = xla.Request(
            shardir.to_stablehlo(module, name),
            [[padded(x, t.get_shape()) for x in of] for of, t in zip(shards, types, strict=True)],
            elements_of(whole),
            of_partitions=True,
        )

    def layout(self, t: Any) -> Any:
        return dist.type_layout(t) or replicated(self.mesh.name, len(t.get_shape()))

    def whole(self, results: Sequence[Any]) -> list[Any]:
        """The global results. Raises ShardirError where replicas differ."""
        out = []
        for parts, t in zip(results, self.f.function_type.outputs, strict=True):
            layout, shape = self.layout(t), global_type(t, self.meshes).get_shape()
            slices = (layout.slices(self.mesh, shape, rank) for rank in range(self.mesh.size))
            shards = [
                x[tuple(slice(s.stop - s.start) for s in own)]
                for x, own in zip(parts, slices, strict=True)
            ]
            out.append(assemble(shards, layout, self.mesh, shape))
        return out


def padded(x: Any, shape: Sequence[int]) -> Any:
    """A shard as the block of a partition: with NaN, which would show in elements it is mixed
    into."""
    out = np.full(shape, np.nan if x.dtype.kind == "f" else 7, x.dtype)
    out[tuple(map(slice, x.shape))] = x
    return out


LAID_OUT = [
    ("4x7 [{a}, {b}]", "nn.triu %x diagonal 1", "4x7"),
    ("4x7 [{a}, {b}]", "nn.softmax %x axis 1", "4x7"),
    ("5x8 [{a}, {b}]", "nn.layer_norm %x, %w, %w eps 1.0e-5", "5x8", "8"),
    ("5x1 [{a}, {b}]", "nn.reduce <mean> %x dims <0, 1>", ""),
    ("4x7 [{a}, {b}]", "nn.reduce <max> %x dims <1>", "4"),
    ("4x8 [{a}, {b}]", "nn.slice %x starts <0, 2> limits <4, 6> strides <1, 2>", "4x2"),
    ("5x7 [{}, {b}]", "nn.slice %x starts <0, 2> limits <5, 5> strides <1, 1>", "5x3"),
    ("4x7 [{a}, {b}]", "nn.pad %x low <2, 0> high <2, 8> value 1.5", "8x15"),
    ("5x8 [{a}, {b}]", "nn.roll %x shifts <1, 3>", "5x8"),
    ("5x8 [{a}, {b}]", "nn.cumsum %x axis 1", "5x8"),
    ("4x8 [{a}, {b}]", "nn.argmax %x axis 1", "4"),
    ("4x2x8x4 [{a}, {}, {b}, {}]", "nn.attention %x, %x, %x causal", "4x2x8x4"),
    ("2x5x4 [{a}, {b}, {}]", "nn.attention %x, %w, %w causal", "2x5x4", "2x5x4"),
    ("4x7 [{a}, {b}]", "nn.matmul %x, %w", "4x5", "7x5 [{b}, {}]"),
    ("4x4x7 [{a}, {}, {b}]", "nn.conv %x, %w padding <1, 1>", "4x2x7", "2x4x3"),
    ("4x4x8 [{a}, {}, {b}]", "nn.max_pool %x window <2> stride <2>", "4x4x4"),
]  # fmt: skip
"""Ops whose text depends on where a partition is, or that need collectives, on even and uneven
shards: the operand and its layout, the op, its result, and another operand."""


def laid_out_op(x: str, op: str, out: str, w: str = "2x2") -> ModuleOp:
    shapes, types = [], []
    for text in (x, w, out):
        shape, _, layout = text.partition(" ")
        element = "i64" if "argmax" in op and text is out else "f32"
        shapes.append(f"tensor<{'x'.join(filter(None, [shape, element]))}>")
        types.append(shapes[-1][:-1] + f", #dist.layout<@m, {layout}>>" if layout else shapes[-1])
    of = {"x": types[0], "w": types[1]}
    operands = [of[word.strip("%,")] for word in op.split() if word.startswith("%")]
    return shardir.parse(
        f"dist.mesh @m <a = 2, b = 2>\nfunc.func @f(%x: {types[0]}, %w: {types[1]}) -> {shapes[2]}"
        f" {{\n  %y = {op} : ({', '.join(operands)}) -> {shapes[2]}\n"
        f"  func.return %y : {shapes[2]}\n}}"
    )


def arguments_of(module: ModuleOp, name: str) -> list[Any]:
    draw, meshes = np.random.default_rng(1), dist.meshes_of(module)
    types = [global_type(t, meshes) for t in function(module, name).function_type.inputs]
    return [
        draw.normal(size=t.get_shape())
        if e in ("f32", "f64")
        else draw.integers(0, 2, t.get_shape())
        for t, e in zip(types, elements_of(types), strict=True)
    ]


def collective(op: str, before: str, after: str, shape: str, to: str) -> str:
    one, two = (f"tensor<{s}xf32, #dist.local<@m, {l}>>" for s, l in ((shape, before), (to, after)))
    return (f"func.func @f(%x: {one}) -> {two} {{\n  %y = dist.{op} : ({one}) -> {two}\n"
            f"  func.return %y : {two}\n}}")  # fmt: skip


def uneven(op: str, before: str, shape: str, after: str, to: str, of: str) -> str:
    return collective(op, f"{before}, of {of}", f"{after}, of {of}", shape, to)


COLLECTIVES = [
    uneven("all_gather %x dim 0 over <a>", "[{a}, {b}]", "3x4", "[{}, {b}]", "5x4", "[5, 7]"),
    uneven("all_gather %x dim 0 over <b>", "[{a, b}, {}]", "2x2", "[{a}, {}]", "4x2", "[7, 2]"),
    uneven("reduce_scatter <sum> %x dim 1 over <a, b>", "[{}, {}], partial sum {a, b}", "3x5",
           "[{}, {a, b}]", "3x2", "[3, 5]"),
    uneven("all_to_all %x split 1 concat 0 over <a>", "[{a}, {}]", "3x7", "[{}, {a}]", "5x4",
           "[5, 7]"),
    uneven("all_slice %x dim 1 over <a, b>", "[{}, {}]", "2x5", "[{}, {a, b}]", "2x2", "[2, 5]"),
    uneven("sharded_to_partial %x dim 0 over <a, b>", "[{a, b}, {}]", "2x2",
           "[{}, {}], partial sum {a, b}", "5x2", "[5, 2]"),
    uneven("exchange %x over <a, b>", "[{a, b} sizes [1, 0, 3, 1], {}]", "3x3", "[{b}, {a}]", "3x2",
           "[5, 3]"),
    collective("all_reduce <sum> %x over <b>", "[{a}, {}], partial sum {b}", "[{a}, {}]", "2x8",
               "2x8"),
    collective("all_reduce <max> %x over <a, b>", "[{}, {}], partial max {a, b}", "[{}, {}]", "4x8",
               "4x8"),
    collective("all_gather %x dim 0 over <a>", "[{a}, {b}]", "[{}, {b}]", "2x4", "4x4"),
    collective("reduce_scatter <sum> %x dim 1 over <b>", "[{a}, {}], partial sum {b}", "[{a}, {b}]",
               "2x8", "2x4"),
    collective("all_to_all %x split 1 concat 0 over <a>", "[{a}, {}]", "[{}, {a}]", "2x8", "4x4"),
    collective("all_slice %x dim 1 over <b>", "[{a}, {}]", "[{a}, {b}]", "2x8", "2x4"),
    collective("exchange %x over <a, b>", "[{a, b}, {}]", "[{b}, {a}]", "1x8", "2x4"),
    collective("exchange %x over <a, b>", "[{a, b}, {}]", "[{b, a}, {}]", "1x8", "1x8"),
    collective("replicated_to_partial <sum> %x over <b>", "[{a}, {}]", "[{a}, {}], partial sum {b}",
               "2x8", "2x8"),
    collective("sharded_to_partial %x dim 0 over <a>", "[{a}, {}]", "[{}, {}], partial sum {a}",
               "2x8", "4x8"),
    collective("halo_unfold %x dim 0 step 1 offset -1 over <a>", "[{a}, {}]", "[{a}, {}, {}]",
               "4x2", "4x3x2"),
    collective("halo_fold %x dim 0 step 1 offset -1 over <a>", "[{a}, {}, {}]", "[{a}, {}]",
               "4x3x2", "4x2"),
    collective("halo_fold %x dim 0 step 1 offset -2 over <a>", "[{a}, {}, {}]", "[{a}, {}]",
               "4x1x2", "2x2"),
]  # fmt: skip


LOWERING = ("propagate-strategies", "insert-redistributions", "lower-to-spmd")


def test_partitions_equal_one_device():
    """The local view of ops and of each collective, as SPMD programs of four partitions."""
    programs = []
    for case in LAID_OUT:
        before = laid_out_op(*case)
        programs.append((before, compiled(before.clone(), LOWERING, verify=False)))
    for text in COLLECTIVES:
        module = shardir.parse(f"dist.mesh @m <a = 2, b = 2>\n{text}")
        programs.append((module, module))
    for stem in ("ring_attention", "split_softmax_by_hand", "parameter_server"):
        module = shardir.parse((EXAMPLES / f"{stem}.ir").read_text())
        programs.append((module, module))
    names = [
        next(f for f in m.body.ops if isinstance(f, FuncOp)).sym_name.data for m, _ in programs
    ]
    arguments = [arguments_of(m, name) for (m, _), name in zip(programs, names, strict=True)]
    texts = [
        OfPartitions(m, name, a)
        for (_, m), name, a in zip(programs, names, arguments, strict=True)
    ]  # fmt: skip
    answers = xla.run([t.request for t in texts])
    wrong = []
    for (before, _), name, given, program, answer in zip(
        programs, names, arguments, texts, answers, strict=True
    ):
        try:
            assert not answer.error, answer.error
            for x, y in zip(program.whole(answer.results), run(before, name, given), strict=True):
                np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)
        except (AssertionError, shardir.ShardirError) as error:
            wrong.append(f"{program.request.text}\n{error}")
    assert not wrong, "\n".join(wrong)


# ---- names ----


def test_values_may_have_the_names_of_regions():
    """XLA refuses a name that occurs twice, also in a region."""
    one = "tensor<4xf32>"
    module = shardir.parse(
        f"func.func @f(%lhs: {one}, %_lhs: {one}) -> ({one}, {one}) {{\n"
        "  %both = nn.cumsum %lhs axis 0\n  %before, %i = nn.sort %_lhs axis 0\n"
        "  func.return %both, %before\n}"
    )
    x = np.array([3, 1, 2, 0], np.float32)
    (answer,) = xla.run([xla.Request(shardir.to_stablehlo(module), [x, x])])
    assert not answer.error, answer.error
    np.testing.assert_array_equal(answer.results, [np.cumsum(x), np.sort(x)])


# ---- the global view, by XLA's partitioner ----

BLOCK = (EXAMPLES / "transformer_block.ir").read_text()


def applied(text: str, pipeline: str) -> ModuleOp:
    module = shardir.parse(text)
    for p in build(pipeline):
        p.apply(default_parser().ctx, module)
    return module


def test_xla_partitions_a_step_by_our_layouts():
    """The values, and where each device has what part of each argument and result."""
    module = applied(BLOCK, f"inline-calls,{','.join(PIPELINE[:4])}")
    single = applied(BLOCK, "single-device")
    arguments = arguments_of(single, "step")
    arguments = [np.asarray(x, np.float32) if x.dtype == float else x for x in arguments]
    text = shardir.to_stablehlo(module)
    f, (mesh,) = function(module, "step"), dist.meshes_of(module).values()
    (answer,) = xla.run([xla.Request(text, arguments)])
    assert not answer.error, answer.error
    for x, y in zip(answer.results, run(single, "step", arguments), strict=True):
        assert not differs(x, y, "f32", 1.0)
    for types, places in (
        (f.function_type.inputs, answer.arguments_at),
        (f.function_type.outputs, answer.results_at),
    ):
        assert places == [held(mesh, t) for t in types]
    kept = [a for a in f.arg_attrs or () if "train.input" not in a.data]
    assert len(kept) == text.count("tf.aliasing_output") > 0


def held(mesh: Mesh, t: Any) -> list[list[tuple[int, int]]]:
    """For each rank the range of each dimension that it holds."""
    layout = dist.type_layout(t) or replicated(mesh.name, len(t.get_shape()))
    return [
        [(s.start, s.stop) for s in layout.slices(mesh, t.get_shape(), rank)]
        for rank in range(mesh.size)
    ]


# ---- and back ----


def laid_out_functions() -> list[tuple[str, ModuleOp, str]]:
    """Each function of the examples without a step in the global view, after propagation."""
    found = []
    for path in sorted(EXAMPLES.glob("*.ir")):
        if "train.step" in path.read_text():
            continue
        for text in path.read_text().split("// -----"):
            module = shardir.parse(text)
            names = [f.sym_name.data for f in module.body.ops if isinstance(f, FuncOp)]
            if any(is_local_function(function(module, name)) for name in names):
                continue
            module = applied(text, "inline-calls,propagate-strategies")
            found += [(path.stem, module, name) for name in names]
    return found


def layouts(module: ModuleOp, name: str) -> list[str]:
    signature = function(module, name).function_type
    return [str(dist.type_layout(t)) for t in (*signature.inputs, *signature.outputs)]


def test_examples_come_back():
    """Each example without a step, written and read again, has the values and layouts that it
    had."""
    functions = laid_out_functions()
    assert len({stem for stem, _, _ in functions}) == 9
    for stem, module, name in functions:
        again = import_text(shardir.to_stablehlo(module, name), stem)
        arguments = arguments_of(module, name)
        for x, y in zip(
            run(module, name, arguments), run(again, "main", arguments), strict=True
        ):  # fmt: skip
            np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6, err_msg=f"{stem} @{name}")
        for p in build("propagate-strategies"):
            p.apply(default_parser().ctx, again)
        assert layouts(again, "main") == layouts(module, name), (stem, name)


# ---- what is refused ----

REFUSED = """
dist.mesh @m <a = 2>
func.func @f(%x: tensor<3x4xf32, #dist.layout<@m, [{a}, {}]>>) -> tensor<3x4xf32> {
  %y = "acme.fold"(%x) : (tensor<3x4xf32, #dist.layout<@m, [{a}, {}]>>) -> tensor<3x4xf32>
  %z = "acme.bend"(%y) : (tensor<3x4xf32>) -> tensor<3x4xf32>
  func.return %z : tensor<3x4xf32>
}
"""


def test_all_ops_without_a_counterpart_are_one_error(tmp_path: Path):
    path = tmp_path / "refused.ir"
    path.write_text(REFUSED)
    code, out, errors = run_tool(
        ["shard-opt", str(path), "--allow-unregistered-dialect", "-t", "stablehlo"], b""
    )
    assert code == 1 and not out
    assert f"{path}:4:" in errors and "acme.fold" in errors
    assert f"{path}:5:" in errors and "acme.bend" in errors
    assert errors.count("error:") == 2, errors


def test_definitions_that_fail_are_refused(monkeypatch: pytest.MonkeyPatch):
    def evaluate(*_: object) -> None:
        raise KeyError("a table")

    monkeypatch.setattr(nn.SoftplusOp, "evaluate", evaluate)
    module = applied(REFUSED.replace('"acme.fold"(%x)', "nn.softplus %x").replace(
        '"acme.bend"(%y)', "nn.relu %y"), "strip-layouts")  # fmt: skip
    with pytest.raises(shardir.ShardirError, match=r"got nn\.softplus: KeyError: 'a table'"):
        shardir.to_stablehlo(module)


def test_what_mixes_padding_of_uneven_shards_is_refused():
    """A reduction of which nothing says what its padding must be, and shards that are no parts of
    the other shards: 2, 2, 1, 0 and 3, 2."""
    one, two = (
        f"tensor<{n}x3xf32, #dist.local<@m, [{axes}, {{}}], of [5, 3]>>"
        for n, axes in ((2, "{a, b}"), (3, "{a}"))
    )
    ids = one.replace("f32", "i64")
    out = "tensor<4x3xf32, #dist.local<@m, [{}, {}], partial max {a, b}>>"
    module = shardir.parse(
        "dist.mesh @m <a = 2, b = 2>\n"
        f"func.func @f(%i: {ids}, %x: {one}) -> ({two}, {out}) {{\n"
        f"  %y = dist.all_gather %x dim 0 over <b> : ({one}) -> {two}\n"
        f"  %z = nn.scatter_reduce <max> %i, %x axis 0 : ({ids}, {one}) -> {out}\n"
        f"  func.return %y, %z : {two}, {out}\n}}"
    )
    with pytest.raises(shardir.ShardirError) as error:
        shardir.to_stablehlo(module)
    message = str(error.value)
    assert message.count("expected even shards for partitions") == 2
    assert "dist.all_gather: dimension 0, of which {a, b} splits no shard of" in message
    assert "nn.scatter_reduce: dimension 0 of operand 0, over which it reduces" in message


def test_a_compiled_program_has_both_views():
    program = shardir.compile(BLOCK)
    both = program.stablehlo(), program.stablehlo(view="local")
    assert "sdy.sharding_constraint" in both[0] and "stablehlo.all_reduce" not in both[0]
    assert "stablehlo.all_reduce" in both[1] and "sdy." not in both[1]
    with pytest.raises(shardir.ShardirError, match="expected the view global or local"):
        program.stablehlo(view="both")
    with pytest.raises(shardir.ShardirError, match=r"use program.stablehlo\(\)"):
        shardir.compile(BLOCK, target="stablehlo")


def test_the_target_of_the_tool(tmp_path: Path):
    path = EXAMPLES / "matmul_four_forms.ir"
    code, out, _ = run_tool(
        ["shard-opt", str(path), "-p", "propagate-strategies", "-t", "stablehlo{function=rows}"],
        b"",
    )
    assert code == 0 and out.startswith("module @rows")
    code, _, errors = run_tool(["shard-opt", str(path), "-t", "stablehlo"], b"")
    assert code == 1 and "name one: stablehlo{function=NAME}" in errors
