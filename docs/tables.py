"""The tables of the documentation, from the code: `python docs/tables.py NAME`, where NAME is nn,
ops, dist, train, passes, modes, invariants or mutants.

`python test/project/test_docs.py --regenerate` puts them into the pages.
"""

import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module
from itertools import product
from pathlib import Path

from xdsl.context import Context
from xdsl.dialects.builtin import (
    DenseIntOrFPElementsAttr,
    FloatAttr,
    IntegerAttr,
    ModuleOp,
    StringAttr,
    SymbolRefAttr,
    TensorType,
    UnitAttr,
    f32,
    i1,
    i32,
)
from xdsl.dialects.func import FuncOp
from xdsl.ir import Attribute, Dialect
from xdsl.irdl import IRDLOperation

from shardir import pipelines
from shardir.backend.torch.emit.program import program_text
from shardir.diagnostics import Failure, ParseErrors, ShardirError
from shardir.diagnostics.codes import SECTIONS
from shardir.dialects import dist, nn, train
from shardir.dialects.nn.base import TensorOp, decomposes
from shardir.dialects.text import TextAttr
from shardir.passes import PASSES
from shardir.syntax.parser import parse

NAMES = "nn, ops, dist, train, passes, modes, invariants, mutants"
TAIL = re.compile(r"\s*(\(`strategy` \$strategy\^\)\? )?attr-dict.*$")

