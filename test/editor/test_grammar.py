"""The TextMate grammar of `.ir` (editors/vscode), on all examples."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from support.each import check_each
from support.extent import long_form, sampled
from support.textmate import Grammar

import shardir
from shardir.syntax.parser import default_parser

ROOT = Path(__file__).parents[2]
VSCODE = ROOT / "editors" / "vscode"
GRAMMAR = VSCODE / "syntaxes" / "shardir.tmLanguage.json"
EXAMPLES = sorted((ROOT / "docs" / "examples").glob("*.ir"))
ENGINE = ["vscode-textmate@9", "vscode-oniguruma@2"]
TOKENIZE = """
const fs = require("fs"), oniguruma = require("vscode-oniguruma");
const { Registry, INITIAL, parseRawGrammar } = require("vscode-textmate");
const wasm = fs.readFileSync(require.resolve("vscode-oniguruma/release/onig.wasm"));
const [grammarFile, ...files] = process.argv.slice(2);
(async () => {
  await oniguruma.loadWASM(wasm.buffer.slice(wasm.byteOffset, wasm.byteOffset + wasm.length));
  const registry = new Registry({
    onigLib: Promise.resolve({
      createOnigScanner: (s) => new oniguruma.OnigScanner(s),
      createOnigString: (s) => new oniguruma.OnigString(s),
    }),
    loadGrammar: async () => parseRawGrammar(fs.readFileSync(grammarFile, "utf8"), grammarFile),
  });
  const grammar = await registry.loadGrammar("source.shardir");
  const found = files.map((file) => {
    let stack = INITIAL;
    return fs.readFileSync(file, "utf8").split("\\n").map((line) => {
      const { tokens, ruleStack } = grammar.tokenizeLine(line, stack);
      stack = ruleStack;
      return tokens.map((t) => [line.slice(t.startIndex, t.endIndex), t.scopes.join(" ")]);
    });
  });
  console.log(JSON.stringify(found));
})();
"""

FORMS = {
    r"//.*": "comment.line.double-slash.shardir",
    r'"[^"]*"': "string.quoted.double.shardir",
    r"%[\w$.-]+": "variable.other.shardir",
    r"@[A-Za-z_]\w*": "entity.name.function.shardir",
    r"\btensor(?=<)": "support.type.shardir",
    r"(?<=[x<])b?f\d+": "storage.type.shardir",
    r"(?<=[<x])\d+(?=x)": "constant.numeric.dimension.shardir",
    r"#\w+\.\w+(?=<)": "entity.name.tag.attribute.shardir",
    r"\btrain\.\w+(?= =)": "entity.other.attribute-name.shardir",
    r"(?<=\[\{)[a-z]+(?=\})": "variable.parameter.axis.shardir",
    r"(?<=over <)[a-z]+(?=>)": "variable.parameter.axis.shardir",
    r"->": "keyword.operator.shardir",
}
"""Texts outside of comments and strings, and a scope that all their characters have."""


OP = ("support.function", "entity.name.namespace", "punctuation.accessor")
"""The scopes of the name of an op."""


def code_of(line: str) -> str:
    """The line with blanks in place of a comment and strings."""
    return re.sub(r'//.*|"[^"]*"', lambda m: " " * len(m[0]), line)


def expected(line: str) -> Iterator[tuple[int, int, str]]:
    """Yield ranges of a line, with a scope that they must have."""
    for form, scope in FORMS.items():
        text = line if form[0] in '/"' else code_of(line)
        for m in re.finditer(form, text):
            if form[0] != '"' or "//" not in line[: m.start()]:
                yield m.start(), m.end(), scope


def check_file(path: Path) -> None:
    """Each character has a scope, and that of its form; names of ops are those of the registry."""
    ops = set(default_parser().builder.known)
    for number, line, spans in Grammar(GRAMMAR).spans(path.read_text()):
        place = f"{path.name}:{number + 1}"
        scopes = [span.scopes for span in spans for _ in range(span.start, span.end)]
        for i, character in enumerate(line):
            assert character.isspace() or len(scopes[i]) > 1, f"{place}: no scope for {line[i:]}"
        for start, end, scope in expected(line):
            found = {scope in scopes[i] for i in range(start, end)}
            assert found == {True}, f"{place}: expected {scope} for {line[start:end]}"
        m = re.match(r"\s*(?:%[^=]*= )?([a-z_]+(?:\.\w+)*)(?=[ (<]|$)", code_of(line))
        is_op = m is not None and (m[1] in ops or m[1] == "func.func")
        marked = "".join(
            line[span.start : span.end] for span in spans if span.scopes[-1].startswith(OP)
        )
        assert marked.strip() == (m[1] if m is not None and is_op else ""), place


def test_scopes_of_the_examples() -> None:
    check_each(check_file, sampled(EXAMPLES, 16))


def test_the_extension_has_its_files_and_this_version() -> None:
    package = json.loads((VSCODE / "package.json").read_text())
    assert package["version"] == shardir.__version__
    ((language,), (grammar,)) = (package["contributes"][k] for k in ("languages", "grammars"))
    files = [package["main"], language["configuration"], grammar["path"]]
    assert all((VSCODE / file).is_file() for file in files)
    assert grammar["scopeName"] == json.loads(GRAMMAR.read_text())["scopeName"]
    assert language["extensions"] == [".ir"]
    configuration = json.loads((VSCODE / "language-configuration.json").read_text())
    for form in configuration["indentationRules"].values():
        re.compile(form)


@long_form
def test_scopes_are_those_of_the_engine_of_vs_code(tmp_path: Path) -> None:
    """Our tests' engine agrees with vscode-textmate, from npm, on every token of all examples."""
    npm, node = shutil.which("npm"), shutil.which("node")
    assert npm and node, "expected Node.js with npm, for the long form of this test"
    install = [npm, "install", "--no-audit", "--no-fund", "--prefix", str(tmp_path), *ENGINE]
    subprocess.run(install, check=True, capture_output=True)
    script = tmp_path / "tokenize.js"
    script.write_text(TOKENIZE)
    files = [*EXAMPLES, *sorted((ROOT / "test" / "filecheck").rglob("*.ir"))]
    run = subprocess.run(
        [node, script, GRAMMAR, *files], check=True, capture_output=True, text=True
    )
    for path, lines in zip(files, json.loads(run.stdout), strict=True):
        ours = Grammar(GRAMMAR).spans(path.read_text())
        for (number, line, spans), theirs in zip(ours, lines, strict=True):
            found = list[list[str]]()
            for text, scopes in theirs:
                if found and found[-1][1] == scopes:
                    found[-1][0] += text
                else:
                    found.append([text, scopes])
            mine = [[line[s.start : s.end], " ".join(s.scopes)] for s in spans]
            assert [x for x in mine if x[0]] == [x for x in found if x[0]], f"{path}:{number + 1}"
