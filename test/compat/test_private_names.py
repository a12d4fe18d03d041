"""Private names of torch and xDSL exist in the installed versions, and are used in one file each.

A failure names what a version does not have, and the file that uses it.
"""

import ast
import importlib
import re
from collections.abc import Iterator
from functools import cache
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
import xdsl.irdl.declarative_assembly_format as fmt
from support.layers import ROOT, files
from support.sources import tree
from xdsl.context import Context
from xdsl.dialects.builtin import TensorType, f32
from xdsl.dialects.test import TestOp
from xdsl.ir import Block, Use
from xdsl.parser import Parser
from xdsl.printer import Printer

from shardir.backend.torch.directory import RUNTIME

XDSL = ROOT / "shardir/compat/xdsl.py"
TORCH = ROOT / "shardir/compat/torch.py"
RUNTIME_NAMES = RUNTIME / "compat.py"
COMPAT = (XDSL, TORCH, RUNTIME_NAMES)


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def private_imports(path: Path) -> Iterator[tuple[int, str, str]]:
    """Yield the private names and modules of other libraries that a file imports."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.ImportFrom) and node.module:
            parts = node.module.split(".")
            for alias in node.names:
                if parts[0] in ("torch", "xdsl") and any(map(is_private, [*parts, alias.name])):
                    yield node.lineno, node.module, alias.name
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if any(map(is_private, alias.name.split("."))):
                    yield node.lineno, alias.name, ""


IMPORT = re.compile(r"^[ \t]*(?:from|import) [^\n(]*(?:\([^)]*\))?", re.MULTILINE)


def may_import_private(path: Path) -> bool:
    """Whether the text of a file has a private name in an import; few have, and are parsed."""
    imports = IMPORT.findall(path.read_text(encoding="utf-8"))
    return any(re.search(r"(?<!\w)_[A-Za-z]", statement) for statement in imports)


def private_attributes(path: Path) -> set[str]:
    """The private names in a file: attributes, and texts that are the name of one."""
    nodes = [*ast.walk(tree(path))]
    found = {n.attr for n in nodes if isinstance(n, ast.Attribute)}
    found |= {n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)}
    own = {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    return {name for name in found - own if is_private(name) and name.isidentifier()}


@pytest.mark.parametrize(
    ("path", "module", "name"),
    [(p, module, name) for p in COMPAT for _, module, name in private_imports(p)],
)
def test_what_is_imported_exists(path: Path, module: str, name: str) -> None:
    library = module.split(".", maxsplit=1)[0]
    try:
        found = hasattr(importlib.import_module(module), name) if name else True
        found = found or bool(importlib.import_module(f"{module}.{name}"))
    except ImportError:
        found = False
    assert found, f"{library} {version(library)} has no {module}.{name}: correct {path}"


@cache
def xdsl_probes() -> list[object]:
    """Objects of the classes whose private names we use."""
    op = TestOp(result_types=[TensorType(f32, [2])])
    other = TestOp(operands=[op.results[0]])
    return [op, other, op.results[0], Use(other, 0), Block(), Parser(Context(), ""), Printer(),
            Parser(Context(), "").lexer, fmt.OperandsDirective()]  # fmt: skip


@cache
def torch_probes() -> list[object]:
    """Objects of the classes whose private names we use."""
    w = torch.zeros(2, requires_grad=True)
    rate = torch.optim.lr_scheduler.ConstantLR
    one, two, three = (rate(torch.optim.SGD([w], lr=0.1)) for _ in range(3))
    joined = torch.optim.lr_scheduler.SequentialLR(one.optimizer, [one], [])
    chained = torch.optim.lr_scheduler.ChainedScheduler([two])
    return [torch, w, torch.nn.Linear(1, 1), torch.ops.aten.add.Tensor, joined, chained, three,
            one.optimizer,
            torch.utils.checkpoint, torch.autograd.profiler, torch._C,
            torch.export.exported_program]  # fmt: skip


@pytest.mark.parametrize("name", sorted(private_attributes(XDSL)))
def test_private_attributes_of_xdsl_exist(name: str) -> None:
    found = any(hasattr(probe, name) for probe in xdsl_probes())
    assert found, f"xDSL {version('xdsl')} has no {name}: correct {XDSL}"


EITHER = {"_checkpoint_without_reentrant_generator", "_checkpoint_without_reentrant_generator_impl"}
"""Names of which a version has one."""


@pytest.mark.parametrize(
    "name", sorted((private_attributes(TORCH) | private_attributes(RUNTIME_NAMES)) - EITHER)
)
def test_private_attributes_of_torch_exist(name: str) -> None:
    found = any(hasattr(probe, name) for probe in torch_probes())
    assert found, f"torch {torch.__version__} has no {name}: correct {TORCH} or {RUNTIME_NAMES}"


def test_late_imports_exist() -> None:
    from shardir.compat import torch as compat

    for name in compat.LATE:
        assert getattr(compat, name) is not None, name


def test_what_is_private_is_used_in_one_file() -> None:
    wrong = [
        f"{path}:{line}: import {name or module} of {module} from shardir.compat, the runtime from "
        "runtime_compat"
        for _, path in files()
        if path not in COMPAT and may_import_private(path)
        for line, module, name in private_imports(path)
    ]
    assert not wrong, "\n".join(wrong)


@cache
def own_names(path: Path) -> set[str]:
    """The names of functions of a file, and those that it sets in its objects."""
    nodes = [*ast.walk(tree(path))]
    found = {n.name for n in nodes if isinstance(n, ast.FunctionDef)}
    found |= {n.target.id for n in nodes if isinstance(n, ast.AnnAssign)
              and isinstance(n.target, ast.Name)}  # fmt: skip
    stored = (n for n in nodes if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store))
    return found | {n.attr for n in stored if ast.unparse(n.value) == "self"}


def test_private_fields_of_xdsl_are_used_in_one_file() -> None:
    fields = private_attributes(XDSL)
    read = re.compile(rf"\.\s*(?:{'|'.join(fields)})\b")
    wrong = [
        f"{path}:{node.lineno}: {ast.unparse(node)} of xDSL; use shardir.compat.xdsl"
        for _, path in files()
        if path not in COMPAT and read.search(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Attribute) and node.attr in fields - own_names(path)
    ]
    assert not wrong, "\n".join(wrong)


def test_private_ops_exist() -> None:
    """The ops of ATen with private names that the files beside programs call."""
    ops = {
        ast.unparse(node): path
        for path in sorted(RUNTIME.rglob("*.py"))
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Attribute)
        and is_private(node.attr)
        and ast.unparse(node.value) in ("aten", "torch", "torch.ops.mkldnn")
    }
    assert ops
    wrong = [
        f"torch {torch.__version__} has no {op}: correct {path}"
        for op, path in ops.items() if not is_there(op)
    ]  # fmt: skip
    assert not wrong, "\n".join(wrong)


def is_there(op: str) -> bool:
    found: object = torch.ops if op.startswith("aten.") else torch
    for part in op.removeprefix("torch.").split("."):
        found = getattr(found, part, None)
    return found is not None