EXAMPLES = """
nn.einsum "bik,bkj->bij" %0, %1 : (tensor<8x4x5xf32>, tensor<8x5x6xf32>) -> tensor<8x4x6xf32>
nn.matmul %0, %1 : (tensor<4x5xf32>, tensor<5x6xf32>) -> tensor<4x6xf32>
nn.convert %0 : (tensor<4x8xi32>) -> tensor<4x8xf32>
nn.compare <lt> %0, %1 : (tensor<4x8xf32>, tensor<4x8xf32>) -> tensor<4x8xi1>
nn.clamp %0 min 0.0 max 1.0 : (tensor<4x8xf32>) -> tensor<4x8xf32>
nn.nan_to_num %0 nan 0.0 posinf 1.0 neginf -1.0 : (tensor<4x8xf32>) -> tensor<4x8xf32>
nn.triu %0 diagonal 0 : (tensor<4x8xf32>) -> tensor<4x8xf32>
nn.leaky_relu %0 slope 0.01 : (tensor<4x8xf32>) -> tensor<4x8xf32>
nn.elu %0 alpha 1.0 : (tensor<4x8xf32>) -> tensor<4x8xf32>
nn.hardtanh %0 min -1.0 max 1.0 : (tensor<4x8xf32>) -> tensor<4x8xf32>
nn.tril %0 diagonal 0 : (tensor<4x8xf32>) -> tensor<4x8xf32>
nn.select %0, %1, %2 : (tensor<4x8xi1>, tensor<4x8xf32>, tensor<4x8xf32>) -> tensor<4x8xf32>
nn.reduce <sum> %0 dims <1> : (tensor<4x8xf32>) -> tensor<4xf32>
nn.logsumexp %0 dims <1> : (tensor<4x8xf32>) -> tensor<4xf32>
nn.var %0 dims <1> correction 1 : (tensor<4x8xf32>) -> tensor<4xf32>
nn.std %0 dims <1> correction 1 : (tensor<4x8xf32>) -> tensor<4xf32>
nn.argmax %0 axis 1 : (tensor<4x8xf32>) -> tensor<4xi64>
nn.argmin %0 axis 1 : (tensor<4x8xf32>) -> tensor<4xi64>
nn.reshape %0 : (tensor<4x6xf32>) -> tensor<2x12xf32>
nn.transpose %0 perm <1, 0> : (tensor<4x8xf32>) -> tensor<8x4xf32>
nn.broadcast %0 dims <1> : (tensor<8xf32>) -> tensor<4x8xf32>
nn.conv %0, %1 stride <2, 2> padding <1, 1, 1, 1> : (tensor<4x8x16x16xf32>, tensor<6x8x3x3xf32>) -> tensor<4x6x8x8xf32>
nn.conv_transpose %0, %1 stride <2> padding <1, 1> : (tensor<4x6x8xf32>, tensor<6x8x3xf32>) -> tensor<4x8x16xf32>
nn.conv_weight %0, %1 stride <2> padding <1, 1> : (tensor<4x8x16xf32>, tensor<4x6x8xf32>) -> tensor<6x8x3xf32>
nn.batch_norm %0, %1, %2, %3, %4 momentum 0.1 eps 1.0e-5 : (tensor<4x8xf32>, tensor<8xf32>, tensor<8xf32>, tensor<8xf32>, tensor<8xf32>) -> (tensor<4x8xf32>, tensor<8xf32>, tensor<8xf32>)
nn.batch_norm_inference %0, %1, %2, %3, %4 eps 1.0e-5 : (tensor<4x8xf32>, tensor<8xf32>, tensor<8xf32>, tensor<8xf32>, tensor<8xf32>) -> tensor<4x8xf32>
nn.group_norm %0, %1, %2 groups 2 eps 1.0e-5 : (tensor<4x8x3xf32>, tensor<8xf32>, tensor<8xf32>) -> tensor<4x8x3xf32>
nn.rms_norm %0, %1 eps 1.0e-5 : (tensor<4x8xf32>, tensor<8xf32>) -> tensor<4x8xf32>
nn.max_pool %0 window <2> stride <2> : (tensor<4x8x6xf32>) -> tensor<4x8x3xf32>
nn.max_pool_grad %0, %1 window <2> stride <2> : (tensor<4x8x6xf32>, tensor<4x8x3xf32>) -> tensor<4x8x6xf32>
nn.avg_pool %0 window <2> stride <2> : (tensor<4x8x6xf32>) -> tensor<4x8x3xf32>
nn.adaptive_avg_pool %0 size <3> : (tensor<4x8x6xf32>) -> tensor<4x8x3xf32>
nn.unfold %0 dim 0 step 2 offset -1 : (tensor<8x4xf32>) -> tensor<4x4x4xf32>
nn.fold %0 dim 0 step 2 offset -1 : (tensor<4x4x4xf32>) -> tensor<8x4xf32>
nn.slice %0 starts <1, 0> limits <4, 2> strides <1, 1> : (tensor<4x8xf32>) -> tensor<3x2xf32>
nn.pad %0 low <0, 2> high <0, 1> : (tensor<4x8xf32>) -> tensor<4x11xf32>
nn.flip %0 dims <1> : (tensor<4x8xf32>) -> tensor<4x8xf32>
nn.roll %0 shifts <0, 3> : (tensor<4x8xf32>) -> tensor<4x8xf32>
nn.tile %0 repeats <1, 2> : (tensor<4x8xf32>) -> tensor<4x16xf32>
nn.repeat_interleave %0 repeats 2 axis 1 : (tensor<4x8xf32>) -> tensor<4x16xf32>
nn.concat %0, %1 axis 1 : (tensor<4x8xf32>, tensor<4x2xf32>) -> tensor<4x10xf32>
nn.stack %0, %1 axis 0 : (tensor<4x8xf32>, tensor<4x8xf32>) -> tensor<2x4x8xf32>
nn.split %0 sizes <3, 5> axis 1 : (tensor<4x8xf32>) -> (tensor<4x3xf32>, tensor<4x5xf32>)
nn.gather %0, %1 axis 0 : (tensor<9x4xf32>, tensor<5x3xi32>) -> tensor<5x3x4xf32>
nn.gather_grad %0, %1 axis 0 : (tensor<5x3xi32>, tensor<5x3x4xf32>) -> tensor<9x4xf32>
nn.pick %0, %1 : (tensor<4x8xf32>, tensor<4xi32>) -> tensor<4xf32>
nn.pick_grad %0, %1 : (tensor<4xi32>, tensor<4xf32>) -> tensor<4x8xf32>
nn.take_along_axis %0, %1 axis 1 : (tensor<4x8xf32>, tensor<4x3xi32>) -> tensor<4x3xf32>
nn.scatter_add %0, %1 axis 1 : (tensor<4x3xi32>, tensor<4x3xf32>) -> tensor<4x8xf32>
nn.one_hot %0 : (tensor<4xi32>) -> tensor<4x8xf32>
nn.cumsum %0 axis 1 : (tensor<4x8xf32>) -> tensor<4x8xf32>
nn.sort %0 axis 1 : (tensor<4x8xf32>) -> (tensor<4x8xf32>, tensor<4x8xi64>)
nn.argsort %0 axis 1 : (tensor<4x8xf32>) -> tensor<4x8xi64>
nn.topk %0 k 2 axis 1 : (tensor<4x8xf32>) -> (tensor<4x2xf32>, tensor<4x2xi64>)
nn.softmax %0 axis 1 : (tensor<4x8xf32>) -> tensor<4x8xf32>
nn.softmax_grad %0, %1 axis 1 : (tensor<4x8xf32>, tensor<4x8xf32>) -> tensor<4x8xf32>
nn.log_softmax %0 axis 1 : (tensor<4x8xf32>) -> tensor<4x8xf32>
nn.log_softmax_grad %0, %1 axis 1 : (tensor<4x8xf32>, tensor<4x8xf32>) -> tensor<4x8xf32>
nn.cross_entropy %0, %1 : (tensor<4x8xf32>, tensor<4xi32>) -> tensor<4xf32>
nn.cross_entropy_grad %0, %1, %2 : (tensor<4x8xf32>, tensor<4xi32>, tensor<4xf32>) -> tensor<4x8xf32>
nn.cross_entropy_loss <mean> %0, %1 : (tensor<4x8xf32>, tensor<4xi32>) -> tensor<f32>
nn.nll_loss <none> %0, %1 : (tensor<4x8xf32>, tensor<4xi32>) -> tensor<4xf32>
nn.mse_loss <mean> %0, %1 : (tensor<4x8xf32>, tensor<4x8xf32>) -> tensor<f32>
nn.l1_loss <mean> %0, %1 : (tensor<4x8xf32>, tensor<4x8xf32>) -> tensor<f32>
nn.huber_loss <mean> %0, %1 delta 1.0 : (tensor<4x8xf32>, tensor<4x8xf32>) -> tensor<f32>
nn.smooth_l1_loss <mean> %0, %1 beta 1.0 : (tensor<4x8xf32>, tensor<4x8xf32>) -> tensor<f32>
nn.bce_loss <mean> %0, %1 : (tensor<4x8xf32>, tensor<4x8xf32>) -> tensor<f32>
nn.bce_with_logits_loss <mean> %0, %1 : (tensor<4x8xf32>, tensor<4x8xf32>) -> tensor<f32>
nn.soft_margin_loss <mean> %0, %1 : (tensor<4x8xf32>, tensor<4x8xf32>) -> tensor<f32>
nn.kl_div_loss <mean> %0, %1 : (tensor<4x8xf32>, tensor<4x8xf32>) -> tensor<f32>
nn.attention %0, %1, %2 causal : (tensor<8x6x4xf32>, tensor<2x6x4xf32>, tensor<2x6x5xf32>) -> tensor<8x6x5xf32>
nn.attention_grad %0, %1, %2, %3 causal : (tensor<8x6x4xf32>, tensor<2x6x4xf32>, tensor<2x6x5xf32>, tensor<8x6x5xf32>) -> (tensor<8x6x4xf32>, tensor<2x6x4xf32>, tensor<2x6x5xf32>)
nn.rotary <halves> %0, %1 base 1.0e4 : (tensor<2x5x6xf32>, tensor<5xi32>) -> tensor<2x5x6xf32>
nn.sinusoid <interleaved> %0 base 1.0e4 : (tensor<5xi32>) -> tensor<5x6xf32>
nn.random <normal> %0 stream 1 : (tensor<i64>) -> tensor<4x8xf32>
nn.dropout %0, %1 p 0.1 stream 2 : (tensor<4x8xf32>, tensor<i64>) -> tensor<4x8xf32>
nn.layer_norm %0, %1, %2 eps 1.0e-5 : (tensor<4x8xf32>, tensor<8xf32>, tensor<8xf32>) -> tensor<4x8xf32>
nn.layer_norm_grad %0, %1, %2 eps 1.0e-5 : (tensor<4x8xf32>, tensor<8xf32>, tensor<4x8xf32>) -> (tensor<4x8xf32>, tensor<8xf32>, tensor<8xf32>)
nn.custom "acme.twice"(%0) : (tensor<4x8xf32>) -> tensor<4x8xf32>
nn.constant dense<0.0> : tensor<4x8xf32> -> tensor<4x8xf32>
nn.iota dim 1 -> tensor<4x8xi32>
"""  # noqa: E501
"""An example of each op whose operands are not matrices of one shape."""

