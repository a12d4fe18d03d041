"""Self-checking programs of StableHLO, such as those of openxla/stablehlo in stablehlo/testdata.

    python test/support/stablehlo_data.py FOLDER [PART OF NAMES]

`main` computes a value from those of @inputs, and checks it against that of @expected. Here the
inputs become arguments, so that nothing is known of them at import; the function is imported,
and run in the global view of the interpreter.
"""

import os
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import numpy as np
from xdsl.dialects.builtin import ModuleOp

from shardir import ShardirError
from shardir.build import Module
from shardir.frontends.stablehlo.bindings import read_text
from shardir.frontends.stablehlo.complexes import as_complex, as_parts, without_complex
from shardir.frontends.stablehlo.form import (
    HloBlock,
    HloFunction,
    HloOp,
    HloProgram,
    HloValue,
)
from shardir.frontends.stablehlo.importer import ArgumentForm, HloImporter
from shardir.interpret.evaluator import run

CHECK = "check.expect_"
MAX_ULPS, TOLERANCE = 3, 1e-4
"""What the checks `close` and `almost_eq` allow by default."""

Array = np.ndarray


@dataclass
class SelfCheck:
    """A program without its checks, its arguments, and what its results are."""

    program: HloProgram
    arguments: list[Array]
    kinds: list[str]
    """The check of each result: `eq`, `close` or `almost_eq`."""
    expected: list[Array]


@dataclass
class Outcome:
    """What became of a program: equal, unequal, refused by reasons, or failed by an exception."""

    name: str
    status: str
    reasons: Sequence[str] = ()


def self_check(program: HloProgram) -> SelfCheck:
    """Return a program without its checks."""
    main = program.functions["main"]
    known: dict[HloValue, Array] = {}
    arguments: list[HloValue] = []
    ops: list[HloOp] = []
    checks: list[HloOp] = []
    for op in main.block.ops[:-1]:
        callee = op.attributes.get("callee")
        if op.name == "func.call" and callee in ("inputs", "expected"):
            values = _constants(program.functions[callee])
            known.update(zip(op.results, values, strict=True))
            if callee == "inputs":
                arguments += op.results
        elif str(op.attributes.get("call_target_name")).startswith(CHECK):
            checks.append(op)
        else:
            ops.append(op)
    results = [c.operands[0] for c in checks]
    end = HloOp("func.return", results, (), {}, (), None)
    block = HloBlock(arguments, [*ops, end])
    functions = {n: f for n, f in program.functions.items() if n not in ("inputs", "expected")}
    functions["main"] = HloFunction(
        "main", block, [{} for _ in arguments], [{} for _ in results]
    )  # fmt: skip
    return SelfCheck(
        HloProgram(functions),
        [known[a] for a in arguments],
        [c.attributes["call_target_name"].removeprefix(CHECK) for c in checks],
        [known[c.operands[1]] for c in checks],
    )


def _constants(f: HloFunction) -> list[Array]:
    """Return the constants that a function returns."""
    values = {
        op.results[0]: op.attributes["value"]
        for op in f.block.ops
        if op.name == "stablehlo.constant"
    }
    return [values[v] for v in f.block.results]


def stored(values: Array, element: str) -> Array:
    """Return the numbers of an element type as the importer has them."""
    if element == "ui64":
        return values.astype(np.uint64).astype(np.int64)
    if element.startswith("complex"):
        return as_parts(values)
    return values


def differences(
    kind: str, got: Array, expected: Array, element: str
) -> str:  # fmt: skip
    """Return how a result differs from what a check expects; empty if it does not."""
    if got.shape != expected.shape:
        return f"shape {got.shape}, expected {expected.shape}"
    if element.startswith("complex"):
        parts = [(got.real, expected.real), (got.imag, expected.imag)]
        element = element.removeprefix("complex<").removesuffix(">")
        return next((d for g, e in parts if (d := differences(kind, g, e, element))), "")
    is_equal = _is_equal(kind, got, stored(expected, element), element)
    if is_equal.all():
        return ""
    at = tuple(int(i) for i in np.argwhere(~is_equal)[0])
    count = int((~is_equal).sum())
    text = f"{count} of {got.size} differ, at {at} got {got[at]!r}, expected {expected[at]!r}"
    return f"{ROUNDING}: {text}" if _is_rounded(got, expected, element) else text


ROUNDING, MAX_ROUNDING = "rounding", 128
"""What differs by more units in the last place than its check allows, but by no more than these
units of the greatest element, is in another order of sums, or another formula."""


