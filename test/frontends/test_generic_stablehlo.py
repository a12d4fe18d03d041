"""The reader of MLIR's generic form against jaxlib's: equal programs, and one message for each
wrong text, at its line and column."""

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.extent import sampled
from support.jax_programs import PROGRAMS
from support.runlines import run_tool

import shardir
from shardir.api import stablehlo
from shardir.diagnostics import ParseErrors, ShardirError
from shardir.dialects.locations import file_location
from shardir.frontends import stablehlo as frontend
from shardir.frontends.stablehlo import bindings, generic
from shardir.frontends.stablehlo.form import HloBlock, HloProgram, HloValue


def generic_text(f: Any, *args: Any, **options: Any) -> str:
    lowered = jax.jit(f, keep_unused=True, **options).lower(*args)
    module: Any = lowered.compiler_ir("stablehlo")
    return module.operation.get_asm(print_generic_op_form=True, enable_debug_info=True)


class Differences:
    """Finds the differences of two programs."""

    def __init__(self) -> None:
        self.values: dict[HloValue, HloValue] = {}

    def of_programs(self, x: HloProgram, y: HloProgram) -> Iterator[str]:
        yield from self.of_attributes("module", x.attributes, y.attributes)
        yield from self.of_attributes("meshes", x.meshes, y.meshes)
        if len(x.others) != len(y.others) or x.functions.keys() != y.functions.keys():
            yield "the ops of the module"
            return
        for name, f in x.functions.items():
            g = y.functions[name]
            for a, b in ((f.arguments, g.arguments), (f.results, g.results)):
                yield from self.of_attributes(name, dict(enumerate(a)), dict(enumerate(b)))
            yield from self.of_blocks(f.block, g.block)

    def of_blocks(self, x: HloBlock, y: HloBlock) -> Iterator[str]:
        yield from self.of_values("argument", x.arguments, y.arguments)
        if [op.name for op in x.ops] != [op.name for op in y.ops]:
            yield f"{[op.name for op in x.ops]} != {[op.name for op in y.ops]}"
            return
        for a, b in zip(x.ops, y.ops, strict=True):
            if [self.values.get(v) for v in a.operands] != [*b.operands]:
                yield f"operands of {a.name}"
            yield from self.of_values(a.name, a.results, b.results)
            yield from self.of_attributes(a.name, a.attributes, b.attributes)
            if a.location != b.location:
                yield f"{a.name}: {a.location} != {b.location}"
            if len(a.regions) != len(b.regions):
                yield f"regions of {a.name}"
            for r, s in zip(a.regions, b.regions, strict=False):
                yield from self.of_blocks(r, s)

    def of_values(self, what: str, xs: Sequence[HloValue], ys: Sequence[HloValue]) -> Iterator[str]:
        if [(v.type, v.name) for v in xs] != [(v.type, v.name) for v in ys]:
            yield f"values of {what}"
        self.values |= dict(zip(xs, ys, strict=False))

    def of_attributes(self, what: str, x: Mapping[Any, Any], y: Mapping[Any, Any]) -> Iterator[str]:
        if x.keys() != y.keys():
            yield f"attributes of {what}: {[*x]} != {[*y]}"
        for name in x.keys() & y.keys():
            a, b = x[name], y[name]
            if isinstance(a, np.ndarray):
                same = isinstance(b, np.ndarray) and a.shape == b.shape and a.dtype == b.dtype
                same = same and a.tobytes() == b.tobytes()
            else:
                same = type(a) is type(b) and a == b
            if not same:
                yield f"{what}: {name} = {a!r} != {b!r}"


def assert_equal_readers(text: str) -> None:
    """Both readers make equal programs of a text: values, attributes and locations."""
    found = generic.read_text(text), bindings.read_text(text)
    assert [*Differences().of_programs(*found)] == []


@pytest.mark.parametrize("name", sampled(PROGRAMS, 3, also=("indices", "resnet")))
def test_readers_agree_on_programs_of_jax(name: str) -> None:
    with jax.enable_x64(True):
        f, args, _ = PROGRAMS[name]()
        assert_equal_readers(generic_text(f, *args))