nn.register_custom_op("acme.twice", torch="acme.kernels:twice")


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
    bases = definition.properties[name].constr.get_bases() or ()
    if SymbolRefAttr in bases:
        return f"@{name}"
    if any(issubclass(b, TextAttr) for b in bases):
        return f"<{name}>"
    return next((shown for kind, shown in KINDS.items() if kind in bases), name)


def summary(op: type) -> str:
    """Return the first paragraph of a docstring, on one line."""
    return " ".join((op.__doc__ or "").split("\n\n")[0].split()).rstrip(".")


def _from_text(line: str) -> TensorOp:
    head = line.split(" ", 1)[0]
    types = line.partition(" : (")[2].partition(") -> ")[0]
    operands = ", ".join(f"%{i}: {t}" for i, t in enumerate(types.split(", ")) if t)
    module = parse(f"func.func @f({operands}) {{\n  {_results(line)} = {line}\n  func.return\n}}")
    return next(o for o in module.walk() if o.name == head and isinstance(o, TensorOp))


def _results(line: str) -> str:
    out = line.rsplit("-> ", 1)[1]
    return f"%r:{out.count('tensor<')}" if out.startswith("(") else "%r"


def factors(op: type[TensorOp], lines: dict[str, str]) -> str:
    """Return the factors of the op on its example, or on matrices of one shape."""
    if op.name in lines:
        text = str(_from_text(lines[op.name]).factors())
    else:
        n = len(op.get_irdl_definition().operands)
        text = ""
        for kinds in product((f32, i32, i1), repeat=n):
            types = [TensorType(k, (4, 8)) for k in kinds]
            try:
                text = str(op.rule(types, op.infer(types, {}), {}))
                break
            except (ShardirError, KeyError):
                continue
    return re.sub(r" \{[^}]*\}", "", text).strip()


