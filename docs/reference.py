"""The reference, from the code: `python docs/reference.py NAME` prints a section of it.

`python test/pages.py` puts the sections into the pages.
"""

import argparse
import re
import shlex
import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from inspect import cleandoc
from pathlib import Path
from unittest import mock

import tables
from tables import ROOT, Example, cell, escaped, syntax
from torch import Tag, ops
from xdsl.dialects.builtin import UnitAttr
from xdsl.ir import Dialect
from xdsl.irdl import IRDLOperation

import shardir
from shardir import pipelines, testing
from shardir.diagnostics.codes import SECTIONS
from shardir.dialects import nn, train
from shardir.dialects.dist.dialect import Dist
from shardir.dialects.nn.base import TensorOp
from shardir.frontends.torch.aten import TABLE
from shardir.frontends.torch.decompose import decomposition
from shardir.passes import PASSES
from shardir.rewriting.options import default_text, field_docs, option_name, option_types
from shardir.search.plans.preset_entries import PRESETS, PRODUCTS

FILECHECK = ROOT / "test" / "filecheck"
EXPECTED = re.compile(r"// expected-error\s*(?:@\S+)?\s*\{\{(.*?)\}\}")
RUN = re.compile(r"// RUN: (.*)")
CODE = re.compile(r"^[^\[]*\[([A-Z]\d+)\] ")
DECLARED = re.compile(r"^[^(]*?([@#]\w+)(?=[ (])")
"""The name that an item of a program declares."""

LONG = 40
LONG_FUNCTION = 12
"""The lines of a function of which an example of an error has those that it needs."""
STRATEGY = "strategy"
"""The property that annotates any op."""


# ---- ops ----


def op_sections(dialect: Dialect) -> Iterator[str]:
    """Yield a section for each op of a dialect, by the files of the families of ops."""
    families: dict[str, list[type[IRDLOperation]]] = {}
    for op in dialect.operations:
        assert issubclass(op, IRDLOperation)
        families.setdefault(op.__module__, []).append(op)
    for module, members in families.items():
        title = (sys.modules[module].__doc__ or "").split("\n\n")[0]
        title = re.split(r"(?<=\w)[.:;] |\.$", " ".join(title.split()))[0]
        yield f"## {title}"
        yield ""
        for op in sorted(members, key=lambda op: op.name):
            yield from _op_section(op)


def _op_section(op: type[IRDLOperation]) -> Iterator[str]:
    yield f"### {op.name}"
    yield ""
    yield from (escaped(p) + ("" if p.endswith(".") else ".") for p in _paragraphs(op.__doc__))
    yield ""
    yield f"```text\n{syntax(op)}\n```"
    yield ""
    definition = op.get_irdl_definition()
    facts: dict[str, str] = {
        "operands": _names(n for n, _ in definition.operands),
        "attributes": _names(
            f"{n}?" if UnitAttr in (p.constr.get_bases() or ()) else n
            for n, p in definition.properties.items()
            if n not in (STRATEGY, "operandSegmentSizes", "resultSegmentSizes")
        ),
        "results": _names(n for n, _ in definition.results),
    }
    example = Example(op) if issubclass(op, TensorOp) and op.name.startswith("nn.") else None
    if example is not None:
        facts |= {
            "factors": f"`{example.factors()}`",
            "splits": example.splits(),
            "gradient": example.gradient(),
            "element types": example.elements(),
        }
    yield "| property | of this op |"
    yield "| --- | --- |"
    for key, text in facts.items():
        if text:
            yield f"| {key} | {cell(text)} |"
    yield ""
    if example is not None:
        yield f"```text\n{example.line()}\n```"
        yield f"\n```python\n{example.torch()}\n```"
        yield ""


def _paragraphs(text: str | None) -> list[str]:
    return [" ".join(p.split()) for p in cleandoc(text or "").split("\n\n")]


def _names(names: Iterable[str]) -> str:
    return ", ".join(f"`{n}`" for n in names)


# ---- passes ----


