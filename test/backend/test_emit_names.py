"""No text of the input becomes code of an emitted program."""
# ruff: noqa: E501 (texts of programs)

import ast
from pathlib import Path

import pytest
import torch
from support.emitted import STEP, functions_of
from support.extent import sampled
from xdsl.dialects.builtin import ArrayAttr, DictionaryAttr, StringAttr, TensorType
from xdsl.dialects.func import FuncOp

import shardir
from shardir.algebra.layout import Layout, LocalLayout
from shardir.algebra.mesh import Axis
from shardir.analysis.functions import values
from shardir.backend.torch.backend import TorchBackend
from shardir.backend.torch.emit.imports import MODULES
from shardir.backend.torch.emit.names import Names, comment_lines, docstring, literal, return_lines
from shardir.backend.torch.emit.program import program_text
from shardir.backend.torch.shardir_runtime import runtime as rt
from shardir.backend.torch.shardir_runtime.plan.program import load_plan
from shardir.compat.xdsl import set_type
from shardir.dialects import dist, train
from shardir.dialects.nn.types import unsharded_type
from shardir.rewriting.functions import update_signature
from shardir.syntax.parser import default_parser, parse

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"

EVIL = [
    "\"); import os; os.system('x')  #",
    "a\nimport os\nos.abort()",
    "'''\"\"\"\\",
    "x\u2028import os\u2029import sys\x0c\x85\r\nimport os",
    "{x}{0}%s",
    "lambda",
    "ünïcode_名前",
    "__import__",
    "",
    " ",
    "1",
]


def quoted(text):
    """Return a string in the notation of MLIR."""
    out = "".join(c if (c.isalnum() and c.isascii()) or c in " _;()#.'{}%" else
                  "".join(f"\\{b:02X}" for b in c.encode()) for c in text)  # fmt: skip
    return f'"{out}"'


def evil_module(word, other):
    """Names from the input wherever they can stand: file, function, mesh, axis, parameter,
    state, strings of attributes."""
    module = parse(STEP, word or "<none>", verify=True)
    (f,) = [f for f in module.body.ops if isinstance(f, FuncOp)]
    text = StringAttr(word)
    f.properties["sym_name"] = text
    attrs = train.arg_attrs(f)
    attrs[1]["train.parameter"] = StringAttr(other)
    train.set_arg_attrs(f, attrs)
    f.properties["res_attrs"] = ArrayAttr(
        [DictionaryAttr({}), DictionaryAttr({"train.updates": StringAttr(other)})]
    )
    (mesh,) = [m for m in module.body.ops if isinstance(m, dist.MeshOp)]
    mesh.properties["sym_name"] = text
    mesh.properties["axes"] = dist.MeshAttr(((other or "empty", 2),))

    def renamed(layout):
        def axes(given):
            return tuple(Axis(other or "empty", a.pre, a.size) for a in given)

        return Layout(word, tuple(map(axes, layout.dims)), axes(layout.partial), layout.reduction)

    for v in values(f.body.block):
        layout = dist.LocalAttr(LocalLayout(renamed(dist.layout_of(v))))
        set_type(
            v, TensorType(unsharded_type(v).element_type, unsharded_type(v).get_shape(), layout)
        )
    for op in f.body.block.ops:
        if isinstance(op, dist.CollectiveOp):
            op.properties["axes"] = dist.AxesAttr((Axis(other or "empty"),))
    update_signature(f)
    return module


@pytest.mark.parametrize("word", EVIL)
def test_names_do_not_break_out(word, tmp_path):
    for other in sampled(EVIL, 3):
        module = evil_module(word, other)
        text = program_text(module)
        assert_tame(text)
        program_text(module, rank=1)
        program = functions_of(text)
        name = next(n.name for n in ast.parse(text).body if isinstance(n, ast.FunctionDef))
        mesh = rt.Mesh([(other or "empty", 1)])  # one rank: no process group
        loss, w = program[name](mesh, torch.ones(4, 3), torch.ones(3, 3))
        assert loss.item() == 36.0 and w.shape == (3, 3)
    module = evil_module(word, EVIL[-1])
    TorchBackend().emit_directory(default_parser().ctx, module, None, tmp_path / "d")
    plan = load_plan(tmp_path / "d")
    assert plan.mesh_name == word and [f.name for f in plan.functions] == [word]
    assert plan.functions[0].args[1].key == EVIL[-1]


