"""The executable tests of Shardy's partitioner, from a checkout of openxla/shardy: SHARDY=FOLDER, a
bare repository too. Each has functions with shardings, and a main that runs them on the shards of
its devices and checks their results. Here main is imported, and all that it has is known: so its
checks are made while it is.
"""

import os
import re
import subprocess
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from support.extent import long_form
from xdsl.context import Context
from xdsl.ir import OpResult, SSAValue

from shardir.algebra.layout import replicated
from shardir.algebra.sharding import Sharding
from shardir.build import Module, Value
from shardir.dialects import dist
from shardir.dialects.nn.base import TensorOp
from shardir.dialects.nn.types import unsharded_type
from shardir.frontends.stablehlo import complexes, ops
from shardir.frontends.stablehlo.complexes import is_complex, without_complex
from shardir.frontends.stablehlo.form import HloProgram
from shardir.frontends.stablehlo.importer import SHARDING, ArgumentForm, HloImporter
from shardir.frontends.stablehlo.meshes import MESH_NAME, device_ids_of, meshes_of
from shardir.frontends.stablehlo.translation import OpTranslation
from shardir.frontends.stablehlo.types import DTYPES
from shardir.interpret.evaluator import GlobalView, _LocalEvaluator, function
from shardir.interpret.values import round_to_element
from shardir.rewriting.registry import run_pipeline

SHARDY = os.environ.get("SHARDY", "")
FOLDER = "shardy/dialect/sdy/transforms/export/test"
LOWERING = "propagate-strategies,insert-redistributions,lower-to-spmd"


def git(*arguments: str) -> str:
    return subprocess.run(
        ["git", "-C", SHARDY, *arguments], capture_output=True, text=True, check=True
    ).stdout


def sources() -> list[str]:
    if not SHARDY:
        return []
    files = git("ls-tree", "-r", "--name-only", "HEAD", FOLDER).splitlines()
    return [f for f in files if "/executable_" in f and f.endswith(".mlir")]


def parts(text: str) -> tuple[str, str, dict[str, str]]:
    """Return the functions with shardings, the main, and the names of functions in main."""
    _, first, second = re.split(r"^//--- \w+\.mlir$", text, flags=re.M)
    renamed = {new: old for old, new in re.findall(r"sed 's/(\w+)/(\w+)/g'", text)}
    return first, second, renamed


def read(text: str) -> HloProgram:
    from jaxlib.mlir import ir
    from jaxlib.mlir._mlir_libs import _jax_mlir_ext
    from jaxlib.mlir.dialects import chlo, sdy, stablehlo

    from shardir.frontends.stablehlo.bindings import read_module

    context = ir.Context()
    context.allow_unregistered_dialects = True
    registry = ir.DialectRegistry()
    _jax_mlir_ext.register_dialects(registry)
    context.append_dialect_registry(registry)
    for dialect in (stablehlo, chlo, sdy):
        dialect.register_dialect(context)
    context.load_all_available_dialects()
    return read_module(ir.Module.parse(text, context))


def pretty(text: str) -> str:
    """Return a text with the checks in the generic form."""
    return re.sub(
        r"(?m)^(\s*)(check\.\w+)\s+(%[^:]*):\s*(.*)$",
        lambda m: (
            f'{m[1]}"{m[2]}"({m[3].strip()}) : ({", ".join([m[4].split(", ")[0]] * 2)}) -> ()'
        ),
        text,
    )


def numbers(v: SSAValue) -> np.ndarray:
    """Evaluate a value without arguments."""
    assert isinstance(v, OpResult)
    op = v.owner
    if isinstance(op, dist.PropagationBarrierOp):
        return numbers(op.value)
    assert isinstance(op, TensorOp), op
    out = op.evaluate(GlobalView(), *map(numbers, op.operands))
    outs = out if isinstance(out, tuple) else (out,)
    result = outs[[*op.results].index(v)]
    return round_to_element(result, unsharded_type(v).element_type)


