"""The types of values: what the language has is compiled, all else is an error at its place."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from xdsl.dialects import builtin
from xdsl.dialects.builtin import (
    DYNAMIC_INDEX,
    ComplexType,
    FunctionType,
    IntegerType,
    MemRefType,
    ModuleOp,
    NoneAttr,
    Signedness,
    StringAttr,
    TensorType,
    TupleType,
    UnrankedMemRefType,
    UnrankedTensorType,
    VectorType,
    f32,
    i32,
)
from xdsl.dialects.func import FuncOp, ReturnOp
from xdsl.ir import Attribute, Block, Region, TypeAttribute

import shardir
from shardir.build import Module
from shardir.tools.opt import main

ELEMENTS = ("f64", "f32", "bf16", "f16", "i64", "i32", "i1")
"""The element types of the language."""

OF_PARAMETERS: dict[type, Sequence[Attribute]] = {
    ComplexType: [ComplexType(f32), ComplexType(i32)],
    FunctionType: [FunctionType.from_lists([f32], [])],
    IntegerType: [IntegerType(n, s) for n in (1, 4, 8, 16, 31, 32, 64, 128) for s in Signedness],
    MemRefType: [MemRefType(f32, [4]), MemRefType(f32, [DYNAMIC_INDEX])],
    TensorType: [TensorType(f32, [4])],
    TupleType: [TupleType([f32])],
    UnrankedMemRefType: [UnrankedMemRefType.from_type(f32)],
    UnrankedTensorType: [UnrankedTensorType(f32)],
    VectorType: [VectorType(f32, [4])],
}
TYPES = [
    t
    for kind in builtin.Builtin.attributes
    if issubclass(kind, TypeAttribute)
    for t in OF_PARAMETERS.get(kind) or [kind()]
]
"""All builtin types of xDSL."""

SHAPES = (
    [DYNAMIC_INDEX], [4, DYNAMIC_INDEX], [-1], [4, -4], [1 << 60], [1 << 40, 1 << 20], [0, 1 << 70],
    [(1 << 32) + 1, 4, 8, (1 << 32) + 1],
)  # fmt: skip


def function_of(t: Attribute) -> ModuleOp:
    """Return a module with a function that returns its argument."""
    block = Block(arg_types=[t])
    block.add_op(ReturnOp(block.args[0]))
    return ModuleOp([FuncOp("f", ([t], [t]), Region(block))])


def is_accepted(t: Attribute, path: Path, capfd: pytest.CaptureFixture[str]) -> bool:
    """Whether a function of the type compiles as a ModuleOp, as text, as text for xDSL's parser, in
    an op of others and in one of ours: in all of these ways, or in none."""
    found = set[bool]()
    try:
        shardir.compile(function_of(t))
        found.add(True)
    except shardir.ShardirError as e:
        assert "[T12] expected" in str(e)
        found.add(False)
    generic = f'"func.func"() <{{function_type = ({t}) -> {t}, sym_name = "f"}}> ({{\n'
    texts = {
        f"func.func @f(%x: {t}) -> {t} {{\n  func.return %x : {t}\n}}": (),
        f'{generic}^b(%x: {t}):\n  "func.return"(%x) : ({t}) -> ()\n}}) : () -> ()': ("-f", "xdsl"),
    }
    if not (isinstance(t, TensorType) and is_language(t)):  # no op of these is emitted
        texts |= {
            f'func.func @f() {{\n  %x = "test.op"() : () -> {t}\n  func.return\n}}': (),
            f"func.func @f(%y: tensor<f32>) {{\n  %x = nn.relu %y : (tensor<f32>) -> {t}\n"
            "  func.return\n}": (),
        }  # fmt: skip
    for text, options in texts.items():
        path.write_text(text)
        code = main([str(path), *options, "-p", "train", "-t", "torch", "--traceback"])
        err = capfd.readouterr().err
        assert code in (0, 1), err
        assert code == 0 or ("x.ir" in err and "expected" in err), err
        found.add(code == 0)
    (accepted,) = found
    return accepted


def is_language(t: TensorType) -> bool:
    return str(t.element_type) in ELEMENTS and t.encoding == NoneAttr()


@pytest.mark.parametrize("t", TYPES, ids=str)
def test_each_type_is_compiled_or_an_error(
    t: Attribute, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """As the type of a value, and as the type of the elements of one."""
    assert is_accepted(t, tmp_path / "x.ir", capfd) == isinstance(t, TensorType)
    of = TensorType(t, [4])
    assert is_accepted(of, tmp_path / "x.ir", capfd) == (str(t) in ELEMENTS)
    if isinstance(t, IntegerType) and str(t) not in ELEMENTS:
        with pytest.raises(shardir.ShardirError, match="expected"):
            Module().function("f").input("x", (4,), str(t))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sizes_are_numbers_of_elements_that_are_counted(shape: Sequence[int]) -> None:
    with pytest.raises(shardir.ShardirError, match=r"\[T12\] expected"):
        shardir.compile(function_of(TensorType(f32, shape)))


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1 << 59,), (1 << 40, 1 << 19)], ids=str)
def test_any_number_of_elements_that_is_counted_is_right(shape: Sequence[int]) -> None:
    assert str(list(shape)) in shardir.compile(function_of(TensorType(f32, shape))).program


def test_an_encoding_is_a_layout() -> None:
    """Another one, as of a sparse tensor or a sharding of others, is not dropped."""
    with pytest.raises(shardir.ShardirError, match=r'\[T12\] expected a layout .*got "rows"'):
        shardir.compile(function_of(TensorType(f32, [4], StringAttr("rows"))))