def pass_sections() -> Iterator[str]:
    """Yield of each pass its contract, which is the docstring of its file, and its options."""
    for name in pipelines.in_order():
        cls = PASSES[name]()
        text = cleandoc(import_module(cls.__module__).__doc__ or "")
        yield f"### {name}"
        yield ""
        yield _pass_text(text.removeprefix(f"{name}: "))
        yield ""
        if not option_types(cls):
            continue
        yield "| option | default | meaning |"
        yield "| --- | --- | --- |"
        for option in option_types(cls):
            shown, meaning = default_text(cls, option), escaped(field_docs(cls)[option])
            yield f"| `{option_name(option)}` | {shown} | {meaning} |"
        yield ""


def _pass_text(text: str) -> str:
    """Return Markdown of a docstring: indented programs as blocks, sentences with a capital."""
    parts = []
    for part in re.split(r"\n\n+", text):
        lines = part.splitlines()
        if all(x.startswith((" ", "-> ")) for x in lines):
            parts.append("```text\n" + cleandoc("\n" + part) + "\n```")
        else:
            parts.append(escaped(part))
    return "\n\n".join([parts[0][:1].upper() + parts[0][1:], *parts[1:]])


# ---- errors ----


def error_sections() -> Iterator[str]:
    """Yield of each code its invariant, the usual fix, and an input that violates it."""
    inputs = wrong_inputs()
    for section, codes in SECTIONS.items():
        yield f"## {section}\n"
        for code, entry in codes.items():
            flags, text = inputs[code]
            command = " ".join(["shard-opt", *flags])
            shown = EXPECTED.sub(r"// error: \1", text)
            yield f"### {code}\n"
            yield f"{escaped(entry.invariant)} The usual fix: {escaped(entry.fix)}.\n"
            yield f"`{command}` of\n\n```text\n{shown}\n```\n"


def wrong_inputs() -> dict[str, tuple[list[str], str]]:
    """Return for each code the flags and the shortest input of the tests that expect it."""
    inputs: dict[str, tuple[list[str], str]] = {}
    for path in sorted(FILECHECK.rglob("*.ir")):
        text = path.read_text()
        words = shlex.split(next(iter(RUN.findall(text)), "").rstrip("\\"))
        flags = words[i : i + 2] if (i := _index(words, "-p")) else []
        flags += words[i : i + 2] if (i := _index(words, "-t")) else []
        flags += [w for w in words if w.startswith(("--mode", "--allow-unregistered"))]
        if (i := _index(words, "--plan")) and words[i + 1].startswith("%S/"):
            inputs |= _wrong_lines(text, path.parent / words[i + 1].removeprefix("%S/"))
            continue
        for chunk in re.split(r"^// -----$", text, flags=re.M) if "-error" in text else ():
            for code in sorted({c for e in EXPECTED.findall(chunk) for c in CODE.findall(e)}):
                shortest = _cut(chunk, code)
                if code not in inputs or len(shortest) < len(inputs[code][1]):
                    inputs[code] = flags, shortest
    return inputs


def _wrong_lines(text: str, plan: Path) -> dict[str, tuple[list[str], str]]:
    """Return for each code the first line of a plan that a test expects it of."""
    found: dict[str, tuple[list[str], str]] = {}
    lines = plan.read_text().splitlines()
    for i, comment in enumerate(text.splitlines()):
        for offset, message in re.findall(r"-error@-(\d+) \{\{(.*?)\}\}", comment):
            for code in CODE.findall(message):
                line = f"{lines[i - int(offset)]}\n// error: {message}"
                found.setdefault(code, (["--plan", "plan.txt"], line))
    return {code: entry for code, entry in found.items() if code.startswith("N")}


def _index(words: list[str], word: str) -> int:
    return words.index(word) if word in words else 0


