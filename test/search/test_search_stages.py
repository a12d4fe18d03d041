"""search-stages: against the programs of all candidates, and the parts that it is made of."""

import random
import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, combinations, pairwise
from math import inf

import numpy as np
import pytest
from support.extent import extent, long_form
from support.harness import apply
from xdsl.context import Context
from xdsl.dialects.builtin import ModuleOp
from xdsl.dialects.func import FuncOp

from shardir.diagnostics import Failure, ShardirError
from shardir.dialects import train
from shardir.dialects.dist import MeshOp
from shardir.dialects.nn.types import unsharded_type
from shardir.interpret import run
from shardir.passes.search_stages import SearchStages, _Trials, step_of
from shardir.rewriting.microbatching import BatchDimensions, divide_batch
from shardir.rewriting.stages import ops_of_model
from shardir.search.stages import joint
from shardir.search.stages.joint import JointSearch, StageCandidate, StepMeasure, waiting_bound
from shardir.search.stages.shortened import Shortened
from shardir.search.stages.stage_costs import unit_costs
from shardir.syntax.parser import parse

NORMAL = "train.init = #train.init<normal>"


def program(layers: int, batch: int = 4, width: int = 16, mesh: str = "", clauses: str = "") -> str:
    """Layers of a product, an activation, a product, a residual connection and an activation, whose
    gradient reads its result, as the next layer does; and a mean of squares. The negative of a
    weight depends on no input."""
    x = f"tensor<{batch}x{width}xf32>"
    w = f"tensor<{width}x{width}xf32>"
    args, body, last = [f"%x: {x} {{train.input = #train.init<normal>}}"], [], "%x"
    for i in range(layers):
        args += [f'%{name}{i}: {w} {{train.parameter = "{name}{i}", {NORMAL}}}' for name in "ud"]
        body += [
            f"%n{i} = nn.neg %u{i} : ({w}) -> {w}",
            f"%h{i} = nn.matmul {last}, %n{i} : ({x}, {w}) -> {x}",
            f"%a{i} = nn.tanh %h{i} : ({x}) -> {x}",
            f"%y{i} = nn.matmul %a{i}, %d{i} : ({x}, {w}) -> {x}",
            f"%r{i} = nn.add %y{i}, {last} : ({x}, {x}) -> {x}",
            f"%x{i} = nn.tanh %r{i} : ({x}) -> {x}",
        ]
        last = f"%x{i}"
    lines = "\n  ".join(body)
    return f"""{mesh}
func.func private @loss({", ".join(args)}) -> tensor<f32> {{
  {lines}
  %s = nn.square {last} : ({x}) -> {x}
  %loss = nn.reduce <mean> %s dims <0, 1> : ({x}) -> tensor<f32>
  func.return %loss : tensor<f32>
}}
train.step @step of @loss <adamw, lr = 0.1> {clauses}
"""


CLUSTER = (
    "dist.cluster @c <levels [node = 4 {bandwidth = 1e+09, latency = 1e-07}], "
    "memory = 1000000000 {bandwidth = 1e+10}, flops {f32 = 1e+09}>\ndist.mesh @m <d = 4> on @c"
)


# ---- all candidates ----


def search_of(
    module: ModuleOp, options: SearchStages
) -> tuple[JointSearch, dict[StageCandidate, StepMeasure]]:
    """A search of a module, and the programs that it measures."""
    trials, found = _Trials(options, Context(), module, step_of(module)), {}

    def measure(candidate: StageCandidate, cuts: Sequence[int]) -> StepMeasure:
        if candidate not in known:
            known[candidate] = trials.measure(candidate, cuts)
        found[candidate] = known[candidate]
        return known[candidate]

    known = MEASURED.setdefault(str(module), {})
    space = options.space(module, step_of(module), trials)
    space = replace(space, schedules=extent(["1f1b", "zb-h1"], []))
    return JointSearch(space, trials.costs, trials.cuts, inf, measure, str), found


MEASURED: dict[str, dict[StageCandidate, StepMeasure]] = {}