class Partitioned:
    """A function with shardings, on the shards of all ranks."""

    def __init__(self, program: HloProgram, name: str):
        program.functions["main"] = program.functions.pop(name)
        self.is_complex = [*map(is_complex, program.functions["main"].block.arguments)]
        program = without_complex(program)
        f, meshes = program.functions["main"], meshes_of(program)
        texts = [str(a) for a in (f.arguments, f.results, f.block)]
        used = [n for n in meshes if any(f"@{n}," in t for t in texts)] or [*meshes]
        mesh = meshes[used[0]]
        module = Module(mesh=mesh)
        importer = HloImporter(program, module, mesh)

        def of(attributes: Any, rank: int) -> Sharding | None:
            text = attributes.get(SHARDING)
            return importer.sharding(text) if text else Sharding(replicated(mesh.name, rank))

        roles = [
            ArgumentForm(f"a{i}", of(a, len(v.type.shape)))
            for i, (a, v) in enumerate(zip(f.arguments, f.block.arguments, strict=True))
        ]
        for k, (attributes, v) in enumerate(zip(f.results, f.block.results, strict=True)):
            dims = ", ".join(["{}"] * len(v.type.shape))
            whole = {SHARDING: f"#sdy.sharding<@{mesh.name}, [{dims}]>"}
            f.results = [*f.results[:k], whole | dict(attributes), *f.results[k + 1 :]]
        importer.run(name, roles, {})
        self.module, self.name = module.module, name
        self.ids = importer.device_ids or [*range(mesh.size)]
        own = [MESH_NAME.findall(attributes[SHARDING])[0] for attributes in f.results]
        self.result_ids = [
            (importer.meshes.is_reordered(n) and device_ids_of(program.meshes[n])) or self.ids
            for n in own
        ]
        run_pipeline(LOWERING, Context(), self.module)
        self.mesh = mesh

    def __call__(self, operands: Sequence[Sequence[np.ndarray]]) -> list[list[np.ndarray]]:
        """Run on the operands of each device; return its results."""
        evaluator = _LocalEvaluator(self.module, {self.mesh.name: self.mesh})
        f = function(self.module, self.name)
        evaluator.mesh = self.mesh
        by_rank = [self._with_pairs(operands[device]) for device in self.ids]
        results = evaluator.call_parts(f, [list(x) for x in zip(*by_rank, strict=True)])
        shards = [
            [r[ids.index(d)] for r, ids in zip(results, self.result_ids, strict=True)]
            for d in range(self.mesh.size)
        ]
        if any(self.is_complex):
            shards = [[x[..., part] for x in row for part in (0, 1)] for row in shards]
        return shards

    def _with_pairs(self, parts: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Return operands, of which each complex one is given by its two parts."""
        left = iter(parts)
        return [
            np.stack([next(left), next(left)], -1) if c else next(left) for c in self.is_complex
        ]


@long_form
@pytest.mark.parametrize("source", sources(), ids=lambda s: s.removeprefix(FOLDER)[12:-5])
def test_equals_shardy(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, renamed = parts(git("show", f"HEAD:{source}"))
    for new in re.findall(r"func.call @(sequential_\w+)\(", second):
        if f"func.func @{new}(" not in first + second:  # the same function without its shardings
            second = second.replace(f"@{new}(", f"@{new.replace('sequential_', 'parallel_')}(")
    checked = {f"check.expect_{kind}" for kind in ("eq", "close", "almost_eq")}
    both = {*complexes.BY_BOTH, *checked, "interpreter.run_parallel"}
    monkeypatch.setattr(complexes, "BY_BOTH", both)
    main = without_complex(read(first + pretty(second)))
    checks: list[str] = []

    def run_parallel(t: OpTranslation, *values: Value) -> list[Value]:
        called = [name for row in t["programs"] for name in row]
        name = called[0]
        for new, old in renamed.items():
            name = name.replace(new, old)
        arrays = [numbers(v.ssa) for v in values]
        n = len(called)
        each = len(arrays) // n
        results = Partitioned(read(first), name)(
            [arrays[i * each : (i + 1) * each] for i in range(n)]
        )
        flat = [x for device in results for x in device]
        dtypes = [DTYPES[r.type.element] for r in t.op.results]
        return [t.function.constant(x, dtype=d) for x, d in zip(flat, dtypes, strict=True)]

    def expect(t: OpTranslation, *values: Value) -> list[Value]:
        checks.append(t.op.name)
        n = len(values) // 2
        for got, want in zip(values[:n], values[n:], strict=True):
            exact = t.op.name.endswith(("expect_eq", "expect_eq_const"))
            tolerance = 0 if exact and got.dtype[0] == "i" else 1e-6
            np.testing.assert_allclose(
                numbers(got.ssa), numbers(want.ssa), rtol=tolerance, atol=tolerance
            )
        return []

    monkeypatch.setitem(ops.TABLE, "interpreter.run_parallel", run_parallel)
    for name in checked:
        monkeypatch.setitem(ops.TABLE, name, expect)
    importer = HloImporter(main, Module(), None)
    monkeypatch.setattr(importer, "constrained", lambda v, s: v)
    monkeypatch.setattr(importer, "sharding", lambda text: None)
    monkeypatch.setattr(importer, "shardings", lambda text: [None] * text.count("<@"))
    importer.run("main", [], {})
    assert checks
