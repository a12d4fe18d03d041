"""The laws of ops: what is checked of each op, and what covers it.

A cell says in words what is tried of a law of an op. An empty one is a law that nothing checks, and
a failure. The layouts of a cell are counted from those of op_layouts.py.
"""

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from traceback import extract_tb

from xdsl.dialects.builtin import ModuleOp, StringAttr, SymbolRefAttr
from xdsl.dialects.func import FuncOp
from xdsl.irdl import OptOperandDef, OptPropertyDef, VarOperandDef
from xdsl.utils.exceptions import VerifyException

from shardir.algebra.factors import Factors
from shardir.algebra.layout import Layout
from shardir.algebra.mesh import Mesh
from shardir.diagnostics import Failure, ShardirError
from shardir.dialects import dist
from shardir.dialects.installed import installed
from shardir.dialects.nn.base import Composite, TensorOp, decomposes, is_in_parts
from shardir.dialects.train import GradientOp
from shardir.interpret import run
from shardir.testing.answers import (
    QUOTIENT_ERROR,
    Answer,
    Reference,
    by_torch,
    numpy_answer,
    torch_answer,
)
from shardir.testing.cases import Case
from shardir.testing.execution import on_ranks
from shardir.testing.op_layouts import (
    ODD_MESH,
    WIDE_MESH,
    CaseLayouts,
    TriedLayouts,
    odd_layout,
    with_partial,
)
from shardir.testing.problems import Problem
from shardir.testing.programs import (
    ELEMENTS,
    FLOATS,
    MESH,
    PIPELINE,
    apply,
    compiled,
    elements_of,
    function,
    laid_out,
    layouts,
    program,
    shape_of,
)

GLOBAL, LOCAL = PIPELINE[:3], PIPELINE[3:]
"""The pipeline up to gradients, and after them."""
LOCAL_FIRST = (*PIPELINE[:2], "lower-to-spmd", "distributed-autodiff", "simplify-communication")


def check_op(
    op: type[TensorOp],
    cases: Sequence[Case],
    reference: Reference,
    *,
    emitted: bool = True,
    long: bool = False,
) -> None:
    """Check all laws of an op:

    1. On one device each case, in each element type, has the values and gradients of the reference.
    2. So have all ranks together, however operands and results are laid out: each dimension of each
       split over no axis, one and both, even, uneven and empty shards, sub-axes, explicit sizes.
    3. Partial operands pass through what is linear in them, and are reduced before what is not.
    4. An element type that no case has is refused.
    5. What is printed parses to the same op.
    6. The emitted text computes what `evaluate` does, in every split of the factors, and with
       collectives on all ranks.
    7. The cases show all of this: each operand, attribute and factor varies in them.

    Args:
        op: its class.
        cases: all of this op.
        reference: an independent answer: a function of the op and its operands, arrays of numpy,
            that returns the result or a tuple of results; or `by_torch` of one of tensors.
        emitted: whether programs of torch have the op. This law needs torch.
        long: whether each case is tried with all layouts of small operands, instead of a covering
            choice of them: some ten times as many.

    Raises:
        AssertionError: the laws that do not hold, each with the case, the layouts and the first
            different element; and what the cases do not cover.
    """
    if not isinstance(op, type) or not issubclass(op, TensorOp):
        raise AssertionError(f"expected a class of ops, got {op!r}")
    wrong = [x for x in cases if not isinstance(x, Case) or x.op is not op]
    if wrong or not cases:
        got = [f"one of {x.op.name}" if isinstance(x, Case) else repr(x) for x in wrong]
        raise AssertionError(f"expected cases of {op.name}, got {got[0] if got else 'none'}")
    if emitted and find_spec("torch") is None:
        raise AssertionError("the emitted text needs torch: install it, or give emitted=False")
    is_torch = isinstance(reference, by_torch)
    answer = (torch_answer if is_torch else numpy_answer)({op: reference})
    laws = OpLaws(cases, answer, long=long, least=0.0 if is_torch else QUOTIENT_ERROR)
    broken = {
        "one device and all ranks": laws.of_values(op),
        "sub-axes and explicit sizes": laws.of_odd_layouts(op),
        "partial operands": laws.of_partial_operands(op),
        "annotated partial results": laws.of_partial_results([op]),
        "element types": laws.of_element_types(op),
        "text": laws.of_text(op),
        "emitted text": laws.of_emission(op) if emitted else [],
        "coverage": [*laws.missing([op], emitted), *laws.not_varied(op)],
    }
    report = [f"{law}:{told(errors)}" for law, errors in broken.items() if errors]
    if report:
        raise AssertionError(f"{op.name} breaks laws\n" + "\n".join(report))