@pytest.mark.parametrize("width", extent([64], [16, 64, 256]))
def test_no_candidate_of_all_is_faster(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    """The program of each candidate is lowered and measured, whatever its bound; the search lowers
    fewer, and finds the fastest one. No bound is above what it is a bound of."""
    options = SearchStages(chunks=extent(1, 2))
    batch = extent(2, 4)
    module = parse(program(4, batch, width, CLUSTER))
    every, measured = search_of(module, options)
    with monkeypatch.context() as patch:
        patch.setattr(JointSearch, "_is_open", lambda *_: True)
        patch.setattr(joint, "MARGIN", 1.0)
        every.run()
    seconds = {c: m.seconds for c, m in measured.items()}
    assert {c.ranks for c in seconds} == {1, 2, 4}
    assert {c.microbatches for c in seconds} == {k for k in (1, 2, 4) if k <= batch}
    for c, each in seconds.items():
        assert every._bound(c) <= each * (1 + 1e-9)
    found, few = search_of(module, options)
    best = found.run()
    assert len(few) < len(measured)
    assert best.measured.seconds <= min(seconds.values()) * (1 + 1e-9)
    assert found.bound <= best.measured.seconds


@long_form
def test_the_memory_is_kept_to() -> None:
    options = SearchStages(chunks=1, lowered=0)
    module = parse(program(4, batch=64, mesh=CLUSTER))
    trials = _Trials(options, Context(), module, step_of(module))
    space = replace(options.space(module, step_of(module), trials), microbatches=[4])

    def found(limit: float) -> JointSearch:
        search = JointSearch(space, trials.costs, trials.cuts, limit, None, str)
        search.run()
        return search

    free = found(inf).best
    assert free is not None
    limit = free.measured.bytes * 0.9
    less = found(limit).best
    assert less is not None
    assert less.measured.bytes <= limit
    assert less.measured.seconds >= free.measured.seconds
    with pytest.raises(Failure, match=r"expected stages within 1000 B on a device, got \d+ B"):
        found(1000)


# ---- its parts ----


def random_split(chance: random.Random) -> tuple[list[float], list[float]]:
    backward = [chance.random() for _ in range(chance.randint(3, 7))]
    return [b / 2 for b in backward], backward


def test_no_split_waits_less_than_the_bound() -> None:
    """With one stage on each rank, by T >= h_r + m w_r for each rank of each split."""
    chance = random.Random(0)
    reached = []
    for _ in range(40):
        forward, backward = random_split(chance)
        ranks, m = chance.randint(2, len(forward)), chance.randint(2, 9)
        both = [f + b for f, b in zip(forward, backward, strict=True)]
        begins, done = ([0.0, *accumulate(each)] for each in (forward, both))
        best = min(
            max(begins[a] + m * (done[b] - done[a]) for a, b in pairwise((0, *cuts, len(both))))
            for cuts in combinations(range(1, len(both)), ranks - 1)
        )
        bound = waiting_bound(m * sum(both), m * sum(forward), m, ranks)
        assert bound <= best * (1 + 1e-9)
        reached.append(bound / best)
    equal = waiting_bound(1200.0, 400.0, 1200, 4)  # many equal parts: the split is as good as any
    assert 300.0 < equal < 300.5
    assert max(reached) > 0.8


def test_costs_of_a_shorter_program_are_those_of_all_blocks() -> None:
    def made() -> tuple[ModuleOp, train.StepOp, FuncOp]:
        clauses = "accumulate <mean, microbatches = 2>"
        module = parse(program(7, mesh="dist.mesh @m <a = 2, b = 2>", clauses=clauses))
        step = step_of(module)
        return module, step, step.find()

    module, _, f = made()
    costs, _ = unit_costs(module, f, "step", list(ops_of_model(f)), True)
    short, _, g = made()
    shortened = Shortened.shorten(g)
    short.verify()
    fewer, _ = unit_costs(short, g, "step", list(ops_of_model(g)), True)
    assert len(fewer.seconds) < len(costs.seconds)
    found = shortened.costs(fewer)
    for name in ("seconds", "forward", "weight", "once", "crossing", "extra"):
        assert np.allclose(getattr(found, name), getattr(costs, name), rtol=1e-12), name
    assert sum(costs.forward) + sum(costs.weight) < sum(costs.seconds)
    assert sum(costs.weight) > 0 < sum(costs.once)
    for name in ("fixed", "saved"):
        held = [sorted((n, sorted(r)) for n, r in getattr(c, name)) for c in (found, costs)]
        assert held[0] == held[1], name


def test_a_loss_is_the_mean_of_its_microbatches() -> None:
    module = parse(program(2, batch=6))
    step = step_of(module)
    f = step.find()
    draw = np.random.default_rng(0)
    values = [
        draw.normal(size=unsharded_type(a).get_shape()).astype(np.float32)
        for a in f.body.block.args
    ]
    (full,) = run(module, "loss", values)
    batch = BatchDimensions.of(step)
    assert batch.divisor == 6
    batch.divide(f, 3)
    module.verify()
    parts = [run(module, "loss", [x, *values[1:]])[0] for x in np.split(values[0], 3)]
    assert np.isclose(np.mean(parts), full, rtol=1e-6)


LABELLED = """
func.func private @loss(
    %x: tensor<6x4xf64> {train.input = #train.init<normal>},
    %labels: tensor<6xi64> {train.input = #train.init<integers, low = -1, high = 4>},
    %w: tensor<4xf64> {train.parameter = "w", train.init = #train.init<normal>}
) -> tensor<f64> {
  %y = nn.mul %x, %w : (tensor<6x4xf64>, tensor<4xf64>) -> tensor<6x4xf64>
  %loss = nn.cross_entropy_loss <mean> %y, %labels ignore -1
      : (tensor<6x4xf64>, tensor<6xi64>) -> tensor<f64>
  func.return %loss : tensor<f64>
}
train.step @step of @loss <sgd, lr = 1.0>"""


def test_microbatches_with_labels_that_do_not_count_are_over_tokens() -> None:
    draw = np.random.default_rng(0)
    given = [draw.normal(size=(6, 4)), np.array([-1, -1, 3, 0, -1, 2]), draw.normal(size=4)]
    full, parts = parse(LABELLED), parse(LABELLED)
    divide_batch(step_of(parts), 3)
    for module in (full, parts):
        apply(module, "distributed-autodiff")
    stacked = [x.reshape(3, 2, *x.shape[1:]) for x in given[:2]]
    for a, b in zip(
        run(full, "step", given), run(parts, "step", [*stacked, given[2]]), strict=True
    ):
        assert np.allclose(a, b, rtol=1e-12)
    asked = parse(f"{LABELLED} accumulate <mean, microbatches = 1>")
    with pytest.raises(ShardirError, match=r"a mean over the batch, got nn\.cross_entropy_loss"):
        BatchDimensions.of(step_of(asked))


OTHERS = {
    "a sum": ("nn.reduce <mean> %s", "nn.reduce <sum> %s", "expected a mean over the batch"),
    "not linear": (
        "%loss = nn.reduce <mean> %s dims <0, 1> : (tensor<4x16xf32>) -> tensor<f32>",
        "%l = nn.reduce <mean> %s dims <0, 1> : (tensor<4x16xf32>) -> tensor<f32>\n"
        "  %loss = nn.exp %l : (tensor<f32>) -> tensor<f32>",
        "expected a loss that is linear in its mean, got nn.exp",
    ),
    "samples compared": (
        "%s = nn.square %x0 : (tensor<4x16xf32>) -> tensor<4x16xf32>",
        '%p = nn.einsum "bw,cw->bc" %x0, %x0 : (tensor<4x16xf32>, tensor<4x16xf32>) '
        "-> tensor<4x4xf32>\n"
        "  %s = nn.matmul %p, %x0 : (tensor<4x4xf32>, tensor<4x16xf32>) -> tensor<4x16xf32>",
        "expected one dimension of %p with the batch, got two",
    ),
    "a softmax": (
        "nn.square %x0 ", "nn.softmax %x0 axis 0 ", "nn.softmax of %s, which mixes samples",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_a_batch_is_only_divided_where_the_step_stays_the_same(name: str) -> None:
    old, new, message = OTHERS[name]
    text = program(1)
    assert old in text
    with pytest.raises(ShardirError, match=re.escape(message)):
        BatchDimensions.of(step_of(parse(text.replace(old, new))))


def test_a_given_pipeline_stays() -> None:
    for clause, names in (("1f1b, ranks = 2", {"1f1b"}), ("search, ranks = 2", None)):
        clauses = f"accumulate <mean, microbatches = 2> pipeline <{clause}>"
        module = parse(program(4, mesh=CLUSTER, clauses=clauses))
        SearchStages(lowered=0).apply(Context(), module)
        step = step_of_any(module)
        assert step.pipeline is not None
        assert step.pipeline.values["ranks"] == 2
        assert names is None or step.pipeline.kind in names
        (mesh,) = (op.mesh for op in module.body.ops if isinstance(op, MeshOp))
        assert mesh.size == 2
        assert step.microbatches % 2 == 0


def step_of_any(module: ModuleOp) -> train.StepOp:
    return next(op for op in module.body.ops if isinstance(op, train.StepOp))