def rows(dialect: Dialect, *, with_factors: bool) -> Iterator[str]:
    lines = {line.split(" ", 1)[0]: line for line in EXAMPLES.strip().splitlines()}
    yield "| op | meaning |" + (" factors on an example |" if with_factors else "")
    yield "| --- | --- |" + (" --- |" if with_factors else "")
    for op in dialect.operations:
        assert issubclass(op, IRDLOperation)
        row = f"| `{syntax(op)}` | {summary(op).replace('|', chr(92) + '|')} |"
        if with_factors:
            shown = factors(op, lines) if issubclass(op, TensorOp) else ""
            row += f" `{shown}` |" if shown else " |"
        yield row


# ---- the ops, property by property ----

ELEMENTS = ("f64", "f32", "bf16", "f16", "i64", "i32", "i1")


def line_of(op: type[TensorOp], lines: dict[str, str]) -> str:
    """Return an example of the op: of EXAMPLES, or on matrices of one shape."""
    if op.name in lines:
        return lines[op.name]
    n = len(op.get_irdl_definition().operands)
    for kinds in product(("f32", "i32", "i1"), repeat=n):
        given = [f"tensor<4x8x{k}>" for k in kinds]
        types = [TensorType({"f32": f32, "i32": i32, "i1": i1}[k], (4, 8)) for k in kinds]
        try:
            outs = [str(t) for t in op.infer(types, {})]
        except (ShardirError, KeyError):
            continue
        names, out = ", ".join(f"%{i}" for i in range(n)), ", ".join(outs)
        out = f"({out})" if len(outs) > 1 else out
        return f"{op.name} {names} : ({', '.join(given)}) -> {out}"
    raise SystemExit(f"expected an example of {op.name}; add one to EXAMPLES of docs/tables.py")


def program(line: str, request: str = "") -> ModuleOp:
    """Return a module with a function @f of the op alone, and a request."""
    types = line.partition(" : (")[2].partition(") -> ")[0]
    operands = ", ".join(f"%x{i}: {t}" for i, t in enumerate(types.split(", ")) if t)
    out = line.rsplit("-> ", 1)[1].strip("()")
    n = out.count("tensor<")
    names = ", ".join(f"%y#{i}" for i in range(n)) if n > 1 else "%y"
    body = re.sub(r"%(\d)", r"%x\1", line)
    return parse(
        f"func.func @f({operands}) -> ({out}) {{\n  {'%y:' + str(n) if n > 1 else '%y'} = {body}\n"
        f"  func.return {names} : {out}\n}}\n{request}",
        verify=True,
    )


def elements(line: str) -> str:
    """Return the element types of the op, in place of the example's floats (or integers, or i1)."""
    shown = next(e for e in ("f32", "i64", "i32", "i1") if f"{e}>" in line)
    found = []
    for e in ELEMENTS:
        other = line.replace(f"{shown}>", f"{e}>")
        with suppress(ShardirError, ParseErrors, Failure):
            program(other if e[0] != "i" else other.replace("dense<0.0>", "dense<0>"))
            found.append(e)
    return " ".join(found)


def gradient(op: type[TensorOp], line: str) -> str:
    """Return `yes`, or why the op has no gradient."""
    operands, results = line.partition(" : (")[2].partition(") -> ")[0], line.rpartition("-> ")[2]
    floats = [i for i, t in enumerate(re.findall(r"tensor<[^>]*>", operands)) if "f32" in t]
    if not floats:
        return "-: no float operand"
    if "f32" not in results:
        return "-: no float result"
    try:
        module = program(line, f"train.gradient @g of @f wrt <{floats[0]}>")
        PASSES["distributed-autodiff"]()().apply(Context(), module)
    except Failure:
        return "-: [G8]"
    return "yes"