def told(errors: Sequence[str], most: int = 3) -> str:
    """Return the first of some errors, with their number."""
    lines = [line for e in errors[:most] for line in e.splitlines()]
    more = [f"and {len(errors) - most} more"] if len(errors) > most else []
    return "".join(f"\n  {line}" for line in [*lines, *more])


def counted(n: int, what: str) -> str:
    """Return a number of things in words; "" for none."""
    return f"{n} {what}{'s' * (n != 1)}" if n else ""


def shown(some: Iterable[Layout | None]) -> str:
    """Return layouts in words."""
    return ", ".join(f"[{l}]" for l in some)


def raised(e: Exception) -> str:
    """Return an unexpected error of a case, with the place where it is raised."""
    places = extract_tb(e.__traceback__)
    place = f" ({places[-1].filename}:{places[-1].lineno})" if places else ""
    return f"raises {type(e).__name__}: {e}{place}"


class OpLaws:
    """The laws of ops on cases, which share their programs, references and layouts. A law returns
    the errors of an op: none where it holds.

    Args:
        answer: what programs of these ops compute.
        least: the tolerance of the gradients of the answer.
        long: whether each case is tried with layouts of its own.
    """

    def __init__(
        self, cases: Sequence[Case], answer: Answer, long: bool = False, least: float = 0.0
    ):
        self.answer, self.long, self.least = answer, long, least
        self.layouts = CaseLayouts(cases, long)

        self._problems: dict[tuple[str, str], Problem] = {}

    def problem(self, case: Case, element: str) -> Problem:
        """Return the op of a case alone, with the expected results. Callers clone its module."""
        key = str(case), element
        if key not in self._problems:
            module = self.layouts.program_of(*key)
            self._problems[key] = case.problem(element, self.answer, self.least, module)
        return self._problems[key]

    def cases_of(self, op: type[TensorOp]) -> list[Case]:
        """Return the cases of an op."""
        return self.layouts.of_op.get(op, [])

    # ---- values ----

    def of_values(self, op: type[TensorOp]) -> list[str]:
        """One device computes what the reference does, forward and gradient; and on any layout of
        operands and results all ranks together do."""
        return [e for case in self.cases_of(op) for e in self._of_values(case)]

    def _of_values(self, case: Case) -> Iterator[str]:
        for element in self.layouts.elements(case):
            first = str(case) in self.layouts.first_of_kin and element == case.elements[0]
            verify = self.long or first
            try:
                p = self.problem(case, element)
                module = p.module.clone()
                if p.wrt:
                    compiled(module, ("distributed-autodiff",), verify=verify)
                wrong = p.errors(module)
            except Exception as e:
                yield f"{case} in {element}, one device: {raised(e)}"
                continue
            if wrong:
                yield f"{case} in {element}, one device: {wrong}"
                continue
            errors = self.errors(p, self.layouts.tried(case, element), verify)
            yield from (f"{case} in {element} on {e}" for e in errors)

    def errors(self, p: Problem, given: Sequence[TriedLayouts], verify: bool = True) -> list[str]:
        """Return the errors with these layouts of the operands, and perhaps of the results. The
        rows of a mesh are functions of one module, one of which is verified if it is to `verify`:
        the verifier takes longer than a pass."""
        found = []
        for mesh in dict.fromkeys(mesh for mesh, _ in given):
            rows = [some for m, some in given if m is mesh]
            try:
                module = compile_rows(p, mesh, rows)
                if verify:
                    function(module, p.name).verify()
                messages = [row_errors(p, module, i) for i in range(len(rows))]
            except Exception:  # of which row?
                messages = [self._alone(p, mesh, some) for some in rows]
            found += [
                f"{mesh}: {shown(some)}: {m}" for some, m in zip(rows, messages, strict=True) if m
            ]
        return found

    def _alone(self, p: Problem, mesh: Mesh, some: Sequence[Layout | None]) -> str:
        try:
            return row_errors(p, compile_rows(p, mesh, [some], verify=True), 0)
        except Exception as e:
            return raised(e)

    def of_odd_layouts(self, op: type[TensorOp]) -> list[str]:
        """Eight ranks, some of them with nothing; differentiated before it is lowered or after."""
        draw = random.Random(op.name)
        wrong = []
        if op not in self.layouts.with_odd:
            return []
        for passes in draw.sample([PIPELINE, LOCAL_FIRST] * 2, 4 if self.long else 1):
            case = draw.choice(self.cases_of(op))
            p = self.problem(case, case.elements[0])
            block = function(p.module, "f").body.block
            assert block.last_op is not None
            given = [odd_layout(draw, shape_of(v)) for v in block.args]
            results = [
                odd_layout(draw, shape_of(v)) if draw.random() < 0.5 or not given else None
                for v in block.last_op.operands
            ]
            try:
                message = p.errors(compiled(laid_out(p.module, ODD_MESH, given, results), passes))
            except Exception as e:
                message = raised(e)
            if message:
                wrong.append(f"{case} on {ODD_MESH}: {shown((*given, *results))}: {message}")
        return wrong

    def of_partial_operands(self, op: type[TensorOp]) -> list[str]:
        """Partial values pass through what is linear in them, and are reduced before what is
        not."""
        wrong = []
        for case, given in self.layouts.partials(op):
            p = self.problem(case, case.elements[0])
            wrong += [f"{case} on {e}" for e in self.errors(p, [(MESH, some) for some in given])]
        return wrong

    def of_partial_results(self, ops: Iterable[type[TensorOp]]) -> list[str]:
        """Results have the partial layouts that are annotated, whether an op is placed or
        decomposed."""
        draw, wrong, (_, b) = random.Random(0), [], MESH.names
        for op in ops:
            case = self.cases_of(op)[0]
            ins, outs = self.layouts.first_signature(str(case))
            given = [draw.choice([l for l in layouts(len(s)) if b not in l.used]) for s in ins]
            results = [with_partial(len(s), (b,), "max", draw) for s in outs]
            p = self.layouts.program_of(str(case), case.elements[0])
            try:
                module = compiled(laid_out(p, MESH, given, results), PIPELINE[:2], verify=False)
            except Exception as e:
                wrong.append(f"{case}: {raised(e)}")
                continue
            end = function(module, "f").body.block.last_op
            assert end is not None
            found = [dist.layout_of(v) for v in end.operands]
            if found != results:
                wrong.append(f"{case}: expected {shown(results)}, got {shown(found)}")
        return wrong

    def of_element_types(self, op: type[TensorOp]) -> list[str]:
        """Types without a case are an error that the user reads, not a surprise."""
        cases, wrong = self.cases_of(op), []
        tested = {e for c in cases for e in c.elements}
        for element in set(ELEMENTS) - tested:
            try:
                program(cases[0].args(element), cases[0].body(element)).verify()
            except (ShardirError, VerifyException):
                continue
            except Exception as e:
                wrong.append(f"{cases[0]} in {element}: expected a ShardirError, {raised(e)}")
            else:
                wrong.append(
                    f"{cases[0]} in {element}: expected an error, as no case has this type, got "
                    "none; add the type to the cases, or refuse it in `infer`"
                )
        return wrong

    def of_text(self, op: type[TensorOp]) -> list[str]:
        """What is printed parses to the same program."""
        from shardir.syntax.parser import parse
        from shardir.syntax.printer import print_module

        dialect = op.name.partition(".")[0]
        if dialect not in installed().tables["dialects"]:
            return [
                f"expected a dialect {dialect} that the parser knows, got none; register or "
                "install the extension that has it"
            ]
        wrong = []
        for case in self.cases_of(op):
            module = self.layouts.program_of(str(case), case.elements[0])
            text = print_module(module)
            try:
                again = print_module(parse(text, f"{case}.ir", verify=True))
            except Exception as e:
                wrong.append(f"{case}: {raised(e)}, in\n{text}")
                continue
            if again != text:
                wrong.append(f"{case}: expected the same text after parsing\n{text}, got\n{again}")
        return wrong

    def of_emission(self, op: type[TensorOp]) -> list[str]:
        """The emitted text is the interpreter, in every split of the factors; and with collectives
        on all ranks."""
        wrong = []
        for case in self.cases_of(op):
            element = case.elements[len(wrong) % len(case.elements)]
            try:
                message = emission_errors(
                    self.problem(case, element), self.layouts.tried(case, element)
                )
            except Exception as e:
                message = raised(e)
            if message:
                wrong.append(f"{case} in {element}: {message}")
        return wrong

    # ---- coverage ----

    @property
    def ops(self) -> list[type[TensorOp]]:
        """The ops that have cases."""
        return [*self.layouts.of_op]

    def cells(
        self, ops: Iterable[type[TensorOp]], emitted: bool = True
    ) -> dict[tuple[type[TensorOp], str], str]:
        """Return the coverage of each law of each op."""
        laws = [law for law in COVERAGE if emitted or law != EMITTED]
        return {(op, law): COVERAGE[law](self, op) for op in ops for law in laws}

    def missing(self, ops: Iterable[type[TensorOp]], emitted: bool = True) -> list[str]:
        """Return the laws that nothing covers."""
        cells = self.cells(ops, emitted).items()
        return [
            f"{op.name}: nothing covers the law that {law}{HINTS.get(law, '')}"
            for (op, law), covered in cells if not covered
        ]  # fmt: skip

    def runs(self, op: type[TensorOp]) -> list[tuple[Case, str, TriedLayouts]]:
        """Return all layouts of an op, each with its case and element type."""
        tried = self.layouts.tried
        return [(c, e, t) for c in self.cases_of(op) for e in c.elements for t in tried(c, e)]

    def not_varied(self, op: type[TensorOp]) -> list[str]:
        """Return the operands, attributes and factors of an op that the cases do not vary."""
        return [*self._operands(op), *self._attributes(op), *self._factors(op)]

    def _operands(self, op: type[TensorOp]) -> Iterator[str]:
        ops = [self.layouts.op_of(str(c), c.elements[0]) for c in self.cases_of(op)]
        for name, definition in op.get_irdl_definition().operands:
            values = [getattr(each, name) for each in ops]
            if isinstance(definition, OptOperandDef):
                if (absent := [v is None for v in values]) and all(absent) | (not any(absent)):
                    is_there = "no" if all(absent) else "every"
                    yield f"{op.name}: {is_there} case has the operand {name}; add another case"
                values = [v for v in values if v is not None]
            elif isinstance(definition, VarOperandDef):
                if len({len(v) for v in values}) == 1:
                    count = counted(len(values[0]), "operand") or "no operand"
                    yield f"{op.name}: {name} is {count} in every case; add one with others"
                values = [v for many in values for v in many]
            shapes = {shape_of(v) for v in values}
            if len(shapes) == 1 and any(shapes):
                yield (
                    f"{op.name}: the operand {name} has the shape {[*shapes.pop()]} in every case; "
                    "add one with another shape"
                )

    def _attributes(self, op: type[TensorOp]) -> Iterator[str]:
        ops = [self.layouts.op_of(str(c), c.elements[0]) for c in self.cases_of(op)]
        for name, definition in op.get_irdl_definition().properties.items():
            if name == "strategy" or name.endswith("SegmentSizes"):
                continue
            values = dict.fromkeys(each.properties.get(name) for each in ops)
            if len(values) == 1:
                (value,) = values
                has = "does not have" if value is None else "has"
                what = "" if value is None else f" = {value}"
                other = "with it" if value is None else "with another value"
                if value is not None and isinstance(definition, OptPropertyDef):
                    other += ", or without it"
                yield f"{op.name}: every case {has} the attribute {name}{what}; add one {other}"

    def _factors(self, op: type[TensorOp]) -> Iterator[str]:
        sizes: dict[str, int] = {}
        split: set[str] = set()
        for case in self.cases_of(op):
            f = self.layouts.factors(str(case), case.elements[0])
            for name, size in f.sizes:
                sizes[name] = max(size, sizes.get(name, 1))
            split |= f.replicate
        for case, element, (mesh, some) in self.runs(op):
            f = self.layouts.factors(str(case), element)
            split |= {name for name, axes in f_axes(f, some, mesh).items() if axes}
        for name, size in sizes.items():
            if size == 1:
                yield f"{op.name}: the factor {name} has the size 1 in every case; add a larger one"
            elif name not in split:
                yield (
                    f"{op.name}: no layout splits the factor {name}, of size {size}; add a case in "
                    "which an axis of 2 or 3 divides it, or let the rule replicate it"
                )


