"""`shard-lsp` through its protocol, on the examples. Places are found in the text by the tests."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.extent import extent, sampled
from support.language_client import Client, position_in, range_in
from support.mutations import variant

EXAMPLES = sorted((Path(__file__).parents[2] / "docs" / "examples").glob("*.ir"))
DIGITS = (Path(__file__).parents[2] / "docs" / "examples" / "digits.ir").read_text()
COMMENT = re.compile(r"//[^\n]*|\"[^\"\n]*\"")
VALUE = re.compile(r"%[\w$.-]+")
FUNCTION = re.compile(r"^func\.func .*?^}", re.M | re.S)


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    client = Client()
    yield client
    assert client.close() == 0


def code(text: str) -> str:
    """The text with blanks in place of comments and strings."""
    return COMMENT.sub(lambda m: " " * len(m[0]), text)


def uses(text: str) -> Iterator[tuple[int, int, str]]:
    """Yield the offset of each name of a value, the offset of its definition, and the name. In the
    examples a definition stands before all uses."""
    for function in FUNCTION.finditer(text):
        first: dict[str, int] = {}
        for m in VALUE.finditer(text, function.start(), function.end()):
            yield m.start(), first.setdefault(m[0], m.start()), m[0]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)
def test_definitions_of_values_and_no_errors(client: Client, path: Path) -> None:
    text = path.read_text()
    uri = client.open(path.name, text)
    for at, defined, name in sampled(uses(code(text)), 12):
        name, _, _ = name.partition("#")
        found = client.at("definition", uri, position_in(text, at + 1))
        assert found == {"uri": uri, "range": range_in(text, defined, name)}, name
    if not re.search("-split-input-file|verify-diagnostics", text):
        assert [d for d in client.diagnostics(uri) if d["severity"] == 1] == []


def test_definitions_of_functions_axes_and_aliases(client: Client) -> None:
    uri = client.open("digits.ir", DIGITS)
    mesh = DIGITS.index("dist.mesh @m <dp = 2, tp = 2>")
    loss = DIGITS.index("@loss(")
    for use, name, defined in [
        (DIGITS.index("of @loss") + 3, "@loss", loss),
        (DIGITS.index("<@m, [{dp}") + 1, "@m", DIGITS.index("@m", mesh)),
        (DIGITS.index("{dp}, {}]>> {") + 1, "dp", DIGITS.index("dp", mesh)),
        (DIGITS.index("{}, {tp}]>> {") + 5, "tp", DIGITS.index("tp", mesh)),
    ]:
        found = client.at("definition", uri, position_in(DIGITS, use))
        assert found == {"uri": uri, "range": range_in(DIGITS, defined, name)}, name
    text = (Path(__file__).parents[2] / "docs" / "examples" / "mlp_by_hand.ir").read_text()
    uri = client.open("mlp_by_hand.ir", text)
    use = text.rindex("#hidden")
    found = client.at("definition", uri, position_in(text, use + 3))
    assert found["range"] == range_in(text, text.index("#hidden ="), "#hidden")


def test_axes_of_two_meshes_with_one_name(client: Client) -> None:
    text = """dist.mesh @a <x = 2, y = 2>
