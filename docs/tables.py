"""Tables of the documentation, and the examples of ops: for reference.py."""

import json
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from textwrap import dedent

from xdsl.dialects.builtin import (
    DenseIntOrFPElementsAttr,
    FloatAttr,
    IntegerAttr,
    StringAttr,
    SymbolRefAttr,
    UnitAttr,
)
from xdsl.ir import Attribute
from xdsl.irdl import IRDLOperation

from shardir import pipelines
from shardir.backend.torch.emit.program import program_text
from shardir.diagnostics import Failure
from shardir.dialects.nn.base import TensorOp, decomposes
from shardir.dialects.text import OptionSpec, TextAttr
from shardir.dialects.train import Role, arguments
from shardir.dialects.train.optimizer import RULES, Optimizer
from shardir.dialects.train.optimizers import OPTIMIZERS

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "test"))

from bugs_of_others import GROUPS
from op_cases import CASES
from support.harness import FLOATS, Arg, add_step, compiled, elements_of, function, program

RECORDS = ROOT / "test" / "bench" / "records"
"""The figures of benchmarks, as `shard-bench NAME --json FILE` writes them."""

ELEMENTS = ("f64", "f32", "bf16", "f16", "i64", "i32", "i1")
TAIL = re.compile(r"\s*(\(`strategy` \$strategy\^\)\? )?attr-dict.*$")


def syntax(op: type[IRDLOperation]) -> str:
    """Return the text between the results and the types, from the `assembly_format`."""
    definition = op.get_irdl_definition()
    text = definition.assembly_format
    assert text is not None
    text = TAIL.sub("", text)
    text = re.sub(r"\((`\w+`) \$(\w+)\^\)\?", lambda m: _optional(op, m[1], m[2]), text)
    text = re.sub(r"\$(\w+)", lambda m: _variable(op, m[1]), text)
    text = re.sub(r" `\(` (.*?) `\)`", r"(\1)", text)
    return f"{op.name} {text.replace(' `,`', ',').replace('`', '')}".rstrip()


def _optional(op: type[IRDLOperation], keyword: str, name: str) -> str:
    definition = op.get_irdl_definition()
    if name not in definition.properties:  # an operand
        return f"[{keyword} ${name}]"
    constraint = definition.properties[name].constr
    unit = UnitAttr in (constraint.get_bases() or ())
    return f"[{keyword}]" if unit else f"[{keyword} ${name}]"


KINDS: dict[type[Attribute], str] = {
    IntegerAttr: "N", FloatAttr: "X", StringAttr: '"..."', DenseIntOrFPElementsAttr: "dense<...>",
}  # fmt: skip
"""The placeholder of a value of each kind."""


def _variable(op: type[IRDLOperation], name: str) -> str:
    definition = op.get_irdl_definition()
    if any(name == n for n, _ in definition.operands):
        return f"%{name}"
    if name == "sym_name":
        return "@name"
    if any(name == n for n, _ in definition.regions):
        return "{...}"
    bases = definition.properties[name].constr.get_bases() or ()
    if SymbolRefAttr in bases:
        return f"@{name}"
    if any(issubclass(b, TextAttr) for b in bases):
        return f"<{name}>"
    return next((shown for kind, shown in KINDS.items() if kind in bases), name)


# ---- examples of ops ----


class Example:
    """An op in a function @f of its own: the first of its samples in test/op_cases, in f32 if it
    has a sample of that type."""

    def __init__(self, op: type[TensorOp]):
        self.cases = [c for c in CASES if c.op is op]
        if not self.cases:
            raise SystemExit(f"expected a sample of {op.name}, got none; add one to test/op_cases")
        case = next((c for c in self.cases if "f32" in c.elements), self.cases[0])
        self.element = "f32" if "f32" in case.elements else case.elements[0]
        self.args, self.body = case.args(self.element), case.body(self.element)
        self.module = program(self.args, self.body)
        self.op = next(o for o in self.module.walk() if isinstance(o, op))
        for v in self.op.results:
            v.name_hint = "y"

    def elements(self) -> str:
        """Return the element types of the samples; the op refuses all others."""
        return " ".join(e for e in ELEMENTS if any(e in c.elements for c in self.cases))

    def gradient(self) -> str:
        """Return `yes`, or why the op has no gradient."""
        floats = [i for i, a in enumerate(self.args) if a.element in FLOATS]
        if not floats:
            return "-: no float operand"
        if not any(e in FLOATS for e in elements_of(v.type for v in self.op.results)):
            return "-: no float result"
        try:
            compiled(program(self.args, self.body, floats[:1]), ["distributed-autodiff"])
        except Failure:
            return "-: [G8]"
        return "yes"

    def splits(self) -> str:
        """Return the factors that can be split, and how the others are handled."""
        factors = self.op.factors()
        unsharded = [f for f, _ in factors.sizes if f in factors.replicate]
        free = [f for f, _ in factors.sizes if f not in factors.replicate]
        parts = ["all" if not unsharded else ", ".join(free)] if free else []
        if unsharded:
            how = "by decomposition" if decomposes(type(self.op)) else "gathered"
            parts.append(f"{', '.join(unsharded)} {how}")
        return "; ".join(parts) or "nothing to split"

    def factors(self) -> str:
        """Return the notation of the factors, without their sizes."""
        return re.sub(r" \{[^}]*\}", "", str(self.op.factors())).strip()

    def line(self) -> str:
        """Return the text of the op, of one line without regions."""
        lines = str(self.module).splitlines()
        at = next(i for i, x in enumerate(lines) if self.op.name in x)
        end = next(i for i in range(at, len(lines)) if lines[i + 1].lstrip().startswith("func."))
        return dedent("\n".join(lines[at : end + 1]))

    def torch(self) -> str:
        """Return the Python that is emitted for the op on one device."""
        text = program_text(self.module).partition("def f(")[2].partition("\n\n\n")[0]
        body = [x for x in text.splitlines()[1:] if x and not x.lstrip().startswith("#")]
        if self.op.regions:
            return dedent("\n".join(x for x in body if not x.lstrip().startswith("return")))
        body = [x.strip() for x in body]
        return "; ".join(x for x in body if not x.startswith("return")) or body[-1]