def f_axes(f: Factors, some: Sequence[Layout | None], mesh: Mesh) -> Mapping[str, object]:
    """Return the axes of the factors in layouts of operands and results."""
    values = [*f.operands, *f.results]
    found: dict[str, object] = {}
    for dims, layout in zip(values, some, strict=False):
        if layout is not None:
            for names, axes in zip(dims, layout.dims, strict=True):
                if axes and names:
                    found[names[0]] = axes
    return found


def rows_of(p: Problem, mesh: Mesh, rows: Sequence[Sequence[Layout | None]]) -> ModuleOp:
    """Return a module with @f, @f1, ... and their gradients @g, @g1, ...: the program with the
    layouts of each row."""
    count = len(function(p.module, "f").body.block.args)
    module, *others = (laid_out(p.module, mesh, some[:count], some[count:]) for some in rows)
    for i, other in enumerate(others, 1):
        for op in [*other.body.ops]:
            if isinstance(op, FuncOp):
                op.sym_name = StringAttr(f"f{i}")
            elif isinstance(op, GradientOp):
                op.properties["sym_name"] = StringAttr(f"g{i}")
                op.properties["function"] = SymbolRefAttr(f"f{i}")
            else:
                continue
            op.detach()
            module.body.block.add_op(op)
    return module


