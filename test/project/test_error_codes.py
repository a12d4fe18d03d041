"""The table of error codes: each code is raised, has a case, and is spelled there alone.

`python test/project/test_error_codes.py` lists the messages that spell their code.
"""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from shardir.diagnostics.codes import CODES

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "shardir" / "diagnostics" / "codes.py"
SPELLED = re.compile(r"\[([A-Z]\d+)\] ")


@cache
def sources() -> dict[Path, str]:
    """The text of the sources outside the table."""
    paths = [p for folder in ("shardir", "passes", "tools") for p in (ROOT / folder).rglob("*.py")]
    return {p: p.read_text() for p in paths if p.resolve() != TABLE}


def raised() -> Iterator[str]:
    """Yield the codes of the calls `coded("X1", ...)`."""
    for text in sources().values():
        for node in ast.walk(ast.parse(text if "coded(" in text else "")):
            match node:
                case ast.Call(func=ast.Name("coded") | ast.Attribute(attr="coded")):
                    yield from filter(None, map(_text, ast.walk(node.args[0])))


def _text(node: ast.AST) -> str:
    """Return the text of a string constant; empty for anything else."""
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def spelled() -> Iterator[tuple[str, str]]:
    """Yield the location and the code of each message that spells its code."""
    for path, text in sources().items():
        tree = ast.parse(text if SPELLED.search(text) else "")
        docstrings = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Expr)}
        for node in ast.walk(tree):
            if id(node) not in docstrings:
                for code in SPELLED.findall(_text(node)):
                    yield f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}", code


def cases() -> set[str]:
    """The codes of the errors that .ir files expect."""
    return {
        code
        for path in (ROOT / "test" / "filecheck").rglob("*.ir")
        for line in path.read_text().splitlines()
        if "expected-error" in line
        for code in SPELLED.findall(line)
    }


def test_each_code_is_raised() -> None:
    found = set(raised())
    assert found == set(CODES), f"differences: {sorted(found ^ set(CODES))}"


def test_no_message_spells_its_code() -> None:
    assert not list(spelled()), "use coded, which takes the fix from the table"


def test_each_code_has_a_case() -> None:
    assert cases() == set(CODES), f"differences: {sorted(cases() ^ set(CODES))}"


def test_the_codes_of_a_letter_count_from_1() -> None:
    for letter in {code[0] for code in CODES}:
        numbers = [int(code[1:]) for code in CODES if code[0] == letter]
        assert numbers == list(range(1, len(numbers) + 1)), f"{letter}: {numbers}"


def test_an_invariant_is_a_sentence_and_a_fix_is_not() -> None:
    for code, entry in CODES.items():
        assert entry.invariant[0].isupper() or entry.invariant[0] == "`", code
        assert entry.invariant.endswith("."), code
        assert entry.fix, code
        assert not entry.fix.endswith("."), code


if __name__ == "__main__":
    for where, code in spelled():
        print(where, code)
