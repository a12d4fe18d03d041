"""The law of ops on real ranks: of every op the layouts that communicate most, forward and
gradient, emitted and run on four Gloo ranks in one program start; expected is torch's result on one
device."""

import json
import random
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from support.device import DEVICE
from support.extent import extent, sampled
from support.forked import run_ranks
from support.harness import tensors

pytest.importorskip("torch")

from op_cases import CASES, Case
from support.harness import (
    MESH,
    Problem,
    collectives,
    compiled,
    differs,
    elements_of,
    function,
    laid_out,
    layouts,
    problem,
    problem_of,
)
from support.reference import shape_of
from xdsl.dialects.builtin import ModuleOp, TensorType

from shardir.algebra.layout import replicated
from shardir.backend.torch.emit.program import program_text
from shardir.dialects import nn
from shardir.dialects.dist import global_shape, type_layout
from shardir.interpret.values import assemble, split

LAYOUTS, SECONDS = extent(1, 8), 120


@dataclass
class Job:
    """A case with an element type, compiled with some layouts."""

    name: str
    problem: Problem
    module: ModuleOp
    count: int

    @property
    def types(self) -> tuple[list[TensorType], list[TensorType]]:
        """Local types of the arguments and the results."""
        t = function(self.module, self.problem.name).function_type
        return tensors(t.inputs), tensors(t.outputs)


def job(name: str, p: Problem, draw: random.Random) -> Job:
    """Return the case with those of some random layouts that communicate most."""
    found = []
    block = function(p.module, "f").body.block
    assert block.last_op is not None
    for _ in range(LAYOUTS):
        given = [draw.choice(layouts(len(shape_of(v)))) for v in block.args]
        results = [draw.choice(layouts(len(shape_of(v)))) for v in block.last_op.operands]
        module = compiled(laid_out(p.module, MESH, given, results))
        ops = list(function(module, p.name).body.block.ops)
        found.append(Job(name, p, module, sum(collectives(ops).values())))
    return max(found, key=lambda j: j.count)


def _cpu(case: Case, element: str) -> bool:
    """Whether torch has the op on a CPU alone: products of integers."""
    return case.op in (nn.MatmulOp, nn.EinsumOp) and element.startswith("i")


def jobs() -> list[Job]:
    """Return a case of some ops; in the long form two of each (one where it has no gradient). Each
    is in one type."""
    by_op: dict[type, list[Case]] = {}
    for case in CASES:
        by_op.setdefault(case.op, []).append(case)
    out = []
    for i, cases in enumerate(sampled(by_op.values(), 30)):
        draw, most = random.Random(i), extent(1, 2) if cases[0].gradient else 1
        for case in draw.sample(cases, min(most, len(cases))):
            element = draw.choice(
                [e for e in case.elements if DEVICE == "cpu" or not _cpu(case, e)]
            )
            name = f"case_{len(out)}_{case.op.name.split('.')[1]}_{element}"
            out.append(job(name, problem_of(case, element), draw))
    return out


def two_matmuls() -> Job:
    """Return a program of two ops: a matrix product into a split softmax."""
    from support.harness import Arg

    from shardir.dialects.nn.properties import int_attr

    p = problem(
        [Arg("f32", (6, 5)), Arg("f32", (5, 7))],
        lambda b, x, w: b.value(
            nn.SoftmaxOp, b.value(nn.MatmulOp, x, w), props={"axis": int_attr(1)}
        ),
        (0, 1),
    )
    return job("case_two", p, random.Random(0))


def split_images() -> list[Job]:
    """Return convolutions over images whose rows and columns are split, evenly and not: halos."""
    from support.harness import Arg, layout

    from shardir.dialects.nn.movement import IntsPerDimAttr

    def conv(stride: int, *padding: int) -> dict:
        return {"stride": IntsPerDimAttr((stride, 1)), "padding": IntsPerDimAttr(padding)}

    out = []
    for i, (image, kernel, props, text) in enumerate([
        ((2, 3, 8, 8), (4, 3, 3, 3), conv(1, 1, 1, 1, 1), "[{}, {}, {a}, {b}]"),
        ((2, 2, 13, 5), (2, 2, 5, 2), conv(2, 2, 2, 0, 0), "[{}, {}, {b, a}, {}]"),
        ((3, 2, 5, 6), (3, 2, 4, 1), conv(1, 0, 3, 0, 0), "[{b}, {}, {a}, {}]"),
    ]):  # fmt: skip
        p = problem(
            [Arg("f32", image), Arg("f32", kernel)],
            lambda b, x, w, props=props: b.value(nn.ConvOp, x, w, props=props),
            (0, 1),
        )
        given = [layout(text), layout("[{}, {}, {}, {}]"), layout(text)]
        module = compiled(laid_out(p.module, MESH, given[:2], given[2:]))
        ops = collectives(list(function(module, p.name).body.block.ops))
        assert ops["halo_unfold"] and ops["halo_fold"] and "all_gather" not in ops
        out.append(Job(f"case_image_{i}", p, module, sum(ops.values())))
    return out


def test_ops_on_real_ranks(tmp_path: Path):
    todo = [*jobs(), two_matmuls(), *split_images()]
    assert len(todo) > extent(30, len({case.op for case in CASES}))
    assert sum(j.count > 0 for j in todo) > len(todo) / 2
    listing = []
    for j in todo:
        inputs, _ = j.types
        (tmp_path / f"{j.name}.py").write_text(program_text(j.module))
        given = {}
        for i, (x, t) in enumerate(zip(j.problem.arguments, inputs, strict=True)):
            layout = type_layout(t) or replicated("m", x.ndim)
            given |= {f"{i}_{r}": part for r, part in enumerate(split(x, layout, MESH))}
        np.savez(tmp_path / f"{j.name}.npz", **given)
        listing.append([j.name, j.problem.name, elements_of(inputs)])
    (tmp_path / "jobs.json").write_text(json.dumps(listing))
    script = Path(__file__).parent / "ops_rank.py"
    for rank, out in enumerate(run_ranks(script, 4, [tmp_path], SECONDS)):
        assert f"rank {rank}: all ran" in out, out
    results = [dict(np.load(tmp_path / f"results_{r}.npz")) for r in range(4)]
    wrong = [f"{j.name}: {message}" for j in todo if (message := error(j, results))]
    assert not wrong, "\n".join(wrong)


def error(j: Job, results: list[dict[str, np.ndarray]]) -> str:
    """Return the difference of the global value on the ranks from torch's, or ""."""
    _, types = j.types
    for i, (t, wanted, e) in enumerate(
        zip(types, j.problem.wanted, j.problem.elements, strict=True)
    ):
        layout = type_layout(t) or replicated("m", wanted.ndim)
        shape = global_shape(t, MESH)
        found = [r[f"{j.name}_{i}"] for r in results]
        here = [x.shape for x in found]
        expected = [
            tuple(s.stop - s.start for s in layout.slices(MESH, shape, r)) for r in range(4)
        ]
        if here != expected:
            return f"result {i} has the shapes {here}, not {expected}"
        if message := differs(assemble(found, layout, MESH, shape), wanted, e):
            return f"result {i}, [{layout}], {message}"
    return ""