def compile_rows(
    p: Problem, mesh: Mesh, rows: Sequence[Sequence[Layout | None]], verify: bool = False
) -> ModuleOp:
    """Return `rows_of`, compiled; of a function with a gradient, which has all results of both, the
    gradient alone."""
    module = compiled(rows_of(p, mesh, rows), GLOBAL, verify=False)
    if p.wrt:
        for op in [*module.body.ops]:
            if isinstance(op, FuncOp) and not op.sym_name.data.startswith(p.name):
                module.body.block.erase_op(op)
    return compiled(module, LOCAL, verify=verify)


def row_errors(p: Problem, module: ModuleOp, i: int) -> str:
    """Return the difference of the results of row `i` of `rows_of`, or ""."""
    name = f"{p.name}{i or ''}"
    inputs = function(module, name).function_type.inputs.data
    return p.differences(run(module, name, p.arguments[: len(inputs)]))


def emission_errors(p: Problem, tried: Sequence[TriedLayouts]) -> str:
    """Return how the text of the op of a problem differs from the interpreter: on one device, in
    each split of its factors, and with gradient and collectives in the last of the layouts that are
    tried; or ""."""
    from shardir.testing import emission

    op = function(p.module, "f").body.block.first_op
    assert isinstance(op, TensorOp)
    given = p.arguments[: len(op.operands)]
    alone = ModuleOp([function(p.module, "f").clone()])
    if message := emission.op_errors(alone, given):
        return f"on one device, {message}"
    want = run(alone, "f", given)
    for i, placement in enumerate(() if isinstance(op, Composite) else emission.placements(op)):
        alone_on = emission.DIAGONALS[i % 2]
        if message := emission.placement_errors(op, placement, given, want, alone_on):
            return f"{', '.join(map(str, placement.operands))}: {message}"
    for mesh, some in tried[-1:]:
        module = compiled(laid_out(p.module, mesh, some[: len(given)], some[len(given) :]))
        expected = run(module, p.name, p.arguments)
        found = on_ranks(module, p.arguments, p.name)
        for i, (x, y, e) in enumerate(zip(found, expected, p.elements, strict=True)):
            if message := emission.far(x, y, e):
                return f"on {mesh}: {', '.join(map(str, some))}: result {i} of @{p.name} {message}"
    return ""


