"""`shard-opt`: the command line, pipelines with options, errors of passes, and outputs."""

import csv
import io
import json
import os
import re
import subprocess
import sys
import tempfile
from contextlib import redirect_stderr, redirect_stdout
from importlib.metadata import version
from pathlib import Path

import pytest
from support.driver import PROGRAM, Rename, run

from shardir import pipelines
from shardir.rewriting.options import UsageError, field_docs, option_types, parse_options
from shardir.syntax.parser import parse
from shardir.tools import opt


@pytest.fixture(autouse=True)
def _temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write the reproducers of internal errors to a folder of the test."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


pytestmark = pytest.mark.usefixtures("sample_passes")


def test_prints_the_module() -> None:
    code, out, err = run()
    assert (code, err) == (0, "")
    assert out == "builtin.module {\n  func.func @f() {\n    func.return\n  }\n}\n"
    assert parse(out).is_structurally_equivalent(parse(PROGRAM))
    _, generic, _ = run("--print-op-generic")
    assert '"func.func"' in generic and parse(generic).is_structurally_equivalent(parse(PROGRAM))
    _, located, _ = run("--print-debuginfo")
    assert 'func.return loc("<stdin>":2:3)' in located


@pytest.mark.parametrize(
    ("pipeline", "name"),
    [
        ("rename", "g"), ("rename{to=h}", "h"), ("rename{to=h times=3}", "hhh"),
        ("builtin.module(rename)", "g"), (" rename , cse ", "g"), ("twice", "b"), ("all", "b"),
        ("twice{times=2}", "bb"), ("all{times=3 loud=true}", "bbb"), ("renames{to=z}", "z"),
        ("renames{to=z times=2},rename{times=3}", "ggg"),
        ("builtin.module(twice,rename{to=z})", "z"), ("twice,rename", "g"), ("", "f"),
        ("rename{loud=true only=a,b}", "g"), ('rename{to="x y"}', '"x y"'), ("rename{to=1}", '"1"'),
    ],
)  # fmt: skip
def test_pipelines(pipeline: str, name: str) -> None:
    for flag in ("-p", "--pass-pipeline", "--passes"):
        code, out, err = run(flag, pipeline)
        assert (code, err) == (0, "")
        assert f"func.func @{name}()" in out


WRONG = {
    "-p renam": "there is no pass renam; did you mean rename?",
    "-p propagate": "there is no pass propagate; did you mean propagate-strategies?",
    "-p zzz": "there is no pass zzz; see --list-passes",
    "-p twic": "there is no pass twic; did you mean twice?",
    "-p rename{too=h}": "pass rename has no option too; did you mean to?",
    "-p rename{xyz=h}": "pass rename has no option xyz; it has to, times, loud, only, size",
    "-p rename{times=h}": "pass rename: option times: expected int, got 'h'",
    "-p rename{times}": "pass rename: option times: expected int, got no value",
    "-p rename{size=16XB}": "pass rename: option size: expected a size such as 16GB or 512MiB, "
    "got '16XB'",
    "-p rename{times=16KB}": "pass rename: option times: expected int, got '16KB'",
    "-p rename{to=g to=h}": "pass pipeline: expected option to once, "
    "got it twice in 'rename{to=g to=h}'; drop one",
    "-p rename{": "pass pipeline: expected a closing bracket or quote, got none in 'rename{'",
    "-p rename}": "pass pipeline: the '}' after 'rename' closes nothing",
    "-p rename{to=h}x": "pass pipeline: unexpected text after the options of 'rename{to=h}x'",
    "-p rename,,cse": "pass pipeline: a pass is missing between the commas of 'rename,,cse'",
    "-p twice{x=1}": "pipeline twice has no option x; it has times, loud, only, size",
    "-p twice{tims=1}": "pipeline twice has no option tims; did you mean times?",
    "-p twice{to=z}": "pipeline twice has no option to; it has times, loud, only, size",
    "-p all{times=x}": "pass rename: option times: expected int, got 'x'",
    "-p all{times=1": "pass pipeline: expected a closing bracket or quote, "
    "got none in 'all{times=1'",
    "-p 17+": "pass pipeline: Expected pass name here (in '17+')",
    "-t foldr": "there is no target foldr; did you mean folder?",
    "--cost=h20": "--cost: expected a cluster, got h20; use a readable file or ascend910, gloo, "
    "h100, h200, pod2048, shm",
    "-t folder{fial}": "target folder has no option fial; did you mean fail?",
    "/nowhere/at/all.ir": "cannot read /nowhere/at/all.ir: No such file or directory",
    "/": "expected a program, got the directory /",
    "-o /nowhere/at/all.ir": "cannot write /nowhere/at/all.ir: No such file or directory",
    "-o /": "expected a file for -o, got the directory /",
}


