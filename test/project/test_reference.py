"""The reference has every flag, option, code and public name, and its inputs make their errors."""

import re
from pathlib import Path

import pytest
from reference import TABLE, command_parsers, wrong_inputs
from support.extent import sampled
from support.pages import DOCS
from support.runlines import run_tool
from xdsl.ir import Dialect

import shardir
from shardir import testing
from shardir.diagnostics.codes import CODES
from shardir.dialects import nn, train
from shardir.dialects.dist.dialect import Dist
from shardir.passes import PASSES
from shardir.rewriting.options import option_name, option_types


def page(name: str) -> str:
    return (DOCS / "reference" / f"{name}.md").read_text()


def test_every_flag_is_there() -> None:
    text = page("commands")
    for command, parser in command_parsers():
        assert f"\n## {command}\n" in text
        section = text.partition(f"\n## {command}\n")[2].partition("\n## ")[0]
        shown = set(re.findall(r"(?<![\w-])--?[a-z][\w-]*", section))
        hidden = {o for a in parser._actions if a.help == "==SUPPRESS==" for o in a.option_strings}
        flags = {o for a in parser._actions for o in a.option_strings} - hidden
        assert flags <= shown, f"{command}: {sorted(flags - shown)}"


def test_every_pass_and_option_is_there() -> None:
    text = page("passes")
    for name, load in PASSES.items():
        section = text.partition(f"\n### {name}\n")[2].partition("\n### ")[0]
        assert section, name
        for option in option_types(load()):
            assert f"| `{option_name(option)}` |" in section, f"{name}: {option}"


@pytest.mark.parametrize(
    ("name", "dialect"), [("ops", nn.Nn), ("dist-ops", Dist), ("train-ops", train.Train)]
)
def test_every_op_is_there(name: str, dialect: Dialect) -> None:
    headings = set(re.findall(r"^### (\S+)$", page(name), re.M))
    assert headings == {op.name for op in dialect.operations}


def test_every_public_name_is_there() -> None:
    names = re.findall(r"^::: [\w.]+\.(\w+)$", page("python"), re.M)
    public = {*shardir.__all__} - {"__version__", "cost"} | {*testing.__all__}
    assert set(names) == public


def test_every_entry_of_the_importer_is_there() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", page("aten"), re.M))
    assert {n.partition(".")[0] for n in TABLE} <= rows.keys()


def test_every_code_is_there() -> None:
    assert set(re.findall(r"^### (\w+)$", page("invariants"), re.M)) == set(CODES)


INPUTS = [pytest.param(*x, id=x[0]) for x in wrong_inputs().items() if not x[0].startswith("N")]
"""Those of N are lines of plans, whose errors test/filecheck/apply-plan expects."""
ABRIDGED = "..."


@pytest.mark.parametrize(("code", "given"), sampled(INPUTS, 40))
def test_inputs_make_their_errors(code: str, given: tuple[list[str], str], tmp_path: Path) -> None:
    flags, text = given
    if ABRIDGED in text.splitlines():
        return
    file = tmp_path / "x.ir"
    file.write_text(text)
    _, _, errors = run_tool(["shard-opt", str(file), *flags], b"")
    assert f"[{code}]" in errors