# ---- what covers each law ----


def _elements(laws: OpLaws, op: type[TensorOp]) -> str:
    return " ".join(dict.fromkeys(e for c in laws.cases_of(op) for e in c.elements))


def _gradient(laws: OpLaws, op: type[TensorOp]) -> str:
    """Return the number of cases whose gradients are the reference's; or why there is none."""
    cases = laws.cases_of(op)
    n = sum(bool(c.wrt(e)) for c in cases for e in c.elements)
    if n or not cases:
        return counted(n, "gradient")
    floats = [
        (c, e, i)
        for c in cases
        for e in c.elements
        for i, a in enumerate(c.args(e))
        if a.element in FLOATS
    ]
    if not floats:
        return "none: no float operand"
    case, element, first = floats[0]
    module = program(case.args(element), case.body(element), [first])
    results = function(module, "f").function_type.outputs.data
    if not any(e in FLOATS for e in elements_of(results)):
        return "none: no float result"
    try:
        apply(module, "distributed-autodiff")
    except Failure:
        return "none: an error says so"
    return ""


def _over(mesh: Mesh) -> Callable[[OpLaws, type[TensorOp]], str]:
    return lambda laws, op: counted(sum(m is mesh for _, _, (m, _) in laws.runs(op)), "layout")


def _shards(test: Callable[[int, int], bool]) -> Callable[[OpLaws, type[TensorOp]], str]:
    """Return the number of layouts that cut a dimension of n rows over k devices so that `test`
    holds."""

    def cell(laws: OpLaws, op: type[TensorOp]) -> str:
        total, scalars = 0, True
        for case, element, (mesh, some) in laws.runs(op):
            ins, outs = laws.layouts.signature(str(case), element)
            shapes = (*ins, *outs)
            scalars = scalars and not any(shapes)
            total += any(
                test(s[d], mesh.extent(axes))
                for s, l in zip(shapes, some, strict=False)
                if l is not None
                for d, axes in enumerate(l.dims)
            )
        return counted(total, "layout") or ("none: scalars" if scalars else "")

    return cell


