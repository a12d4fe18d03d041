"""The package of docs/examples/extension, installed beside shardir, and the names of packages."""

import ast
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from support.extent import long_form
from torch.nn.functional import silu

import shardir
from shardir.dialects.installed import installed
from shardir.extend import Extension, ShardirError
from shardir.testing import check_extension

PACKAGE = Path(__file__).parents[2] / "docs" / "examples" / "extension"
PROGRAM = PACKAGE / "program.ir"

USE = f"""
import io
from contextlib import redirect_stdout

import shardir
from shardir.build import Module, acme
from shardir.tools import opt

def output(*words):
    with redirect_stdout(io.StringIO()) as out:
        assert opt.main([*words]) == 0
    return out.getvalue()

program = {str(PROGRAM)!r}
text = output(program, "-p", "fuse-swish")
assert text.count("acme.swish") == 2 and "nn.sigmoid" not in text, text
assert output(program, "-p", "acme-train") == output(program, "--mode=fused")
two = output(program, "--mode=fused", "--plan=acme2d(dp, tp)")
assert two == output(program, "--mode=fused", "--plan=ddp(dp) * megatron(tp)")
assert "dist.all_gather" in output(program, "-p", "train", "--plan=rows(dp)", "-t", "listing")
assert shardir.compile_file(program).cost(cluster="acme4").seconds > 0
listed = output("--list-passes")
assert "fuse-swish\\n    Replace x * sigmoid(x) by acme.swish." in listed
assert "acme-train = fuse-swish,train" in listed and "fused = acme-train: swish" in listed
assert "acme\\n" in output("--show-dialects")

module = Module(mesh="dp = 2", cluster="acme4")
f = module.function("f")
f.returns(acme.swish(f.input("x", (4, 8)), beta=2.0))
built = shardir.compile(module, target="listing")
assert "acme.swish" in built.text and built.program == ""
"""


def beside(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run Python where the package is installed."""
    information = folder / "shardir_acme-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Name: shardir-acme\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text("[shardir.extensions]\nacme = acme:EXTENSION\n")
    path = os.pathsep.join([str(folder), str(PACKAGE), *sys.path])
    return subprocess.run(
        [sys.executable, *words], env={**os.environ, "PYTHONPATH": path},
        capture_output=True, text=True, check=False, timeout=100,
    )  # fmt: skip


def test_an_installed_package_is_known_to_all_tools(tmp_path: Path) -> None:
    done = beside(tmp_path, "-c", USE)
    assert (done.returncode, done.stderr) == (0, "")


def test_xdsl_opt_knows_it(tmp_path: Path) -> None:
    main = "from xdsl.tools.xdsl_opt import main; main()"
    done = beside(tmp_path, "-c", main, str(PROGRAM), "-p", "fuse-swish")
    assert done.stdout.count("acme.swish") == 2, done.stderr


@pytest.fixture
def acme(registry: None, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(PACKAGE))
    acme = import_module("acme")
    shardir.register(acme.EXTENSION)
    return acme


def test_its_own_tests_hold(acme: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With `shardir.testing`: the laws of its op and of its pass."""
    monkeypatch.syspath_prepend(str(PACKAGE / "tests"))
    tests = vars(import_module("test_acme"))
    found = [test for name, test in tests.items() if name.startswith("test_")]
    assert len(found) == 3
    for test in found:
        test()


def test_it_uses_public_names_alone() -> None:
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute):
                assert not node.attr.startswith("_"), f"{path}:{node.lineno}"
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("shardir."):
                module = import_module(str(node.module))
                names = [alias.name for alias in node.names]
                assert {*names} <= {*module.__all__}, f"{path}:{node.lineno}"


def test_an_op_without_cases_is_named(acme: Any) -> None:
    check = r"acme.swish: expected cases, got none; give them to Extension\(cases=...\)"
    with pytest.raises(AssertionError, match=check):
        check_extension(replace(acme.EXTENSION, cases=None))
    with pytest.raises(ShardirError, match="acne; did you mean acme"):
        check_extension("acne")