def _cut(chunk: str, code: str) -> str:
    """Return the part of an input that one error of a code needs: the item with it, the items
    that this one names, and declarations."""
    lines = [
        x for x in chunk.strip().splitlines() if x and not x.startswith(("// RUN", "// CHECK"))
    ]
    items: list[list[str]] = [[]]
    for line in lines:
        starts = not line.startswith((" ", "}", ")", "->"))
        after_comments = all(x.startswith("//") for x in items[-1])
        if starts and not after_comments:
            items.append([])
        items[-1].append(line)
    of_code = [i for i, item in enumerate(items) if any(_expects(x, code) for x in item)]
    short = min(of_code, key=lambda i: len(_cut_body(items[i], code)))
    names = [next(iter(DECLARED.findall(_first(item))), "@") for item in items]
    meshes = [i for i, item in enumerate(items) if _first(item).startswith("dist.mesh")]
    kept, more = set[int](), {short} | set(meshes if len(meshes) == 1 else ())
    while more != kept:
        kept = more
        text = "\n".join(x for i in sorted(kept) for x in items[i] if not x.startswith("//"))
        more = kept | {i for i, n in enumerate(names) if re.search(rf"{n}\b", text) and n != "@"}
        more |= {
            i for i, item in enumerate(items) if _first(item).startswith("train.")
            and any(f"of {names[j]} " in _first(item) for j in kept)
        }  # fmt: skip
    shown = [x for i in sorted(kept) for x in _cut_body(items[i], code)]
    text = [x for x in shown if not x.startswith("//") or EXPECTED.search(x)]
    return "\n".join(text if len(text) < LONG else [*text[:8], "...", *text[-4:]])


def _expects(line: str, code: str) -> bool:
    return any(code in CODE.findall(e) for e in EXPECTED.findall(line))


def _first(item: list[str]) -> str:
    return next((x for x in item if not x.startswith("//")), "")


def _cut_body(item: list[str], code: str) -> list[str]:
    """Return the lines of a function that its first error of a code needs, and its return."""
    if len(item) < LONG_FUNCTION or not any(x.endswith("{") for x in item):
        return item
    start = next(i for i, x in enumerate(item) if x.endswith("{"))
    at = next((i for i, x in enumerate(item) if _expects(x, code)), -1)
    keep = {*range(start + 1), len(item) - 1, at, at + 1, at - 1 if "@+2" in item[at] else at}
    keep |= {i for i, x in enumerate(item) if "return" in x}
    for i in range(len(item) - 1, start, -1):
        if i in keep:
            used = set(re.findall(r"%\w+", item[i]))
            keep |= {
                j for j in range(start + 1, i)
                if used & set(re.findall(r"%\w+", item[j].partition(" = ")[0]))
                and " = " in item[j]
            }  # fmt: skip
    keep |= {i - 1 for i in keep if EXPECTED.search(item[i - 1]) and "-error@-" not in item[i - 1]}
    return [item[i] for i in sorted(keep) if 0 <= i < len(item)]


# ---- presets, commands, names ----


def presets() -> Iterator[str]:
    yield "| preset | activations and parameters | the same as |"
    yield "| --- | --- | --- |"
    for name, preset in PRESETS.items():
        yield f"| `{name}` | {preset} | |"
    for name, members in PRODUCTS.items():
        yield f"| `{name}` | | `{' * '.join(members)}` |"


class _Parser(BaseException):
    def __init__(self, parser: argparse.ArgumentParser):
        self.parser = parser


def command_parsers() -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Yield the parser of each command of the package, as its call makes it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

    def stop(parser: argparse.ArgumentParser, *_: object, **__: object) -> None:
        raise _Parser(parser)

    for command, target in project["scripts"].items():
        name = target.rpartition(":")[2]  # shardir.tools.commands runs the module of this name
        with (
            mock.patch.object(argparse.ArgumentParser, "parse_known_args", stop),
            mock.patch.object(sys, "argv", [command]),
        ):
            try:
                import_module(f"shardir.tools.{name}").main()
            except _Parser as found:
                yield command, found.parser


def commands() -> Iterator[str]:
    """Yield a section for each command, with a table for each group of its options."""
    for command, parser in command_parsers():
        yield f"## {command}\n"
        yield f"{escaped(_paragraphs(parser.description)[0])}\n"
        for group in parser._action_groups:
            actions = [a for a in group._group_actions if a.help != argparse.SUPPRESS]
            if not actions:
                continue
            yield f"**{(group.title or '').capitalize()}**\n"
            yield "| option | meaning |"
            yield "| --- | --- |"
            yield from map(_option_row, actions)
            yield ""