def uneven(n: int, devices: int) -> bool:
    """Whether shards of a dimension differ."""
    return n % devices != 0


def empty(n: int, devices: int) -> bool:
    """Whether ceil division leaves the last device nothing."""
    return -(-n // devices) * (devices - 1) >= n > 0


def _partial(laws: OpLaws, op: type[TensorOp]) -> str:
    cases = laws.cases_of(op)
    if not any(c.operands for c in cases):
        return "none: no operand" if cases else ""
    return counted(sum(len(some) for _, some in laws.layouts.partials(op)), "layout")


def _in_parts(laws: OpLaws, op: type[TensorOp]) -> str:
    """Return the number of layouts that split what the op needs unsharded."""
    if issubclass(op, Composite):
        return "is its parts"
    if not decomposes(op):
        return "none: has no parts"
    total = 0
    for case, element, (_, some) in laws.runs(op):
        f = laws.layouts.factors(str(case), element)
        total += is_in_parts(op, f, [l for l in some[: len(f.operands)] if l is not None])
    return counted(total, "layout")


def _emitted(laws: OpLaws, op: type[TensorOp]) -> str:
    """Its text against the interpreter, on every split of its factors."""
    from shardir.testing.emission import texts

    return "is its parts" if issubclass(op, Composite) else "each split" if op in texts() else ""


EMITTED = "emitted text is the interpreter"

COVERAGE: dict[str, Callable[[OpLaws, type[TensorOp]], str]] = {
    "one device is the reference": _elements,
    "gradient is the reference's": _gradient,
    "all ranks are one device, 2x2": _over(MESH),
    "2x3": _over(WIDE_MESH),
    "uneven shards": _shards(uneven),
    "empty shards": _shards(empty),
    "partial operands": _partial,
    "split where it needs no split": _in_parts,
    EMITTED: _emitted,
}
"""Of each law what covers it, in words."""

HINTS = {
    "gradient is the reference's": ": let `partials` raise an error, or give a case gradient=True",
    "uneven shards": ": add a case with a dimension of 5 or 7",
    "empty shards": ": add a case with a dimension of 5 or less that can be split over 6 devices",
    EMITTED: ": give its text to Extension(torch=...), or emitted=False",
}
"""What to do about a law that nothing covers."""