def test_ranks_train_as_torch_does(acme: Any, tmp_path: Path) -> None:
    """Values and gradients of the op on 2 x 2 ranks, where its operand is split."""
    generator = torch.Generator().manual_seed(0)
    x, up, down = (torch.randn(n, generator=generator) for n in ((8, 16), (16, 32), (32, 16)))
    up, down = (0.1 * up).requires_grad_(), (0.1 * down).requires_grad_()
    losses = []
    np.save(tmp_path / "x.npy", x.numpy())
    save_file({"up": up.detach(), "down": down.detach()}, tmp_path / "first.safetensors")
    program = shardir.compile_file(PROGRAM, mode="fused", plan="acme2d")
    report = program.run(
        steps=3, data={"x": tmp_path / "x.npy"}, weights=tmp_path / "first.safetensors"
    )
    optimizer = torch.optim.SGD([up, down], lr=0.1)
    for _ in range(3):
        a = silu(x @ up)
        loss = ((a * torch.sigmoid(1.5 * a)) @ down).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert report.losses["step"] == pytest.approx(losses, rel=1e-5)


NAMES: list[tuple[dict[str, Any], str]] = [
    ({"pipelines": {"train": "inline-calls"}}, "a pipeline train, which shardir has"),
    ({"passes": {"auto": None}}, "a pass auto, which shardir has as a pipeline"),
    ({"pipelines": {"inline-calls": ""}}, "a pipeline inline-calls, which shardir has as a pass"),
    ({"passes": {"fuse-swish": None}}, "a pass fuse-swish, which acme has"),
    ({"presets": {"fsdp": "ddp"}}, "a preset fsdp, which shardir has"),
    ({"clusters": {"h100": ""}}, "a cluster h100, which shardir has"),
    ({"modes": {"auto": ("train", "")}}, "a mode auto, which shardir has"),
    ({"dialects": {"arith": None}}, "a dialect arith, which xdsl has"),
]


def test_names_that_others_have_are_refused(acme: Any) -> None:
    """At once, and nothing of the extension stays."""
    for given, message in NAMES:
        with pytest.raises(ShardirError) as error:
            parts: dict[str, Any] = {"clusters": {"free": ""}, **given}
            shardir.register(Extension(name="other", **parts))
        assert message in str(error.value)
        assert "free" not in installed().tables["clusters"]
    with pytest.raises(ShardirError, match="those of acme again"):
        shardir.register(acme.EXTENSION)


def test_wrong_parts_are_errors_that_name_them(registry: None) -> None:
    shardir.register(Extension(
        name="wrong", clusters={"wrong9": "cluster"},
        presets={"wrong1": "ddp * fdsp", "wrong2": lambda axes: "x :", "wrong3": lambda axes: 3},
    ))  # fmt: skip
    text = PROGRAM.read_text().replace("acme.swish %a beta 1.5", "nn.silu %a")
    for options, message in [
        ({"plan": "wrong1"}, "the preset wrong1: expected a product of ddp, zero1"),
        ({"plan": "wrong2(dp)"}, "the preset wrong2:"),
        ({"plan": "wrong3(dp)"}, "the preset wrong3: expected"),
        ({"plan": "wrong2(dp) * ddp(tp)"}, "expected wrong2 on a line of its own"),
    ]:
        with pytest.raises(ShardirError) as error:
            shardir.compile(text, **options)
        assert message in str(error.value)
    with pytest.raises(ShardirError, match="the cluster wrong9: expected one cluster"):
        shardir.compile(text, plan="ddp").cost(cluster="wrong9")


@long_form
def test_the_package_is_built_and_used_without_this_tree(tmp_path: Path) -> None:
    """From wheels of both, in an environment of its own, which has the packages of this one."""
    python, wheels = tmp_path / "env" / "bin" / "python", tmp_path / "wheels"
    source, package = PACKAGE.parents[2], shutil.copytree(PACKAGE, tmp_path / "acme")
    for words in (
        [sys.executable, "-m", "venv", str(python.parents[1])],
        [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(wheels), str(source)],
        [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(wheels), str(package)],
        [str(python), "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--find-links",
         str(wheels), "shardir", "shardir-acme"],
    ):  # fmt: skip
        subprocess.run(words, check=True, timeout=300)
    paths = [p for p in sys.path if p.endswith("site-packages")]
    own = python.parents[1] / "lib"
    use = f"import sys; sys.path += {paths!r}\nimport shardir"
    use += f"\nassert {str(own)!r} in shardir.__file__"
    tests = f"sys.path.append({str(PACKAGE / 'tests')!r})\nimport test_acme"
    tests += "\nfor name in dir(test_acme):\n    if name.startswith('test_'):"
    tests += "\n        getattr(test_acme, name)()"
    done = subprocess.run(
        [python, "-c", f"{use}\n{USE}\n{tests}"], cwd=tmp_path, capture_output=True, text=True,
        check=False, timeout=100,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