dist.mesh @b <y = 4>
func.func @f(%v: tensor<4xf32, #dist.layout<@b, [{y}]>>) {
  func.return
}
"""
    uri = client.open("two.ir", text)
    found = client.at("definition", uri, position_in(text, text.index("{y}") + 1))
    assert found["range"] == range_in(text, text.index("y = 4"), "y")


# Megatron's layouts: the columns of the first weight over tp, so the columns of what it makes; the
# rows of the second, so sums, which are reduced; the batch over dp throughout.
LAYOUTS = {
    "z1": "[{dp}, {tp}]", "a1": "[{dp}, {tp}]", "z2": "[{dp}, {}]", "logits": "[{dp}, {}]",
    "losses": "[{dp}]", "b1": "[{tp}]", "w3": "[{}, {}]",
}  # fmt: skip


def test_hovers_have_types_layouts_and_who_decided(client: Client) -> None:
    uri = client.open("digits.ir", DIGITS)

    def hover(offset: int) -> str:
        return client.at("hover", uri, position_in(DIGITS, offset))["contents"]["value"]

    line_of_x = DIGITS[: DIGITS.index("%x:")].count("\n") + 1
    for name, layout in LAYOUTS.items():
        assert f"Layout `[@m, {layout}]`" in hover(re.search(rf"%{name}\b", DIGITS).start() + 1)  # type: ignore - it occurs
    use = DIGITS.index("%z1, %b1") + 1  # a use has what its definition has
    assert hover(use) == hover(DIGITS.index("%z1 =") + 1)
    assert "%z1: tensor<128x128xf32>" in hover(use)
    assert f"%x: annotated at digits.ir:{line_of_x}" in hover(use)
    assert "Matrix product" in hover(DIGITS.index("nn.matmul") + 3)
    assert "dist.mesh @m <dp = 2, tp = 2>" in hover(DIGITS.index("{dp}, {}]>> {") + 1)
    assert "func.func private @loss(" in hover(DIGITS.index("of @loss") + 4)


WRONG = """dist.mesh @m <dp = 2, tp = 2>
func.func @f(%x: tensor<8x4xf32, #dist.layout<@m, [{dp}, {dp}]>>, %w: tensor<5x6xf32>) {
  %y = nn.matmul %w, %w : (tensor<5x6xf32>, tensor<5x6xf32>) -> tensor<5x6xf32>
  %z = nn.rellu %w : (tensor<5x6xf32>) -> tensor<5x6xf32>
  %b = nn.relu %w : (tensor<5x6xf32>) -> tensor<5x7xf32>
  func.return
}
func.func @g(%w: tensor<5x6xf32>) {
  %a = nn.relu %v : (tensor<5x6xf32>) -> tensor<5x6xf32>
  func.return
}
"""
"""The README's wrong program, and two more errors: an unknown value, and a wrong type."""


def test_errors_have_ranges_codes_and_fixes(client: Client) -> None:
    uri = client.open("wrong.ir", WRONG)
    found = client.diagnostics(uri)
    assert [(d["range"], d.get("code")) for d in found] == [
        (range_in(WRONG, WRONG.index("%x:"), "%x"), "L3"),  # argument 0
        (range_in(WRONG, WRONG.index("%w, %w") + 4, "%w"), "T7"),  # operand 1
        (range_in(WRONG, WRONG.index("nn.rellu"), "nn.rellu"), None),
        (range_in(WRONG, WRONG.index("%b"), "%b"), "T1"),  # result 0
        (range_in(WRONG, WRONG.index("%v"), "%v"), None),
    ]
    edits = {
        WRONG.index("nn.rellu"): ("nn.rellu", "nn.relu"),
        WRONG.index("%b"): ("tensor<5x7xf32>", "tensor<5x6xf32>"),
    }
    text = WRONG
    for at, (old, new) in edits.items():
        place = position_in(WRONG, at)
        actions = client.request(
            "textDocument/codeAction", textDocument={"uri": uri}, context={"diagnostics": []},
            range={"start": place, "end": place},
        )  # fmt: skip
        ((edit,),) = (a["edit"]["changes"][uri] for a in actions)
        assert edit == {"range": range_in(WRONG, WRONG.index(old, at), old), "newText": new}
        text = text.replace(old, new)
    again = client.diagnostics(client.open("wrong.ir", text))
    assert [d["message"] for d in again] == [found[i]["message"] for i in (0, 1, 4)]
    assert client.diagnostics(client.open("wrong.ir", DIGITS)) == []