@pytest.mark.parametrize("args", WRONG)
def test_wrong_command_lines(args: str) -> None:
    code, out, err = run(*args.split(" ", 1))
    assert (code, out) == (2, "")
    assert err == f"shard-opt: error: {WRONG[args]}\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--pas-pipeline=x"], "no option --pas-pipeline=x; did you mean --pass-pipeline?"),
        (["--propagate-strategies"], "--propagate-strategies; use -p propagate-strategies"),
        (["x.ir", "y.ir"], "expected no further argument, got y.ir"),
    ],
)
def test_unknown_options_have_a_suggestion(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        opt.main(words)
    assert message in capsys.readouterr().err


def test_spellings_of_mlir_opt(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (file := tmp_path / "f.ir").write_text(
        "func.func @f(%x: tensor<2xf32>) -> tensor<2xf32> {\n"
        "  %y = nn.exp %x : (tensor<2xf32>) -> tensor<2xf32>\n"
        "  func.return %y : tensor<2xf32>\n}\n"
    )
    assert opt.main([str(file), "--mlir-print-op-generic", "-split-input-file"]) == 0
    assert '"nn.exp"' in capsys.readouterr().out
    words = ["-p", "inline-calls,strip-layouts", "--verify-roundtrip", "--mlir-timing"]
    names = ["--mlir-print-ir-before=inline-calls", "--mlir-print-ir-after=strip-layouts"]
    assert opt.main([str(file), *words, *names]) == 0
    err = capsys.readouterr().err
    assert [line.split()[4] for line in err.splitlines() if "IR Dump" in line] == [
        "Before", "After",
    ]  # fmt: skip
    assert "strip-layouts" in err and "seconds" in err
    assert opt.main([str(file), "-p", "inline-calls", "--mlir-print-ir-after=cse"]) == 2
    assert "expected a pass that runs, got cse; there are inline-calls" in capsys.readouterr().err


def test_costs_in_json_and_csv_replace_the_program(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (file := tmp_path / "f.ir").write_text(
        "func.func @f(%x: tensor<2xf32>) -> tensor<2xf32> {\n"
        "  %y = nn.exp %x : (tensor<2xf32>) -> tensor<2xf32>\n"
        "  func.return %y : tensor<2xf32>\n}\n"
    )
    assert opt.main([str(file), "--cost", "--format", "json"]) == 0
    (cost,) = json.loads(capsys.readouterr().out)
    (op,) = cost["ops"]
    assert (op["op"], op["bytes"], op["line"], op["results"]) == ("nn.exp", 16, 2, ["y"])
    assert opt.main([str(file), "--cost", "--format", "csv"]) == 0
    (row,) = csv.DictReader(io.StringIO(capsys.readouterr().out))
    assert float(row["seconds"]) == op["seconds"] == cost["seconds"]
    assert opt.main([str(file), "--format", "json"]) == 2
    assert "expected --cost or --compare, got neither" in capsys.readouterr().err
    assert opt.main([str(file), "--cost", "--format", "json", "-t", "torch"]) == 2
    assert "--format json: expected no -t" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0), ("1024", 1024), ("7B", 7), ("16GB", 16_000_000_000), ("2KB", 2_000),
        ("3MB", 3_000_000), ("1TB", 10**12), ("512MiB", 512 << 20), ("4KiB", 4096),
        ("80GiB", 80 << 30), ('"1.5 KiB"', 1536),
    ],
)  # fmt: skip
def test_sizes_have_units(text: str, size: int) -> None:
    (p,) = pipelines.build(f"rename{{size={text}}}")
    assert isinstance(p, Rename) and p.size == size
    spec = parse_options(f"rename{{size={text}}}", "pass")
    assert Rename.from_spec(spec).size == size  # xDSL calls it


def test_the_expansion_of_recursive_pipelines_ends() -> None:
    made = {"a": lambda: Rename, "b": lambda: Rename}
    with pytest.raises(UsageError, match="pipeline a has no option x"):
        list(pipelines.expand("a{x=1}", made, {"a": "a"}))
    assert [s.name for s in pipelines.expand("a", made, {"a": "a,b"})] == ["a", "b"]


def test_errors_of_passes(tmp_path: Path) -> None:
    path = tmp_path / "two.ir"
    path.write_text(PROGRAM + PROGRAM.replace("@f", "@g"))
    code, out, err = run(str(path), "-p", "complain")
    assert (code, out) == (1, "")
    lines = [line for line in err.splitlines() if line.startswith(str(path))]
    assert [line.removeprefix(str(path)) for line in lines] == [
        ":1:1: warning: this will not do", ":4:1: warning: this will not do",
        ":1:1: error: @f is wrong", ":4:1: error: @g is wrong",
    ]  # fmt: skip
    code, _, err = run("-p", "crash")
    assert code == 70
    assert err.startswith("shard-opt: internal error in pass crash: KeyError: 'oops'\n")
    assert "please report it" in err
    code, _, err = run("-p", "refuse")
    assert (code, err) == (1, "<stdin>: error: no such thing\n")
    code, _, err = run("-p", "break,rename", "--verify-each")
    assert code == 1
    assert "the body of func.func is empty" in err and "note: found after pass break" in err
    code, _, err = run("-p", "break", "--disable-verify")
    assert (code, err) == (0, "")