def test_dimensions_of_a_convolution_in_any_order() -> None:
    def f(x: Any, w: Any) -> Any:
        order = ("NWHC", "HWIO", "HCNW")
        return jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=order)

    text = generic_text(f, jnp.ones((2, 5, 6, 3)), jnp.ones((3, 3, 3, 4)))
    assert "conv<[b, 1, 0, f]" in text or "conv<[b, 0, 1, f]x[1, 0, i, o]" in text
    assert_equal_readers(text)


SHARDED = """
#here = loc("model.py":7:3 to :9)
"builtin.module"() ({
  "sdy.mesh"() <{mesh = #sdy.mesh<["dp"=2, "tp"=4]>, sym_name = "mesh"}> : () -> ()
  "func.func"() <{arg_attrs = [{sdy.sharding = #sdy.sharding<@mesh, [{"dp"}, {?}]>}, {}],
      function_type = (tensor<8x16xf32>, tensor<16x32xf32>) -> tensor<8x32xf32>,
      res_attrs = [{jax.result_info = "y"}], sym_name = "main"}> ({
  ^bb0(%x: tensor<8x16xf32> loc("p['x']"), %w: tensor<16x32xf32> loc("p['w\\22']"(#here))):
    %0 = "stablehlo.dot_general"(%x, %w) <{dot_dimension_numbers =
        #stablehlo.dot<lhs_contracting_dimensions = [1], rhs_contracting_dimensions = [0]>}>
        : (tensor<8x16xf32>, tensor<16x32xf32>) -> tensor<8x32xf32>
        loc(fused<"m">[callsite("f"(unknown) at "g"(#here)), unknown])
    %1 = "sdy.sharding_constraint"(%0) <{sharding = #sdy.sharding<@mesh, [{"dp"}, {}]>}>
        : (tensor<8x32xf32>) -> tensor<8x32xf32> loc(#named)
    "func.return"(%1) : (tensor<8x32xf32>) -> () loc(unknown)
  }) : () -> ()
}) : () -> ()
#named = loc("h"(#here))
"""


def test_shardings_names_and_locations() -> None:
    assert_equal_readers(SHARDED)
    program = generic.read_text(SHARDED)
    f = program.functions["main"]
    assert program.meshes == {"mesh": '#sdy.mesh<["dp"=2, "tp"=4]>'}
    assert [a.name for a in f.block.arguments] == ["p['x']", "p['w\"']"]
    assert f.results == [{"jax.result_info": "y"}]
    lines = [op.location and file_location(op.location) for op in f.block.ops]
    assert lines == [("model.py", 7, 1), ("model.py", 7, 1), None]


I4, BF16, F8 = map(jnp.dtype, (jnp.int4, jnp.bfloat16, jnp.float8_e4m3fn))
NUMBERS = {
    "i1": np.array([True, False, True]), "i1 of many": np.arange(203).reshape(29, 7) % 3 == 0,
    "i1 splat": np.ones(300, bool), "i8": np.arange(-100, 100, dtype=np.int8),
    "i4": np.array([1, -2]).astype(I4), "ui8": np.array([0, 255], np.uint8),
    "ui64": np.array([2**64 - 1, 0], np.uint64), "i64": np.array([-(2**63), 5]),
    "f32": np.array([np.nan, np.inf, -np.inf, -0.0, 1e-45], np.float32),
    "f32 of many": np.linspace(-3, 3, 300, dtype=np.float32), "f64": np.linspace(0, 1, 7),
    "f16": np.linspace(0, 1, 200, dtype=np.float16), "empty": np.zeros((0, 4), np.float32),
    "bf16": np.linspace(-2, 2, 5).astype(BF16),
    "bf16 of many": np.linspace(-2, 2, 200).astype(BF16),
    "f8": np.array([1.5, -2.5]).astype(F8), "nested": np.arange(12).reshape(2, 3, 2),
}  # fmt: skip