def assert_tame(text):
    """Assert that a program is only a docstring, imports, functions of simple statements, and main."""
    tree = ast.parse(text)
    assert isinstance(tree.body[0], ast.Expr) and isinstance(tree.body[0].value, ast.Constant)
    for node in tree.body[1:]:
        match node:
            case ast.Import(names=[ast.alias(name=name)]):
                assert name in {"torch", "torch.nn.functional"}
            case ast.ImportFrom(module=package, names=[ast.alias(name=name)]):
                assert f"{package}.{name}" in MODULES.values()
            case ast.FunctionDef(body=body):
                for line in body:
                    assert isinstance(line, ast.Assign | ast.Expr | ast.Delete | ast.Return)
            case ast.Assign(targets=[ast.Name(id=name)]):
                assert name == "aten" or name.startswith("NUMBERS_")
            case ast.If(test=ast.Compare(left=ast.Name(id="__name__"))):
                assert len(node.body) == 1
            case _:
                raise AssertionError(ast.unparse(node))
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            assert node.id not in ("os", "sys", "exec", "eval", "open", "__import__")


@pytest.mark.parametrize("word", EVIL)
def test_text_of_strings(word):
    assert ast.literal_eval(literal(word)) == word
    for line in comment_lines(word + " end", 4):
        assert len(line.splitlines()) == 1 and line.startswith("    #")
    tree = ast.parse(docstring(word, word))
    assert len(tree.body) == 1
    names = Names()
    made = [names.new(word) for _ in range(3)]
    assert len(set(made)) == 3 and all(n.isidentifier() and n.isascii() for n in made)


@pytest.mark.parametrize("width", [1, 80])
@pytest.mark.parametrize("items", [[], ["x"], ["*x"], ["*x", "y"], ["x", "*y"]])
def test_what_is_returned_is_python(items: list[str], width: int) -> None:
    """Also where all values are in one text, as those of an update of equal layers."""
    named = [item.replace("x", "x" * width).replace("y", "y" * width) for item in items]
    names = ", ".join(item.lstrip("*") for item in named)
    ast.parse("\n".join([f"def f({names}):", *return_lines(named)]))


def test_names_from_quoted_text():
    """The same through the parser, where it accepts such names."""
    word = quoted('"); import os  #\n')
    text = f"""func.func @{word}(%x: tensor<2xf32> {{train.parameter = {word}, train.init = #train.init<normal>}}) -> tensor<2xf32> {{
      %torch = nn.neg %x : (tensor<2xf32>) -> tensor<2xf32>
      %class = nn.neg %torch : (tensor<2xf32>) -> tensor<2xf32>
      %rt = nn.neg %class : (tensor<2xf32>) -> tensor<2xf32>
      func.return %rt : tensor<2xf32>
    }}"""  # fmt: skip
    program = program_text(parse(text, "e.ir", verify=True))
    assert_tame(program)
    out = functions_of(program)["import_os"](rt.Mesh(()), torch.ones(2))
    assert out.tolist() == [-1.0, -1.0]


class Numbered(ast.NodeTransformer):
    """Variables by numbers, in their order."""

    def __init__(self):
        self.names = {}

    def number(self, name):
        return self.names.setdefault(name, f"v{len(self.names)}")

    def visit_Name(self, node):
        return ast.Name(self.number(node.id), node.ctx)

    def visit_arg(self, node):
        return ast.arg(self.number(node.arg))


@pytest.mark.parametrize("example", ["lamb.ir", "presets.ir"])
def test_long_names_change_no_more_than_names(example):
    """Lines are broken, but a name alone in brackets is no tuple."""
    module = shardir.compile_file(EXAMPLES / example, "train").module
    functions = [f for f in module.body.ops if isinstance(f, FuncOp)]
    programs = []
    for end in ("", "_" + "n" * 100):
        for v in (v for f in functions for v in values(f.body.block)):
            v.name_hint = f"{v.name_hint or 'value'}{end}"
        programs.append(ast.dump(Numbered().visit(ast.parse(program_text(module)))))
    assert programs[0] == programs[1]