def splits(op: type[TensorOp], line: str) -> str:
    """Return the factors that can be split, and how the others are handled."""
    found = program(line).body.block.last_op
    assert isinstance(found, FuncOp)
    first = found.body.block.first_op
    assert isinstance(first, TensorOp)
    factors = first.factors()
    unsharded = [f for f, _ in factors.sizes if f in factors.replicate]
    free = [f for f, _ in factors.sizes if f not in factors.replicate]
    parts = ["all" if not unsharded else ", ".join(free)] if free else []
    if unsharded:
        how = "by decomposition" if decomposes(op) else "gathered"
        parts.append(f"{', '.join(unsharded)} {how}")
    return "; ".join(parts) or "nothing to split"


def torch_text(line: str) -> str:
    """Return the Python that is emitted for the op on one device."""
    text = program_text(program(line)).partition("def f(")[2].partition("\n\n\n")[0]
    body = [x.strip() for x in text.splitlines()[1:]]
    body = [x for x in body if x and not x.startswith("#")]
    return "; ".join(x for x in body if not x.startswith("return")) or body[-1]


def properties() -> Iterator[str]:
    lines = {line.split(" ", 1)[0]: line for line in EXAMPLES.strip().splitlines()}
    yield "| op | gradient | split | element types | in torch, on an example |"
    yield "| --- | --- | --- | --- | --- |"
    for op in nn.Nn.operations:
        assert issubclass(op, TensorOp)
        line = line_of(op, lines)
        cells = [gradient(op, line), splits(op, line), elements(line), f"`{torch_text(line)}`"]
        yield f"| `{op.name}` | {' | '.join(c.replace('|', chr(92) + '|') for c in cells)} |"


def passes() -> Iterator[str]:
    yield "| pass | from -> to | file |"
    yield "| --- | --- | --- |"
    for name in pipelines.in_order():
        module = PASSES[name]().__module__
        first = (import_module(module).__doc__ or "").split("\n\n")[0]
        sentence = " ".join(first.split()).partition(": ")[2].rstrip(".")
        yield f"| `{name}` | {sentence} | passes/{module.rpartition('.')[2]}.py |"


def modes() -> Iterator[str]:
    yield "| mode | pipeline | what decides |"
    yield "| --- | --- | --- |"
    for name, mode in pipelines.MODES.items():
        yield f"| `{name}` | `{mode.pipeline}` | {mode.does} |"


def invariants() -> Iterator[str]:
    """Yield a section for each kind of code, with its table."""
    for section, codes in SECTIONS.items():
        yield f"## {section}\n"
        yield "| code | invariant | fix |"
        yield "| --- | --- | --- |"
        for code, entry in codes.items():
            yield f"| [{code}] | {_escaped(entry.invariant)} | {_escaped(entry.fix)} |"
        yield ""


def _escaped(text: str) -> str:
    """Return Markdown of a text: `<` outside of code is no tag."""
    pieces = text.replace("|", r"\|").split("`")
    pieces[::2] = [p.replace("<", r"\<") for p in pieces[::2]]
    return "`".join(pieces)


def planted() -> Iterator[str]:
    """Yield the table of mutants."""
    sys.path.append(str(Path(__file__).parents[1] / "test"))
    from mutants import mutants

    yield "| package | mutant | error |"
    yield "| --- | --- | --- |"
    for m in mutants():
        yield f"| {m.package} | {_escaped(m.name)} | {_escaped(m.breaks)} |"


def table(name: str) -> str:
    """The lines of one table."""
    match name:
        case "nn":
            return "\n".join(rows(nn.Nn, with_factors=True))
        case "ops":
            return "\n".join(properties())
        case "dist":
            return "\n".join(rows(dist.Dist, with_factors=False))
        case "train":
            return "\n".join(rows(train.Train, with_factors=False))
        case "passes":
            return "\n".join(passes())
        case "modes":
            return "\n".join(modes())
        case "invariants":
            return "\n".join(invariants()).rstrip()
        case "mutants":
            return "\n".join(planted())
        case _:
            raise SystemExit(f"expected the name of a table, got {name!r}; use one of {NAMES}")


if __name__ == "__main__":
    print(table(sys.argv[1] if len(sys.argv) > 1 else ""))