def test_constants_of_all_element_types() -> None:
    """As jaxlib prints them: lists, splats, hexadecimal strings."""
    with jax.enable_x64(True):
        text = generic_text(lambda: [jnp.asarray(x) for x in NUMBERS.values()])
    for reader in (generic, bindings):
        ops = reader.read_text(text).functions["main"].block.ops
        constants = [op.attributes["value"] for op in ops if op.name == "stablehlo.constant"]
        for (kind, x), y in zip(NUMBERS.items(), constants, strict=True):
            assert y.shape == x.shape, kind
            exact = "float" not in str(x.dtype) and x.dtype != bool
            wide = [v.astype(object if exact else np.float64) for v in (x, y)]
            np.testing.assert_array_equal(*wide, err_msg=kind)
            if not exact and x.dtype != bool:
                np.testing.assert_array_equal(*map(np.signbit, wide), err_msg=kind)


BODY = """"builtin.module"() ({{
  "func.func"() <{{function_type = (tensor<8x4xf32>) -> tensor<8x4xf32>, sym_name = "main"}}> ({{
  ^bb0(%x: tensor<8x4xf32>):
    {}
    "func.return"(%y) : (tensor<8x4xf32>) -> ()
  }}) : () -> ()
}}) : () -> ()
"""
TYPE = "(tensor<8x4xf32>) -> tensor<8x4xf32>"
OF_TWO = "(tensor<8x4xf32>, tensor<8x4xf32>) -> tensor<8x4xf32>"
DOT = '%y = "stablehlo.dot_general"(%x, %x) {{d = #stablehlo.dot<{}>}} : ' + OF_TWO
CONV = '%y = "stablehlo.convolution"(%x, %x) {{d = #stablehlo.conv<{}>}} : ' + OF_TWO
WRONG = {
    f'%y = "stablehlo.abs"(%z) : {TYPE}': "4:26: error: expected a defined value, got %z",
    f'%y = "stablehlo.abs"(%y) : {TYPE}': "4:10: error: expected a definition of %y before its use",
    f'%y = "stablehlo.abs"(%x) {{a = #stablehlo<precision}} : {TYPE}':
        "4:35: error: expected an attribute",
    f'%y = "stablehlo.abs"(%x) {{a = dense<[1, 2]> : tensor<3xi64>}} : {TYPE}':
        "4:47: error: Shape mismatch",
    f'%y = "stablehlo.abs"(%x) {{a = "\\q"}} : {TYPE}': "4:36: error: expected an escape",
    f'%y = "stablehlo.abs"(%x) : {TYPE} loc(#no)': "error: expected a defined alias, got #no",
    f'%y = "stablehlo.abs"(%x : {TYPE}': "4:29: error: expected",
    '%y = "stablehlo.abs"(%x) : (tensor<8xf32>) -> tensor<8x4xf32>':
        "4:26: error: expected %x of type tensor<8x4xf32>, got tensor<8xf32>",
    f'%y = "func.call"(%x) {{callee = @g}} : {TYPE}': "4:10: error: expected a function @g, got",
    DOT.format("lhs_contracting_dims = [1]"):
        "4:10: error: attribute d: expected a field of #stablehlo.dot, got "
        "lhs_contracting_dims; did you mean lhs_contracting_dimensions",
    DOT.format("lhs_contracting_dimensions = 1"): "expected numbers of lhs_contracting_dimensions",
    CONV.format("[b, 0, f]x[0, i, o]"): "4:10: error: attribute d: expected dimensions as in",
    CONV.format("[b, 1, f]x[0, i, o]->[b, 0, f]"): "4:10: error: attribute d: expected b, f and 0",
    f'%y = "stablehlo.case"(%x) ({{ %z = "stablehlo.abs"(%x) : {TYPE} }}) : {TYPE}':
        "error: expected a return at the end of a region, got stablehlo.abs",
    f'%y = "stablehlo.case"(%x) ({{ "cf.br"()[^b] : () -> ()\n^b: "stablehlo.return"() : () -> () '
    f'}}) : {TYPE}': "4:10: error: expected one block in a region, got 2",
    f'%y = "stablehlo.abs"(%x) : {TYPE}\n"func.return"() : () -> ()': "error: ",
    "%y = stablehlo.abs %x : tensor<8x4xf32>": "4:10: error: expected ops in MLIR's generic form, "
        "got stablehlo.abs; print it by mlir-opt --mlir-print-op-generic",
}  # fmt: skip