def test_traceback_on_request() -> None:
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err), pytest.MonkeyPatch.context() as m:
        m.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(PROGRAM.encode())))
        assert opt.main(["-p", "crash", "--traceback"]) == 70
    assert "Traceback" in err.getvalue()


def test_dumps_and_times() -> None:
    _, out, _ = run("-p", "twice", "--print-between-passes")
    assert re.findall(r"IR after (\S+):|@(\w)", out) == [("rename", ""), ("", "a"), ("", "b")]
    _, out, err = run("-p", "twice", "--print-ir-after-all")
    assert re.findall(r"IR Dump After (\S+)|@(\w)", err) == [
        ('rename{to="a"}', ""), ("", "a"), ('rename{to="b"}', ""), ("", "b"),
    ]  # fmt: skip
    _, _, err = run("-p", "twice", "--time-passes")
    names = [line.split()[0] for line in err.splitlines()]
    assert names == ["pass", "parse", "verify", "rename", "rename", "verify", "print", "total"]


def test_list_passes() -> None:
    _, out, _ = run("--list-passes")
    assert "rename\n    Give every function another name.\n      to: str = g" in out
    assert (
        "      loud: bool = false" in out
        and "      size: bytes = 0" in out
        and "More about it" not in out
    )
    assert "  twice = rename{to=a},rename{to=b}" in out
    assert " cse," in out.partition("passes of xDSL:")[2]


def test_each_option_has_a_meaning() -> None:
    for name, load in pipelines.PASSES.items():
        cls = load()
        assert option_types(cls).keys() == field_docs(cls).keys(), name


def test_options_of_mlir_opt() -> None:
    code, out, err = run(
        "-pass-pipeline=builtin.module(twice{times=2},cse)", "--dump-pass-pipeline"
    )
    assert (code, err) == (0, 'rename{to="a" times=2},rename{to="b" times=2},cse\n')
    assert run("-p", err.strip()) == (0, out, "")
    assert run("-p", "cse", "--mlir-print-ir-after-all") == run("-p", "cse", "--print-ir-after-all")
    code, out, _ = run("--show-dialects")
    assert code == 0 and {"builtin", "func", "arith", "dist", "nn", "train"} <= {*out.split()}


def test_version() -> None:
    code, out, _ = run("--version")
    assert code == 0 and f"shardir {version('shardir')}" in out and version("xdsl") in out


# ---- output ----


def test_output_is_all_or_nothing(tmp_path: Path) -> None:
    path = tmp_path / "out.ir"
    path.write_text("old")
    assert run("-o", str(path), "-p", "complain")[0] == 1
    assert path.read_text() == "old"
    assert run("-o", str(path)) == (0, "", "")
    assert path.read_text().startswith("builtin.module")
    assert [p.name for p in tmp_path.iterdir()] == ["out.ir"]
    pipe = tmp_path / "pipe"
    os.symlink("/dev/null", pipe)
    assert run("-o", str(pipe))[0] == 0
    assert pipe.is_char_device()


def test_directories(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "out"
    assert run("-t", "folder", "-o", str(out), "-p", "rename") == (0, "", "")
    assert (out / "now").read_text() == "g" and (out / "before").read_text() == "f"
    code, _, err = run("-t", "folder{fail=true}", "-o", str(out), "-p", "rename{to=i}")
    assert (code, err) == (1, "<stdin>: error: this cannot be emitted\n")
    assert run("-t", "folder") == (0, "text\n", "")
    code, _, err = run("-t", "torch", "-o", str(out / "now"))
    assert code == 2 and "expected a directory, got the file" in err
    code, _, err = run("-t", "torch", "-o", str(out))
    assert code == 2 and "has other files and no plan.json: it is not overwritten" in err


def test_frontends() -> None:
    for name in ("ir", "mlir", "xdsl"):
        code, _, err = run("-f", name)
        assert (code, err) == (0, "")
        code, _, err = run("-f", name, text="func.func @f( {")
        assert code == 1 and "<stdin>:1:15: error:" in err


def test_stock_xdsl_opt(tmp_path: Path) -> None:
    """Dialects and passes, with their options, reach xDSL's own driver through the entry point."""
    name = "propagate-strategies,search-strategies{memory=16GB}"
    path = tmp_path / "a.mlir"
    path.write_text(
        "dist.mesh @m <d = 2>\nfunc.func @f(%x: tensor<4xf32>) -> tensor<4xf32> {\n"
        "  %y = nn.relu %x strategy <((2))> : (tensor<4xf32>) -> tensor<4xf32>\n"
        "  func.return %y : tensor<4xf32>\n}\n"
    )
    code = "from xdsl.tools.xdsl_opt import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, str(path), "-p", name],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    _, ours, _ = run(str(path), "-p", name)
    assert parse(done.stdout).is_structurally_equivalent(parse(ours))


def test_unregistered() -> None:
    text = '"my.op"() {a = 1 : i32} : () -> ()\n'
    assert run(text=text)[0] == 1
    code, out, err = run("--allow-unregistered-dialect", text=text)
    assert (code, err) == (0, "")
    assert '"my.op"() {a = 1 : i32} : () -> ()' in out