# ---- optimizers ----


def optimizers() -> Iterator[str]:
    yield "| optimizer | hyperparameters | states of a parameter |"
    yield "| --- | --- | --- |"
    for name, optimizer in OPTIMIZERS.items():
        options = ", ".join(f"`{_option(n, o)}`" for n, o in optimizer.hyperparameters.items())
        yield f"| `{name}` | {options} | {_states(name, optimizer)} |"


def _option(name: str, option: OptionSpec) -> str:
    return name if option.default is None else f"{name} = {option.default!r}"


def _states(name: str, optimizer: Optimizer) -> str:
    """Return the names of the states of a matrix; and of a vector, where those are different."""
    if name == RULES:
        return "those of the [rules](#rules)"
    matrix, vector = (states_of(name, optimizer, shape) for shape in ((4, 4), (4,)))
    return matrix if matrix == vector else f"{matrix}; of a vector {vector}"


def states_of(name: str, optimizer: Optimizer, shape: tuple[int, ...]) -> str:
    given = [f"{n} = 0.5" for n, o in optimizer.hyperparameters.items() if o.default is None]
    dims = range(len(shape))
    module = program([Arg("f32", shape, "w")], lambda b, w: b.reduce(w, "sum", dims))
    add_step(module, ", ".join([name, *given]))
    step = function(compiled(module, ["distributed-autodiff"]), "step")
    keys = [a.key for a in arguments(step) if a.role is Role.STATE]
    return ", ".join(f"`{k.removeprefix('w.')}`" for k in keys if k.startswith("w."))


def modes() -> Iterator[str]:
    yield "| mode | pipeline | what decides |"
    yield "| --- | --- | --- |"
    for name, mode in pipelines.MODES.items():
        yield f"| `{name}` | `{mode.pipeline}` | {mode.does} |"


def cell(text: str) -> str:
    """Return a text as a cell of a table."""
    return text.replace("|", r"\|")


def bugs() -> Iterator[str]:
    """Yield a section for each group of faults of others, with its table."""
    for title, records in GROUPS.items():
        yield f"## {title}\n"
        yield "| reported | program, mesh and layouts | shardir |"
        yield "| --- | --- | --- |"
        for bug in records:
            threads = ", ".join(map(_thread, bug.threads))
            program = _lines([*bug.lines, bug.split])
            result = f"an error: {_lines([bug.prints])}"
            if not bug.refused:
                result = _lines(f"{name}: {value}" for name, value in bug.printed.items())
            yield f"| {escaped(bug.reported)} {threads} | {program} | {result} |"
        yield ""


def _lines(texts: Iterable[str]) -> str:
    """Return lines of code in one cell."""
    return "<br>".join(f"`{cell(text)}`" for text in texts)


def _thread(name: str) -> str:
    """Return the link of OWNER/REPOSITORY#NUMBER; pull requests are found by that of an issue."""
    repository, _, number = name.partition("#")
    short = name.partition("/")[2]
    return f"[{short}](https://github.com/{repository}/issues/{number})"


def escaped(text: str) -> str:
    """Return Markdown of a text: `<` outside of code is no tag."""
    pieces = text.replace("|", r"\|").split("`")
    pieces[::2] = [p.replace("<", r"\<") for p in pieces[::2]]
    return "`".join(pieces)


def records() -> Iterator[str]:
    """Yield the table of the records of benchmarks."""
    yield "| record | command | commit | date |"
    yield "| --- | --- | --- | --- |"
    for file in sorted(RECORDS.glob("*.json")):
        found = json.loads(file.read_text(encoding="utf-8"))
        yield f"| {file.stem} | `{found['command']}` | {found['commit']} | {found['date']} |"


def zoo() -> Iterator[str]:
    """Yield the table of architectures, from the record of `shard-bench zoo`."""
    found = json.loads((RECORDS / "zoo.json").read_text(encoding="utf-8"))
    yield f"`{found['command']}` at {found['commit']}, {found['date']}:"
    yield ""
    yield "| architecture | ops | fallbacks | auto | fsdp | megatron | f32 | f64 |"
    yield "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"
    for r in found["records"]:
        if "ops" not in r:
            yield f"| {r['architecture']} | {r['result']} | | | | | | |"
            continue
        sent = (f"{r[f'bytes_{plan}'] / 1024:,.0f}" for plan in ("auto", "fsdp", "megatron"))
        exact = f"{r['difference_f64']:.0e}" if "difference_f64" in r else "–"
        figures = [r["architecture"], r["ops"], r["fallbacks"], *sent, f"{r['difference']:.0e}"]
        yield f"| {' | '.join(map(str, figures))} | {exact} |"