def _option_row(action: argparse.Action) -> str:
    value = "" if action.nargs == 0 else action.metavar or action.dest.upper()
    choices = action.choices if action.choices and not isinstance(action.choices, dict) else ()
    if choices and not action.metavar and len(list(choices)) < 8:
        value = "{" + ",".join(map(str, choices)) + "}"
    shown = ", ".join(action.option_strings) or action.metavar or action.dest
    if action.option_strings and value:
        shown += f" {value}"
    text = (action.help or "").replace("%(default)s", str(action.default)).replace("%%", "%")
    return f"| `{shown}` | {escaped(' '.join(text.split()))} |".replace("|`", "| `")


def python_names() -> Iterator[str]:
    """Yield a directive of mkdocstrings for each public name."""
    for name in sorted(shardir.PLACES, key=str.lower):
        yield f"::: {shardir.PLACES[name]}.{name}\n"
    yield "## shardir.testing\n"
    yield "For [tests of packages](../contribute/testing-extensions.md) that extend shardir.\n"
    for name in sorted(testing.__all__, key=str.lower):
        yield f"::: {getattr(testing, name).__module__}.{name}\n"


def aten_ops() -> Iterator[str]:
    """Yield the status of the core ATen ops, and of others with an entry."""
    names = {n.partition(".")[0] for n in TABLE} | set(_core_ops())
    yield "| op | imported |"
    yield "| --- | --- |"
    for name in sorted(names, key=lambda n: (n.startswith("_"), n)):
        yield f"| `{name}` | {_status(name)} |"


def _core_ops() -> Iterator[str]:
    """Yield the core ops that torch has loaded, but those that graphs do not have: writes in place,
    and questions of sizes. Torch loads others when they are first named."""
    for name in dir(ops.aten):
        if name.endswith("_") or name.startswith("sym_"):
            continue
        packet = getattr(ops.aten, name)
        if hasattr(packet, "overloads") and any(
            Tag.core in getattr(packet, o).tags for o in packet.overloads()
        ):
            yield name


def _status(name: str) -> str:
    overloads = [n.partition(".")[2] for n in TABLE if n.partition(".")[0] == name]
    if "" in overloads:
        return "directly"
    if overloads:
        return "directly: " + ", ".join(f"`.{o}`" for o in sorted(overloads))
    packet = getattr(ops.aten, name)
    if any(decomposition(getattr(packet, o)) for o in packet.overloads()):
        return "by torch's decomposition"
    tags = {tag for o in packet.overloads() for tag in getattr(packet, o).tags}
    if tags & {Tag.dynamic_output_shape, Tag.data_dependent_output}:
        return "no: the result depends on values in shape or type"
    if Tag.nondeterministic_seeded in tags:
        return "no: random numbers without an entry"
    if name.startswith("_fft"):
        return "no: complex numbers"
    return "by torch's own kernel, replicated"


TABLES: dict[str, Callable[[], Iterator[str]]] = {
    "nn": lambda: op_sections(nn.Nn),
    "dist": lambda: op_sections(Dist),
    "train": lambda: op_sections(train.Train),
    "optimizers": tables.optimizers,
    "modes": tables.modes,
    "bugs": tables.bugs,
    "records": tables.records,
    "zoo": tables.zoo,
    "passes": pass_sections,
    "errors": error_sections,
    "presets": presets,
    "commands": commands,
    "python": python_names,
    "aten": aten_ops,
}


def table(name: str) -> str:
    """Return a section, by its name in TABLES."""
    if name not in TABLES:
        raise SystemExit(f"expected one of {', '.join(TABLES)}, got {name!r}")
    return "\n".join(TABLES[name]()).strip()


if __name__ == "__main__":
    print(table(sys.argv[1] if len(sys.argv) > 1 else ""))
