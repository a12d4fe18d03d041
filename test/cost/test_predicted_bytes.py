"""The predicted bytes of a plan are those that devices receive when it is run.

They are predicted by `--explain-redistributions` and by the relative model, and counted while the
interpreter runs the lowered program on all ranks, before its collectives are simplified: elements
are followed by labels through each collective, and a rank receives those that it has after it and
had not before. For sums the bytes are those of a ring, from the sizes of the shards.
"""

import re
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.extent import sampled
from support.harness import apply, function
from xdsl.dialects.builtin import ModuleOp, TensorType
from xdsl.ir import SSAValue

from shardir.algebra.mesh import Mesh
from shardir.cost import relative
from shardir.dialects import dist
from shardir.interpret import evaluator, run
from shardir.interpret.collectives import Parts, run_collective
from shardir.interpret.equivalence import random_arguments
from shardir.interpret.values import split
from shardir.reports.redistributions import explain
from shardir.syntax.parser import parse
from shardir.tools import bench

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
PLACED = (
    "inline-calls", "propagate-strategies", "insert-redistributions", "distributed-autodiff",
    "recompute",
)  # fmt: skip

models = bench.load("bytes")
SMALL: dict[str, Any] = {
    "layers": 1, "batch": 4, "seq": 6, "hidden": 16, "heads": 4, "vocab": 12,
}  # fmt: skip
CLICKS: dict[str, Any] = {
    "devices": 4, "batch": 8, "tables": 4, "rows": 6, "width": 8, "dense": 4, "bottom": (8,),
    "top": (8,),
}  # fmt: skip


def example(name: str, mesh: str = "") -> Callable[[], str]:
    def text() -> str:
        found = (EXAMPLES / f"{name}.ir").read_text()
        return re.sub(r"(dist.mesh @\w+) <.*>", rf"\1 <{mesh}>", found) if mesh else found

    return text


PLANS: dict[str, Callable[[], str]] = {
    "Megatron": lambda: models.gpt(**SMALL),
    "Megatron, Post-LN": lambda: models.bert(**SMALL),
    "FSDP + TP": lambda: models.gpt(**SMALL, fsdp=True),
    "FSDP": lambda: models.bert(**SMALL, mesh=(4, 1), fsdp=True),
    "mlp": lambda: models.mlp(batch=4, dim=8, hidden=16),
    "unsharded tables": lambda: models.dlrm(split="tables", **CLICKS),
    "tables by columns": lambda: models.dlrm(split="columns", **CLICKS),
    "tables by rows": lambda: models.dlrm(split="rows", **CLICKS),
    "samples and channels": lambda: models.resnet(
        blocks=(1, 1), width=4, batch=4, image=16, classes=4, dp=2, tp=2
    ),
    "Megatron, uneven": example("pangu_alpha", "dp = 3, tp = 2"),
    "BERT, uneven": example("bert", "dp = 2, tp = 3"),
    "heads, then the sequence": example("ulysses"),
    "groups": example("matmul_partial_groups"),
    "rows of explicit sizes": example("manual_split"),
    "rows, then columns": example("matmul_rows_then_columns"),
}


def received(
    op: dist.CollectiveOp, value: SSAValue, before: Parts, after: Parts, mesh: Mesh
) -> int:
    """The bytes that the rank which receives most receives for one value."""
    n = mesh.extent(op.axes.data)
    if isinstance(op, dist.AllReduceOp):
        count = -(-2 * (n - 1) * max(x.size for x in before) // n)
    elif isinstance(op, dist.ReduceScatterOp):  # as large a message from each, padded
        count = (n - 1) * max(x.size for x in after)
    elif isinstance(op, dist.AllGatherOp):
        count = (n - 1) * max(x.size for x in before)
    elif isinstance(op, dist.LOCAL):
        count = 0
    else:
        assert isinstance(value.type, TensorType)
        layout, shape = dist.layout_of(value), dist.global_shape(value.type, mesh)
        assert layout is not None
        labels = split(np.arange(prod(shape)).reshape(shape), layout.complete, mesh)
        (moved,) = run_collective(op, [labels], mesh)
        count = max(np.setdiff1d(x, y).size for x, y in zip(moved, labels, strict=True))
    return count * before[0].dtype.itemsize


def counted(module: ModuleOp, name: str, monkeypatch: pytest.MonkeyPatch) -> int:
    """The bytes that a function's collectives receive while it is run."""
    counts: list[int] = []

    def run_and_count(op: dist.CollectiveOp, values: list[Parts], mesh: Mesh) -> list[Parts]:
        outs = run_collective(op, values, mesh)
        for v, before, after in zip(op.values, values, outs, strict=True):
            counts.append(received(op, v, before, after, mesh))
        return outs

    with monkeypatch.context() as patched:
        patched.setattr(evaluator, "run_collective", run_and_count)
        run(module, name, random_arguments(function(module, name), module))
    return sum(counts)


@pytest.mark.parametrize("plan", sampled(PLANS, 5))
def test_predicted_bytes_are_those_that_are_received(plan: str, monkeypatch: pytest.MonkeyPatch):
    module = apply(parse(PLANS[plan]()), *PLACED)
    terms = {c.name: c.terms for c in relative(module)}
    by_model = {name: t.inner + t.inter + t.dp for name, t in terms.items()}
    said = re.compile(r"@(\w+): \d+ redistributions?, receives (\d+) B")
    explained = {m[1]: int(m[2]) for line in explain(module) if (m := said.match(line))}
    lowered = apply(module, "lower-to-spmd")
    found = {name: counted(lowered, name, monkeypatch) for name in by_model}
    assert any(found.values())
    assert found == by_model
    assert found == {name: explained.get(name, 0) for name in found}