@pytest.mark.parametrize("statement", WRONG)
def test_wrong_texts(statement: str) -> None:
    with pytest.raises(ParseErrors) as raised:
        generic.read_text(BODY.format(statement), "x.mlir")
    message = str(raised.value)
    assert message.startswith("x.mlir:") and message.count("error:") == 1
    assert WRONG[statement] in message


@pytest.mark.parametrize("reader", [generic, bindings])
def test_encodings_of_types_are_refused(reader: Any) -> None:
    """Nothing says what an encoding means; `"row"` is one that jaxlib takes too."""
    statement = f"""%z = "stablehlo.abs"(%x) : {TYPE[:-1]}, "row">
    %y = "stablehlo.abs"(%z) : (tensor<8x4xf32, "row">) -> tensor<8x4xf32>"""
    program = reader.read_text(BODY.format(statement))
    with pytest.raises(ShardirError, match=r'abs.*: tensor<8x4xf32, "row"> has an encoding'):
        stablehlo.import_program(program)


@pytest.fixture
def without_jaxlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, bindings.__name__, None)
    monkeypatch.delattr(frontend, "bindings")


UNVERIFIED = {
    '%y = "stablehlo.reduce"(%x, %x) : (tensor<8x4xf32>, tensor<8x4xf32>) -> tensor<8x4xf32>',
    f'%y = "stablehlo.transpose"(%x) {{permutation = array<i64: 1, 0>}} : {TYPE}',
    f'%y = "stablehlo.slice"(%x) {{start_indices = array<i64: 9, 9>}} : {TYPE}',
}


@pytest.mark.parametrize("statement", sorted(UNVERIFIED))
@pytest.mark.usefixtures("without_jaxlib")
def test_ops_that_do_not_fit_their_definition(statement: str) -> None:
    """Nobody has verified a generic text: the importer names the op and its line."""
    name = statement.split('"')[1]
    with pytest.raises(ShardirError, match=rf"{name} at <stablehlo>:4: it is not as StableHLO def"):
        shardir.from_stablehlo(BODY.format(statement), mesh="d = 2")


@pytest.mark.usefixtures("without_jaxlib")
def test_text_is_imported_without_jaxlib(tmp_path: Path) -> None:
    """Generic text needs no package; another form says which one, and how to do without it."""
    path = tmp_path / "x.mlir"
    path.write_text(SHARDED)
    code, out, _ = run_tool(["shard-opt", str(path)], b"")
    assert code == 0
    assert "func.func @main(%p.x: tensor<8x16xf32, #dist.sharding<@mesh, [{dp}, {?}]>>" in out
    path.write_text(
        "func.func @main(%x: tensor<f32>) -> tensor<f32> {\n"
        "  %y = stablehlo.abs %x : tensor<f32>\n  return %y : tensor<f32>\n}"
    )
    code, _, err = run_tool(["shard-opt", str(path)], b"")
    assert code == 1
    assert f"{path}:2:8: error: expected ops in MLIR's generic form, got stablehlo.abs" in err
    with pytest.raises(ShardirError, match=r"expected text, got .*; pip install 'shardir\[jax\]'"):
        shardir.from_stablehlo(3)


def test_errors_of_jaxlib_have_their_places() -> None:
    """Jaxlib, where it is installed, checks each op against its definition."""
    statement = sorted(UNVERIFIED)[-1]
    with pytest.raises(ParseErrors, match="expected a module of StableHLO, got: ") as raised:
        stablehlo.read(BODY.format(statement), "x.mlir")
    assert str(raised.value).startswith("x.mlir:4:10: error: ")
    assert str(raised.value).count("error:") == 1
    unknown = BODY.format(f'%y = "stablehlo.custom_call"(%x) {{call_target_name = "a"}} : {TYPE}')
    with pytest.raises(ShardirError, match=r"stablehlo\.custom_call @a at <stablehlo>:4: "):
        shardir.from_stablehlo(unknown, mesh="d = 2")