def test_columns_are_those_of_utf16(client: Client) -> None:
    line = '  %y = nn.rellu %x {name = "\U0001f600é"} : (tensor<4xf32>) -> tensor<4xf33>\n'
    text = f"func.func @f(%x: tensor<4xf32>) {{\n{line}  func.return\n}}\n"
    (error, *_) = client.diagnostics(client.open("columns.ir", text))
    assert error["range"] == range_in(text, text.index("nn.rellu"), "nn.rellu")
    text = text.replace("rellu", "relu")
    (error, *_) = client.diagnostics(client.open("columns.ir", text))
    assert error["range"] == range_in(text, text.index("f33"), "f33")


def labels(client: Client, text: str) -> set[str]:
    """The completions where a text has `|`."""
    at = text.index("|")
    uri = client.open("new.ir", text.replace("|", ""))
    found = client.at("completion", uri, position_in(text, at))
    return {item["label"] for item in found}


def test_completions(client: Client) -> None:
    head = "dist.mesh @m <dp = 2, tp = 2>\nfunc.func @f(%x: tensor<4xf32>, %w: tensor<4xf32>) {\n"
    begun = head + "  %y = nn.relu %x : (tensor<4xf32>) -> tensor<4xf32>\n"
    assert {"nn.matmul", "dist.all_reduce", "train.step"} <= labels(client, begun + "  %z = nn.|")
    assert "nn.relu" in labels(client, begun + "  |\n}")
    assert labels(client, begun + "  %z = nn.add %|") == {"%x", "%w", "%y"}
    assert labels(client, begun + "}\ntrain.step @s of @|") == {"@m", "@f", "@s"}
    assert {"dp", "tp"} == labels(client, head.replace("4xf32>,", "4xf32, #dist.layout<@m, [{|"))
    assert "#dist.layout" in labels(client, head.replace("4xf32>,", "4xf32, #|"))
    assert {"propagate-strategies", "train"} <= labels(client, '// RUN: shard-opt %s -p "train,|')
    assert "memory" in labels(client, "// RUN: shard-opt %s -p auto{|")
    assert {"auto", "manual"} <= labels(client, "// RUN: shard-opt %s --mode |")
    assert {"fsdp", "zero1", "2d"} <= labels(
        client, '// RUN: shard-opt %s --plan "megatron(tp) * |'
    )
    assert labels(client, "// words of a comm|") == set()


def test_symbols(client: Client) -> None:
    uri = client.open("digits.ir", DIGITS)
    found = client.request("textDocument/documentSymbol", textDocument={"uri": uri})
    names = {s["name"]: [c["name"] for c in s.get("children", ())] for s in found}
    arguments = ["%x", "%labels", "%w1", "%b1", "%w2", "%b2", "%w3", "%b3"]
    assert names == {"@m": ["dp", "tp"], "@loss": arguments, "@accuracy": arguments, "@step": []}
    loss = next(s for s in found if s["name"] == "@loss")
    assert loss["range"]["start"] == position_in(DIGITS, DIGITS.index("func.func private @loss"))
    assert loss["range"]["end"] == position_in(DIGITS, DIGITS.index("\n}") + 2)
    assert loss["selectionRange"] == range_in(DIGITS, DIGITS.index("@loss("), "@loss")


@pytest.mark.parametrize("seed", range(extent(12, 300)))
def test_a_broken_text_has_answers(client: Client, seed: int) -> None:
    """Damaged variants of the examples, and their beginnings, as while they are written."""
    text = variant(seed).replace("\r", "")
    for version in (text, text[: len(text) * (seed % 7 + 1) // 8]):
        uri = client.open("broken.ir", version)
        ask: dict[str, Any] = {"uri": uri, "position": position_in(version, len(version) // 2)}
        for method in ("hover", "definition", "completion"):
            client.at(method, **ask)
        client.request("textDocument/documentSymbol", textDocument={"uri": uri})
        for d in client.diagnostics(uri):
            assert d["range"]["start"]["line"] <= version.count("\n")
            client.request(
                "textDocument/codeAction", textDocument={"uri": uri}, range=d["range"],
                context={"diagnostics": [d]},
            )  # fmt: skip