def _is_rounded(got: Array, expected: Array, element: str) -> bool:
    if element[0] not in "fb":
        return False
    unit = {"f64": 2.0**-52, "f32": 2.0**-23, "f16": 2.0**-10, "bf16": 2.0**-7}[element]
    x, y = got.astype(np.float64), expected.astype(np.float64)
    finite = np.isfinite(y)
    if not (np.isfinite(x) == finite).all() or not (x[~finite] == y[~finite]).all():
        return False
    largest = np.abs(y[finite]).max() if finite.any() else 0.0
    allowed = MAX_ROUNDING if element in ("f32", "f64") else 1
    return bool((np.abs(x - y)[finite] <= allowed * unit * largest).all())


def _is_equal(kind: str, got: Array, expected: Array, element: str) -> Array:
    if element[0] not in "fb":
        return np.asarray(got == expected)
    if kind == "eq":
        return np.asarray((got == expected) | (np.isnan(got) & np.isnan(expected)))
    if kind == "almost_eq":
        both = got.astype(np.float64), expected.astype(np.float64)
        with np.errstate(invalid="ignore"):
            near = np.abs(both[0] - both[1]) <= TOLERANCE
        return near | (both[0] == both[1]) | (np.isnan(both[0]) & np.isnan(both[1]))
    both_nan = np.isnan(got) & np.isnan(expected)
    finite = np.isfinite(got) & np.isfinite(expected)
    distance = np.abs(_steps(got, element) - _steps(expected, element))
    return np.where(finite, distance <= MAX_ULPS, both_nan | (got == expected))


def _steps(x: Array, element: str) -> Array:
    """Return the number of floats of the element type from 0 to each."""
    kinds = {"f64": (np.float64, np.int64), "f16": (np.float16, np.int16)}
    kind, integer = kinds.get(element, (np.float32, np.int32))
    bits = np.ascontiguousarray(np.abs(x).astype(kind)).view(integer).astype(np.int64)
    bits = bits >> (16 if element == "bf16" else 0)
    return np.where(np.signbit(x), -bits, bits).reshape(x.shape)


def imported(text: str) -> tuple[HloProgram, ModuleOp]:
    """Return the program of a text, and the module that it becomes."""
    program, module = read_text(text), Module()
    _import(program, module)
    return program, module.module


def _import(program: HloProgram, module: Module) -> None:
    count = len(program.functions["main"].block.arguments)
    roles = [ArgumentForm(f"x{i}") for i in range(count)]
    HloImporter(without_complex(program), module, None).run("main", roles, {})


def check(path: Path) -> Outcome:
    """Import and run a program."""
    try:
        program = read_text(path.read_text())
    except ShardirError as error:
        return Outcome(path.stem, "refused", [f"jaxlib: {error}"])
    of = self_check(program)
    block = of.program.functions["main"].block
    module = Module()
    arguments = [
        stored(x, v.type.element) for x, v in zip(of.arguments, block.arguments, strict=True)
    ]
    elements = [v.type.element for v in block.results]
    try:
        _import(of.program, module)
        with np.errstate(all="ignore"):
            got = run(module.module, "main", arguments)
    except ShardirError as error:
        lines = str(error).splitlines()
        return Outcome(path.stem, "refused", lines[1:] or lines)
    found = [
        differences(kind, as_complex(x) if np.iscomplexobj(y) else x, y, element)
        for kind, x, y, element in zip(of.kinds, got, of.expected, elements, strict=True)
    ]
    wrong = [d for d in found if d]
    status = "equal" if not wrong else ROUNDING
    if any(not d.startswith(ROUNDING) for d in wrong):
        status = "unequal"
    return Outcome(path.stem, status, wrong)


def outcomes(folder: Path, part: str = "") -> Iterator[Outcome]:
    """Check all programs of a folder whose names have a part."""
    for path in sorted(folder.glob("*.mlir")):
        if re.search(part, path.stem):
            try:
                yield check(path)
            except Exception as error:  # a fault of ours is an outcome, and the rest goes on
                yield Outcome(path.stem, "failed", [f"{type(error).__name__}: {error}"])


def table(found: Sequence[Outcome]) -> str:
    """Return the table of outcomes, with refusals by reason."""
    count = Counter(o.status for o in found)
    lines = [f"{len(found)} programs: " + ", ".join(f"{n} {s}" for s, n in count.most_common())]
    for o in found:
        if o.status in (ROUNDING, "unequal", "failed"):
            lines.append(f"  {o.status} {o.name}: {'; '.join(o.reasons)[:200]}")
    reasons = Counter(
        re.sub(r" at \S+:\d+: ", ": ", o.reasons[0].strip()) for o in found if o.status == "refused"
    )
    lines += [f"  {n} refused: {r[:200]}" for r, n in reasons.most_common()]
    return "\n".join(lines)


if __name__ == "__main__":
    arguments: list[Any] = sys.argv[1:]
    print(table([*outcomes(Path(arguments[0]), *arguments[1:2])]))
