"""The figures of the documentation, from the compiler's own answers: `python docs/figures.py NAME`.

Each function draws one figure and returns the text of docs/pictures/NAME.svg. Without a name all
are drawn. Charts of measurements are made from the records in test/bench/records.
"""

import copy
import json
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from xdsl.dialects.builtin import DenseArrayBase
from xdsl.dialects.func import FuncOp

sys.path.append(str(Path(__file__).parents[1] / "test"))
sys.path.append(str(Path(__file__).parents[1] / "docs" / "examples"))

from support.drawing import COLOURS, FAINT, INK, PALE, Axes, Picture, bars, legend, shards

import shardir
from shardir.algebra.allocation import LiveBuffer
from shardir.algebra.forms import all_reduce, levels_of
from shardir.algebra.layout import Layout
from shardir.algebra.mesh import Axis, Mesh
from shardir.algebra.notation import mesh_of, parse_layout
from shardir.algebra.redistribution import plan_redistribution
from shardir.algebra.schedules import PipelineCosts, schedule
from shardir.algebra.schedules import simulate as simulate_schedule
from shardir.algebra.steps import step_seconds
from shardir.cost.clusters import load
from shardir.cost.memory_plan import storages
from shardir.cost.report import StagedCost, report
from shardir.cost.simulator import RankTimeline, simulate
from shardir.dialects.dist import layout_of
from shardir.dialects.memory import OFFSETS
from shardir.passes import PASSES, PIPELINES
from shardir.rewriting.registry import expand

ROOT = Path(__file__).parents[1]

PICTURES = ROOT / "docs" / "pictures"
RECORDS = ROOT / "test" / "bench" / "records"
BLUE, RED, GREEN, YELLOW, CYAN, PURPLE, GREY = COLOURS
MESH = mesh_of("m", "dp = 2, tp = 2")
PLAN = "megatron(tp) * fsdp(dp)"

TWO_PRODUCTS = """
dist.mesh @m <dp = 2, tp = 2>
#x = #dist.layout<@m, [{dp}, {}]>
#w = #dist.layout<@m, [{}, {tp}]>
func.func private @loss(
    %x: tensor<8x4xf32, #x> {train.input = #train.init<normal>},
    %w: tensor<4x8xf32, #w> {train.parameter = "w", train.init = #train.init<normal>},
    %v: tensor<8x4xf32> {train.parameter = "v", train.init = #train.init<normal>}
) -> tensor<f32> {
  %h = nn.matmul %x, %w : (tensor<8x4xf32, #x>, tensor<4x8xf32, #w>) -> tensor<8x8xf32>
  %r = nn.relu %h
  %y = nn.matmul %r, %v
  %q = nn.mul %y, %y
  %s = nn.reduce <sum> %q dims <0, 1> : (tensor<8x4xf32>) -> tensor<f32>
  func.return %s : tensor<f32>
}
train.step @step of @loss <sgd, lr = 0.1>
"""


def layout(text: str) -> Layout:
    return parse_layout(f"@m, {text}")


def layouts_after(passes: str) -> dict[str, Layout]:
    """The layouts of the values of TWO_PRODUCTS after some passes, by name."""
    module = shardir.compile(TWO_PRODUCTS, passes).module
    found = {}
    for op in module.walk():
        arguments = [a for region in op.regions for block in region.blocks for a in block.args]
        for v in (*op.results, *arguments):
            if v.name_hint and (of := layout_of(v)) is not None:
                found.setdefault(v.name_hint, of)
    return found


# ---- layouts ----


def layouts() -> str:
    """A weight on four ranks, by plan."""
    p = Picture(760, 200, "Who holds which part of a weight on four ranks, by plan")
    plans = [
        ("ddp", "[{}, {}]"), ("fsdp", "[{dp, tp}, {}]"), ("megatron", "[{}, {dp, tp}]"),
        ("fsdp * megatron", "[{dp}, {tp}]"),
    ]  # fmt: skip
    for i, (plan, text) in enumerate(plans):
        x = 22 + 184 * i
        p.text(x, 28, plan, font_weight="600", font_size=14)
        shards(p, x, 66, "w", layout(text), MESH, (8, 12), 12.5)
    return p.svg()


def propagation() -> str:
    """Two products: annotations, and what propagation makes of them."""
    p = Picture(760, 400, "Layouts of two products before and after propagation")
    values = {
        "x": (8, 4), "w": (4, 8), "h": (8, 8), "v": (8, 4), "y": (8, 4),
    }  # fmt: skip
    names = {"h": "h = x w", "y": "y = relu(h) v"}
    annotated = {"x": layout("[{dp}, {}]"), "w": layout("[{}, {tp}]")}
    after = layouts_after("propagate-strategies")
    for r, (title, found) in enumerate([("annotated", annotated), ("propagated", after)]):
        y = 76 + 184 * r
        p.text(20, y - 40, title, font_weight="600", font_size=14)
        x = 30.0
        for name, shape in values.items():
            if name in found:
                shards(p, x, y, names.get(name, name), found[name], MESH, shape, 13)
            else:
                p.text(x, y - 8, f"{names.get(name, name)}  {shape[0]}x{shape[1]}",
                       font_weight="600")  # fmt: skip
                p.rect(x, y, shape[1] * 13, shape[0] * 13, PALE, INK, stroke_width=1.5)
                p.text(x + shape[1] * 6.5, y + shape[0] * 6.5 + 5, "?", "middle", FAINT)
            x += 142
    return p.svg()


def redistribution() -> str:
    """Two ways from one layout to another, with their prices."""
    mesh = Mesh("m", MESH.axes, load("h200").part(4))
    shape = (4096, 4096)
    source, target = layout("[{dp}, {}], partial sum {tp}"), layout("[{dp}, {tp}]")
    p = Picture(760, 392, "A redistribution: the fastest plan, and another one")
    fast = plan_redistribution(shape, "f32", mesh, source, target)
    whole = plan_redistribution(shape, "f32", mesh, source, layout("[{dp}, {}]"))
    rest = plan_redistribution(shape, "f32", mesh, layout("[{dp}, {}]"), target)
    ways = [("the fastest plan", [*fast.steps]), ("another one", [*whole.steps, *rest.steps])]
    for row, (title, steps) in enumerate(ways):
        y, x, now, total = 76 + 184 * row, 40.0, source, 0.0
        shards(p, x, y, "y", now, mesh, (8, 8), 13)
        for step in steps:
            seconds = step_seconds(mesh, shape, now, step, 4)
            total += seconds
            p.arrow((x + 120, y + 52), (x + 260, y + 52), step.kind.replace("_", "-"),
                    f"{seconds * 1e6:.0f} us" if seconds else "local")  # fmt: skip
            x, now = x + 276, step.layout
            shards(p, x, y, "y", now, mesh, (8, 8), 13)
        p.text(20, y - 40, f"{title}: {total * 1e6:.0f} us", font_weight="600", font_size=14)
    p.text(740, 24, "priced as 4096x4096 in f32, on one node of H200", "end", FAINT, font_size=12)
    return p.svg()


def autodiff() -> str:
    """The gradient of a weight: a product that is partial, and its reduction."""
    p = Picture(760, 215, "The gradient of a weight is partial over the axis of the batch")
    found = layouts_after("propagate-strategies,insert-redistributions,distributed-autodiff")
    assert found["x"] == layout("[{dp}, {}]"), "its transpose is drawn"
    p.text(20, 30, "dp splits the rows, over which the product sums; so d_w is partial over dp",
           font_weight="600", font_size=14)  # fmt: skip
    x, y = 30.0, 74
    for name, of, shape, after in [
        ("x^T", layout("[{}, {dp}]"), (4, 8), "*"), ("d_h", found["d_h"], (8, 8), "="),
        ("d_w", found["d_w"], (4, 8), "all-reduce over dp"), ("d_w", found["w"], (4, 8), ""),
    ]:  # fmt: skip
        shards(p, x, y, name, of, MESH, shape, 13)
        x += 104
        if len(after) > 2:
            p.arrow((x + 14, y + 26), (x + 156, y + 26), after)
            x += 170
        else:
            p.text(x + 22, y + 32, after, "middle", font_size=18)
            x += 46
    return p.svg()


# ---- time ----


def cost() -> str:
    """The forms of an all-reduce on two nodes of eight H200, by size."""
    p = Picture(760, 360, "Seconds of an all-reduce by its size, for each form that libraries have")
    mesh = Mesh("m", (("d", 16),), load("h200").part(16))
    box = (70.0, 40.0, 500.0, 260.0)
    axes = Axes(p, box, (1e3, 1e9), (1e-5, 1e-1), "xy")
    axes.ticks(
        [(1e3, "1 KB"), (1e4, ""), (1e5, ""), (1e6, "1 MB"), (1e7, ""), (1e8, ""), (1e9, "1 GB")],
        [(1e-5, "10 us"), (1e-4, "100 us"), (1e-3, "1 ms"), (1e-2, "10 ms"), (1e-1, "100 ms")],
        "bytes on each device", "an all-reduce of 2 nodes of 8 H200",
    )  # fmt: skip
    sizes = [10 ** (3 + 6 * i / 60) for i in range(61)]
    best: dict[str, float] = {}
    forms = all_reduce(levels_of(mesh, (Axis("d"),)))
    for form in forms:
        for size in sizes:
            best[form.name] = min(best.get(form.name, 9e9), form.seconds(size))
    names = list(dict.fromkeys(f.name for f in forms))
    for name, colour in zip(names, (BLUE, RED, YELLOW, GREEN), strict=False):
        points = [
            (axes.x(s), axes.y(min(f.seconds(s) for f in forms if f.name == name))) for s in sizes
        ]
        p.line(points, colour, stroke_width=2)
    lowest = [(axes.x(s), axes.y(min(f.seconds(s) for f in forms))) for s in sizes]
    p.line(lowest, INK, stroke_width=6, stroke_opacity=0.18)
    for i, (name, colour) in enumerate(zip(names, (BLUE, RED, YELLOW, GREEN), strict=False)):
        p.line([(590, 60 + 26 * i), (614, 60 + 26 * i)], colour, stroke_width=3)
        p.text(622, 64 + 26 * i, name)
    y = 60 + 26 * len(names)
    p.line([(590, y), (614, y)], INK, stroke_width=6, stroke_opacity=0.18)
    p.text(622, y + 4, "the price")
    return p.svg()


def timeline(p: Picture, y: float, title: str, ranks: RankTimeline, most: float) -> None:
    """Draw the rows of a rank's timeline: computation, and links."""
    left, width = 130.0, 610.0
    p.text(20, y, title, font_weight="600", font_size=14)
    for row in ranks.rows:
        y += 14
        p.text(20, y + 13, row.partition(":")[0], font_size=12)
        p.rect(left, y, width, 18, PALE, rx=2)
        for e in ranks.events:
            if e.row == row:
                moves = row != "compute"
                colour = "#ffffff" if e.waits else (RED if moves else BLUE)
                x, wide = left + e.begin / most * width, (e.end - e.begin) / most * width
                p.rect(x, y, wide, 18, colour, "#ffffff" if wide > 2 else "none", stroke_width=0.5)
                if e.waits and wide > 1:
                    p.rect(x, y + 1, wide, 16, YELLOW, fill_opacity=0.55)
        y += 8


def overlap() -> str:
    """A step of ZeRO-3 with its collectives one after the other, and in flight."""
    text = (ROOT / "docs/examples/overlap.ir").read_text()
    passes = [spec.name for spec in expand("train", PASSES, PIPELINES)]
    without = [name for name in passes if name != "overlap-communication"]
    runs = {}
    for title, names in (("without overlap", without), ("with overlap", passes)):
        (runs[title],) = simulate(shardir.compile(text, ",".join(names)).module)
    most = max(s.seconds for s in runs.values())
    p = Picture(760, 210, "The timeline of a step without and with overlap")
    for i, (title, s) in enumerate(runs.items()):
        timeline(p, 30 + 84 * i, f"{title}: {s.seconds * 1e6:.0f} us", s.ranks[0], most)
    legend(p, 130, 194, [("computation", BLUE), ("collective", RED), ("wait for it", YELLOW)])
    return p.svg()


def search() -> str:
    """Steps of a GPT by plan: computation, and the communication that it does not hide."""
    programs = import_module("bench.programs")
    sizes = {"layers": 4, "batch": 32, "seq": 1024, "hidden": 2048, "vocab": 32768, "heads": 16}
    text = programs.gpt(mesh=(2, 4), optimizer="adamw", **sizes)
    module = shardir.compile(text, "strip-layouts,mixed-precision{compute=bf16}").module
    plans = ["auto", "fsdp", "ddp", "megatron(tp) * fsdp(dp)", "megatron(tp)"]
    found = shardir.compare(module, plans=plans, meshes=["dp = 2, tp = 4"], cluster="h200")
    p = Picture(760, 250, "The step of a GPT by plan on eight H200")
    p.text(
        20,
        28,
        "ms of a step; GPT of 4 layers, width 2048, bf16, on 8 H200; right: GB",
        font_size=12,
    )
    most = max(r.seconds or 0 for r in found.rows)
    for i, r in enumerate(found.rows):
        assert r.seconds is not None and r.exposed is not None and r.memory is not None
        y, scale = 44 + 34 * i, 420 / most
        hidden = (r.seconds - r.exposed) * scale
        p.text(190, y + 16, r.plan, "end", font_size=12)
        p.rect(200, y, hidden, 24, BLUE, rx=2)
        p.rect(200 + hidden, y, r.exposed * scale, 24, RED, rx=2)
        p.text(206 + r.seconds * scale, y + 16, f"{r.seconds * 1e3:.1f} ms", font_size=12)
        p.text(740, y + 16, f"{r.memory / 1e9:.1f} GB", "end", FAINT, font_size=12)
    legend(p, 200, 236, [("computation", BLUE), ("communication that the step waits for", RED)])
    return p.svg()


def stages() -> str:
    """The simulated step of a GPT in stages on four H200."""
    programs = import_module("bench.programs")
    sizes = {"layers": 8, "batch": 4, "seq": 512, "hidden": 2048, "vocab": 8192}
    text = programs.gpt(mesh=(1, 1), **sizes)
    text = text.rstrip() + " accumulate <mean, microbatches = 8> pipeline <1f1b, ranks = 4>\n"
    costs = report(shardir.compile(text, "train").module, load("h200"))
    (step,) = [c for c in costs if isinstance(c, StagedCost)]
    return step.svg()


def pipeline() -> str:
    """Bubbles of named schedules, by the number of microbatches."""
    p = Picture(760, 350, "The share of the time in which ranks wait, by schedule")
    axes = Axes(p, (60.0, 40.0, 480.0, 250.0), (4, 32), (0, 0.45))
    axes.ticks(
        [(m, str(m)) for m in (4, 8, 16, 24, 32)],
        [(x / 10, f"{10 * x}%") for x in range(5)],
        "microbatches", "bubble on 4 ranks; F, I and W take equally long",
    )  # fmt: skip
    named = {"1f1b": 1, "interleaved": 2, "zb-h1": 1, "zbv": 2}
    for i, ((name, chunks), colour) in enumerate(
        zip(named.items(), (BLUE, GREEN, YELLOW, RED), strict=True)
    ):
        points = []
        for m in (4, 8, 12, 16, 20, 24, 28, 32):
            costs = PipelineCosts.equal(4, chunks=chunks, seconds=(1, 1, 1))
            run = simulate_schedule(schedule(name, 4, m, chunks=chunks), costs)
            points.append((axes.x(m), axes.y(run.bubble)))
        p.line(points, colour, stroke_width=2.5)
        for at in points:
            p.dot(*at, colour)
        p.line([(570, 60 + 26 * i), (594, 60 + 26 * i)], colour, stroke_width=3)
        p.text(602, 64 + 26 * i, f"{name}, {chunks} a rank")
    return p.svg()


# ---- memory ----


def gpt_on_h200(pipeline: str, optimizer: str = "sgd") -> RankTimeline:
    """The simulated step of a GPT of four layers, compiled by a pipeline for two H200."""
    programs = import_module("bench.programs")
    sizes = {"layers": 4, "batch": 16, "seq": 512, "hidden": 1024, "vocab": 8192}
    text = programs.gpt(mesh=(2, 1), optimizer=optimizer, **sizes)
    first, rest = text.split("\n", 1)
    assert first.startswith("dist.mesh"), first
    text = f"dist.cluster @two <{load('h200').part(2)}>\n{first} on @two\n{rest}"
    (simulation,) = simulate(shardir.compile(text, pipeline).module)
    return simulation.ranks[0]


def live(p: Picture, axes: Axes, run: RankTimeline, colour: str) -> None:
    """Draw the bytes that live over a step, and a dot at the peak."""
    points: list[tuple[float, float]] = []
    for time, size in run.bytes:
        x, y = axes.x(time * 1e3), axes.y(size / 1e9)
        if not points:
            points.append((x, y))
        elif x - points[-1][0] >= 1 or abs(y - points[-1][1]) >= 2:  # what can be seen
            points += [(x, points[-1][1]), (x, y)]
    p.line(points, colour, stroke_width=2)
    time, size = max(run.bytes, key=lambda at: at[1])
    p.dot(axes.x(time * 1e3), axes.y(size / 1e9), colour)
    at = axes.x(time * 1e3), axes.y(size / 1e9) - 8
    halo = {"stroke": "#ffffff", "stroke_width": 4, "paint_order": "stroke"}
    p.text(*at, f"{size / 1e9:.2f} GB", "middle", font_size=12, **halo)


def memory_over_a_step(title: str, runs: dict[str, RankTimeline], note: str) -> str:
    """Draw the live bytes of several programs over a step."""
    p = Picture(760, 350, title)
    last = max(max(e.end for e in r.events) for r in runs.values()) * 1e3
    most = max(size for r in runs.values() for _, size in r.bytes) / 1e9
    axes = Axes(p, (60.0, 46.0, 520.0, 240.0), (0, last), (0, most * 1.1))
    across = [(t, str(t)) for t in range(0, int(last) + 1, max(1, int(last / 6)))]
    apart = next(n for n in (1, 2, 5, 10, 20) if most / n < 6)
    up = [(g, str(g)) for g in range(0, int(most * 1.1) + 1, apart)]
    axes.ticks(across, up, "ms of the step", note)
    for i, ((name, run), colour) in enumerate(zip(runs.items(), (GREY, BLUE, RED), strict=False)):
        live(p, axes, run, colour)
        p.line([(600, 66 + 26 * i), (622, 66 + 26 * i)], colour, stroke_width=3)
        p.text(630, 70 + 26 * i, name)
    return p.svg()


def recompute() -> str:
    """The memory of a GPT over a step: all kept, within a budget, and with all recomputed."""
    runs = {
        "all is kept": gpt_on_h200("train"),
        "recompute=0.6": gpt_on_h200("train{recompute=0.6}"),
        "recompute=full": gpt_on_h200("train{recompute=full}"),
    }
    note = "GB on a device, a GPT of 4 layers on two H200"
    return memory_over_a_step("Memory over a step with recompute", runs, note)


def offload() -> str:
    """The memory of a GPT over a step, with recompute, and with host memory beside it."""
    runs = {
        "all on the device": gpt_on_h200("train", "adamw"),
        "recompute=0.55": gpt_on_h200("train{recompute=0.55}", "adamw"),
        "0.4, offload=true": gpt_on_h200("train{recompute=0.4 offload=true}", "adamw"),
    }
    note = "GB on a device, a GPT of 4 layers with AdamW on two H200"
    return memory_over_a_step("Memory over a step with host memory", runs, note)


def memory() -> str:
    """The storages of a step in one block: their offsets, over the ops at which they live."""
    module = shardir.compile(TWO_PRODUCTS, "train,plan-memory").module
    f = next(op for op in module.walk() if isinstance(op, FuncOp))
    found: list[tuple[str, LiveBuffer, int]] = []
    for op, index, buffer in storages(f, MESH):
        offsets = op.attributes[OFFSETS]
        assert isinstance(offsets, DenseArrayBase)
        one = op.results[index : index + 1] if index else op.results
        names = ", ".join(v.name_hint or "" for v in one) or "buffer"
        found.append((names, buffer, int(offsets.get_values()[index])))
    p = Picture(760, 320, "The arena of a step: each value has a place while it lives")
    ops = max(b.end for _, b, _ in found)
    size = max(o + b.size for _, b, o in found)
    axes = Axes(p, (60.0, 40.0, 670.0, 230.0), (min(b.start for _, b, _ in found), ops), (0, size))
    axes.ticks([], [(k * 64, str(k * 64)) for k in range(size // 64 + 1)], "ops of the step",
               "bytes of the block")  # fmt: skip
    for i, (name, b, offset) in enumerate(found):
        x, y = axes.x(b.start), axes.y(offset + b.size)
        wide, high = axes.x(b.end) - x, axes.y(offset) - y
        p.rect(x, y, wide, high, COLOURS[i % 6], "#ffffff", fill_opacity=0.75)
        if wide > 8 * len(name):
            p.text(x + wide / 2, y + high / 2 + 4, name, "middle", font_size=11)
    return p.svg()


# ---- modules of torch ----

GPT_PLANS = ("ddp(dp)", "zero1(dp)", "fsdp(dp)", PLAN, "fsdp(dp) recompute=full")


def program() -> str:
    """A module, its plan, and the beginning of the program that every rank runs."""
    *_, compiled = import_module("figure_models").perceptron(PLAN)
    module = [
        "model = nn.Sequential(", "    nn.Linear(64, 256),", "    nn.GELU(),",
        "    nn.Linear(256, 10),", ")",
    ]  # fmt: skip
    kept: list[str] = []
    text = compiled.program.replace("figure_models.py", "model.py").partition("labels: i64")[2]
    for line in (line.removeprefix("    ") for line in text.splitlines()):
        if line.startswith(("del ", "#   ")):  # `#   `: the rest of a comment
            continue
        kept.append(line.partition(": nn.")[0])
        if "rt.all_reduce" in line:
            break
    kept = kept[next(i for i, x in enumerate(kept) if x.startswith("# all-gather")) :]
    p = Picture(708, 240 + 18 * len(kept), "A module, its plan and its program")
    p.text(24, 34, "your module, for one device", font_weight="600")
    p.code(24, 62, module, "rt.")
    p.text(272, 34, "the plan, as it stands for this module", font_weight="600")
    p.code(272, 62, str(compiled.plan).strip().splitlines(), "rt.")
    p.line([(24, 164), (684, 164)], PALE)
    p.text(24, 194, "the program of every rank: its beginning, with shorter comments",
           font_weight="600")  # fmt: skip
    p.code(24, 222, kept, "rt.")
    return p.svg()


def step_memory() -> str:
    """Memory of a device over a step of a GPT, under three plans."""
    model, batch = import_module("figure_models").gpt()
    runs = {}
    for name, options in (("ddp", {}), ("fsdp", {}), ("fsdp, recompute", {"recompute": "full"})):
        compiled = shardir.compile(
            model, batch, optimizer="adamw, lr = 1e-3", mesh="dp = 8", cluster="h200",
            plan=name.partition(",")[0], precision="bf16", **options,
        )  # fmt: skip
        (simulation,) = simulate(compiled.module)
        runs[name] = simulation.ranks[0]
    note = "GB on a device, a GPT of 1.3 B parameters on 8 H200, bf16"
    return memory_over_a_step("Memory of a device over a step under three plans", runs, note)


def plans() -> str:
    """Predicted step times of plans of a GPT on two nodes."""
    model, batch = import_module("figure_models").gpt()
    compared = shardir.compare(
        model, batch, optimizer="adamw, lr = 1e-3",
        plans=[f"{plan} precision=bf16" for plan in GPT_PLANS],
        meshes=["dp = 16", "dp = 2, tp = 8"], cluster="h200",
    )  # fmt: skip
    fastest = {r.plan: r for r in reversed(compared.rows) if r.seconds}
    rows = sorted(fastest.values(), key=lambda r: r.seconds or 0)
    p = Picture(760, 64 + 26 * len(rows), "Predicted step times of plans")
    p.text(20, 28, "ms of a step, GB of a device; a GPT of 1.3 B parameters on 2 x 8 H200, bf16",
           font_size=12)  # fmt: skip
    most = max(r.seconds or 0 for r in rows) * 1e3
    for i, r in enumerate(rows):
        assert r.seconds is not None and r.memory is not None
        name = f"{r.plan.removesuffix(' precision=bf16')}, {r.mesh}"
        y = 44 + 26 * i
        bars(p, 10, y, 640, [(name, round(r.seconds * 1e3), GREY if i else BLUE)], most,
             label=260, unit=" ms")  # fmt: skip
        p.text(740, y + 15, f"{r.memory / 1e9:.0f} GB", "end", FAINT, font_size=12)
    return p.svg()


def losses() -> str:
    """Losses of four ranks beside torch's on one device."""
    model, x, labels, compiled = import_module("figure_models").perceptron(PLAN)
    reference = copy.deepcopy(model)
    steps = 40
    ours = compiled.run([(x, labels)] * steps, steps=steps, verbose=False).losses["step"]
    title = "Losses of four ranks beside torch's on one device"
    return _losses(
        title, _losses_of_torch(reference, x, labels, steps), {"shardir on 4 ranks": ours}
    )


def resumed() -> str:
    """Losses of a run that goes on from a checkpoint on another mesh."""
    perceptron, done, steps = import_module("figure_models").perceptron, 6, 16
    with TemporaryDirectory() as folder:
        model, x, labels, first = perceptron(PLAN)
        reference = copy.deepcopy(model)
        before = first.run([(x, labels)] * done, steps=done, checkpoints=folder, verbose=False)
        *_, second = perceptron("zero1", "dp = 3")
        after = second.run(
            [(x, labels)] * (steps - done), steps=steps, resume=folder, verbose=False
        )
    parts = {
        "megatron(tp) * fsdp(dp) on 2 x 2": before.losses["step"],
        "from its checkpoint: zero1 on 3": after.losses["step"],
    }
    title = "A run on four ranks, which goes on from its checkpoint on three"
    return _losses(title, _losses_of_torch(reference, x, labels, steps), parts)


def _losses_of_torch(model: Any, x: Any, labels: Any, steps: int) -> list[float]:
    torch = import_module("torch")
    optimizer, found = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for _ in range(steps):
        loss = torch.nn.functional.cross_entropy(model(x), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def _losses(title: str, theirs: list[float], parts: dict[str, list[float]]) -> str:
    """Draw the losses of torch as a line, and those of the parts of a run as dots."""
    ours = [loss for losses in parts.values() for loss in losses]
    largest = max(abs(a - b) for a, b in zip(ours, theirs, strict=True))
    p = Picture(760, 340, title)
    axes = Axes(p, (60.0, 46.0, 440.0, 240.0), (0, len(ours) - 1), (0, 2.5))
    ticks = [(n, str(n)) for n in range(0, len(ours), 10 if len(ours) > 20 else 5)]
    axes.ticks(ticks, [(n / 2, f"{n / 2:g}") for n in range(6)], "step",
               f"loss; largest difference {largest:.0e}")  # fmt: skip
    p.line([(axes.x(i), axes.y(y)) for i, y in enumerate(theirs)], RED, stroke_width=2)
    p.line([(512, 66), (534, 66)], RED, stroke_width=3)
    p.text(542, 70, "torch on one device")
    begin = 0
    for row, (colour, (name, losses)) in enumerate(zip((BLUE, GREEN), parts.items(), strict=False)):
        for i, y in enumerate(losses, begin):
            p.dot(axes.x(i), axes.y(y), colour)
        begin += len(losses)
        p.dot(523, 92 + 26 * row, colour)
        p.text(542, 96 + 26 * row, name)
    return p.svg()


# ---- what to expect: charts of records ----


def record(name: str) -> list[dict[str, Any]]:
    """The rows of a record of `shard-bench NAME --json`."""
    return json.loads((RECORDS / f"{name}.json").read_text(encoding="utf-8"))["records"]


def expect_redistribution() -> str:
    """Bytes that redistributions receive, relative to the lower bound."""
    p = Picture(760, 196, "Bytes received in redistributions, relative to the lower bound")
    found = {(r["mesh"], r["engine"]): r["total"] for r in record("redistribution") if "total" in r}
    engines = [
        ("shardir", "shardir", BLUE), ("fixed order", "collectives", GREY),
        ("DTensor", "dtensor, placements", RED),
    ]  # fmt: skip
    rows = [
        (f"{mesh}: {name}", found[mesh, engine], colour)
        for mesh in ("2x2", "2x4")
        for name, engine, colour in engines
    ]
    title = "bytes / bound, all pairs of layouts (DTensor: those that it can express)"
    p.text(20, 28, title, font_size=12)
    bars(p, 10, 44, 730, rows, 2.4)
    return p.svg()


def expect_step() -> str:
    """A step beside one that is written by hand, and DTensor."""
    p = Picture(760, 236, "A training step relative to the one written by hand")
    rows = [
        (f"{r['mesh']}, width {r['hidden']}: {r['variant']}", r["ratio_to_hand"],
         BLUE if r["variant"] == "shardir" else RED)
        for r in record("step") if r["variant"] != "hand"
    ]  # fmt: skip
    p.text(20, 28, "time of a step / time of the step written by hand", font_size=12)
    bars(p, 10, 40, 730, rows, 3, label=190)
    return p.svg()


def expect_zero() -> str:
    """Seconds and peak memory of a step by plan, beside FSDP2 and DDP."""
    p = Picture(760, 240, "A step of a GPT by torch and by shardir: time and peak memory")
    rows = [r for r in record("zero") if r["backend"] == "gloo"]
    names = {"fsdp2": "FSDP2", "ddp, zero1": "DDP, ZeRO-1", "hand": "by hand"}
    seen: set[str] = set()
    values = []
    for r in rows:
        ours = r["variant"] in seen or r["variant"] in ("auto", "zero1", "fsdp")
        seen.add(r["variant"])
        name = r["variant"] if ours else names.get(r["variant"], r["variant"].upper())
        values.append((name, r["seconds"], r["peak_bytes"] / 1e6, BLUE if ours else GREY))
    p.text(20, 28, "seconds of a step, 4 Gloo ranks", font_size=12)
    bars(p, 10, 40, 370, [(n, s, c) for n, s, _, c in values], 1.1, label=96, unit=" s")
    p.text(400, 28, "peak memory of a rank", font_size=12)
    end = bars(p, 390, 40, 370, [(n, m, c) for n, _, m, c in values], 300, label=96, unit=" MB")
    legend(p, 106, end + 18, [("torch", GREY), ("emitted", BLUE)])
    return p.svg()


def expect_predicted() -> str:
    """Predicted and measured steps of 34 strategies."""
    p = Picture(760, 390, "Predicted and measured milliseconds of 34 strategies on 4 ranks")
    axes = Axes(p, (64.0, 40.0, 460.0, 290.0), (15, 110), (15, 110), "xy")
    ticks = [(float(t), str(t)) for t in (20, 30, 50, 100)]
    axes.ticks(ticks, ticks, "predicted, ms", "measured, ms")
    p.line([(axes.x(15), axes.y(15)), (axes.x(110), axes.y(110))], FAINT, stroke_dasharray="4 3")
    rows = record("cost-model")
    error = median(abs(r["predicted_ms"] / r["measured_ms"] - 1) for r in rows)
    band = [(x, x * (1 + side * error)) for side in (-1, 1) for x in (15, 110)]
    for ends in (band[:2], band[2:]):
        p.line([(axes.x(x), axes.y(min(y, 110))) for x, y in ends], PALE, stroke_width=2)
    colours = {"mlp": BLUE, "transformer": RED, "recommender": GREEN}
    for r in rows:
        p.dot(axes.x(r["predicted_ms"]), axes.y(r["measured_ms"]), colours[r["model"]], 5)
    for i, (name, colour) in enumerate(colours.items()):
        p.dot(560, 60 + 26 * i, colour, 5)
        p.text(574, 64 + 26 * i, name)
    p.text(552, 150, f"median error {error:.0%}", font_weight="600")
    return p.svg()


def expect_gpu() -> str:
    """Predicted and measured steps of GPTs on one H100."""
    rows = record("gpu-step")
    p = Picture(760, 90 + 46 * len(rows), "Predicted and measured milliseconds of GPTs on one H100")
    p.text(20, 28, "ms of a step: layers x width, type", font_size=12)
    values = []
    for r in rows:
        name = f"{r['layers']} x {r['width']}, {r['type']}"
        values += [(name, r["measured_ms"], GREY), ("", r["h100_ms"], BLUE)]
    end = bars(p, 10, 40, 730, values, 24, unit=" ms")
    legend(p, 168, end + 28, [("measured", GREY), ("predicted", BLUE)])
    return p.svg()


def expect_memory() -> str:
    """Predicted and measured peaks of a GPT by recompute."""
    rows = [r for r in record("recompute") if r["program"] == "gpt, on ranks"]
    p = Picture(760, 60 + 23 * len(rows), "Peak memory of a rank, predicted and measured")
    title = "measured peak of a rank by recompute; right: how far the prediction is from it"
    p.text(20, 28, title, font_size=12)
    for i, r in enumerate(rows):
        y = 40 + 23 * i
        off = abs(r["bytes"] / r["measured_bytes"] - 1)
        bars(p, 10, y, 640, [(r["solver"], r["measured_bytes"] / 1e6, BLUE)], 60, unit=" MB")
        p.text(740, y + 15, f"{off:.3%}", "end", FAINT, font_size=12)
    return p.svg()


def expect_auto() -> str:
    """The searched plan beside the best one that is written by hand: three runs."""
    p = Picture(760, 130, "A step of the searched plan relative to the best plan written by hand")
    p.text(20, 28, "time of the searched plan / best of 13 plans by hand; lines: three runs",
           font_size=12)  # fmt: skip
    runs: dict[str, list[float]] = {}
    for r in record("auto"):
        if r["plan"] == "auto":
            runs.setdefault(r["model"], []).append(r["measured_ratio"])
    rows = [(name, sorted(v)[1], BLUE, (min(v), max(v))) for name, v in runs.items()]
    bars(p, 10, 44, 730, rows, 1.2)
    return p.svg()


def expect_recompute() -> str:
    """The time that recompute takes, by budget, beside torch's solvers."""
    p = Picture(760, 350, "Seconds of repetitions by the budget of memory")
    axes = Axes(p, (64.0, 40.0, 480.0, 250.0), (0.42, 0.93), (0, 0.2))
    axes.ticks([(x / 10, f"{x / 10}") for x in range(5, 10)],
               [(x / 100, f"{x}%") for x in range(0, 21, 5)],
               "budget: part of the peak without recompute",
               "computed again, part of the step; GPT of 4 layers")  # fmt: skip
    rows = [r for r in record("recompute") if r["program"] == "gpt, 4 layers" and r["budget"]]
    lines = [("bound", "lower bound", GREY), ("shardir", "shardir", BLUE),
             ("ilp", "torch, ilp", RED), ("greedy", "torch, greedy", YELLOW)]  # fmt: skip
    for i, (key, name, colour) in enumerate(lines):
        solver, figure = ("shardir", "bound") if key == "bound" else (key, "recomputed")
        points = [(axes.x(r["budget"]), axes.y(r[figure])) for r in rows if r["solver"] == solver]
        p.line(points, colour, stroke_width=2.5)
        for at in points:
            p.dot(*at, colour)
        p.line([(570, 60 + 26 * i), (594, 60 + 26 * i)], colour, stroke_width=3)
        p.text(602, 64 + 26 * i, name)
    return p.svg()


def expect_schedules() -> str:
    """Bubbles of searched schedules beside the best of torch's."""
    rows = [
        r for r in record("pipeline-schedules") if r["costs"] == "real" and r["limit"] == r["p"]
    ]
    p = Picture(760, 90 + 44 * len(rows), "The share of the time in which ranks wait, by schedule")
    p.text(20, 28, "bubble: ranks x microbatches, seconds of a transfer", font_size=12)
    values = []
    for r in rows:
        name = f"{r['p']} x {r['m']}, {r['c']} s"
        values += [(name, r["torch %"], GREY), ("", r["shardir %"], BLUE)]
    end = bars(p, 10, 40, 730, values, 25, unit=" %")
    names = [("the best of torch's", GREY), ("searched, within as much memory", BLUE)]
    legend(p, 168, end + 28, names)
    return p.svg()


def expect_search() -> str:
    """CPU seconds of the search by the number of ops."""
    rows = record("search")
    p = Picture(760, 60 + 23 * len(rows), "CPU seconds of the search for a plan")
    p.text(20, 28, "CPU seconds of the search; right: the proven distance to the minimum",
           font_size=12)  # fmt: skip
    for i, r in enumerate(rows):
        y = 40 + 23 * i
        model = r["model"].replace("PanGu-alpha ", "").replace("GPT, ", "")
        name = f"{'GPT' if r['devices'] == 8 else 'PanGu'} {model}, {r['devices']}"
        bars(p, 10, y, 640, [(f"{name} devices", r["cpu"], BLUE)], 10, label=230, unit=" s")
        p.text(740, y + 15, f"{r['gap']:.2%}", "end", FAINT, font_size=12)
    return p.svg()


def expect_launch() -> str:
    """Seconds from a command to the first loss."""
    p = Picture(760, 110, "Seconds from a command to the first loss of 4 ranks")
    p.text(20, 28, "seconds to the first loss; lines: lowest and highest of 5", font_size=12)
    names = {"shard-run DIR": "shard-run", "torchrun DIR/program.py": "torchrun, same program"}
    rows = [
        (names[r["command"]], r["first"], BLUE if r["command"].startswith("shard") else GREY,
         (r["lowest"], r["highest"]))
        for r in record("launch") if r["command"] in names
    ]  # fmt: skip
    bars(p, 10, 44, 730, rows, 4.5, label=170, unit=" s")
    return p.svg()


DRAWN = (
    losses, resumed, layouts, propagation, redistribution, autodiff, cost, overlap, search,
    pipeline, stages, recompute, offload, memory, program, step_memory, plans,
    expect_redistribution, expect_step, expect_zero, expect_predicted, expect_gpu,
    expect_memory, expect_auto, expect_recompute, expect_schedules, expect_search,
    expect_launch,
)  # fmt: skip
"""`losses` and `resumed` first: their runs start ranks."""
FIGURES: dict[str, Callable[[], str]] = {f.__name__.replace("_", "-"): f for f in DRAWN}


def main(names: list[str]) -> None:
    """Write the figures of these names, or all."""
    for name in names or FIGURES:
        (PICTURES / f"{name}.svg").write_text(FIGURES[name](), encoding="utf-8")
        print(f"docs/pictures/{name}.svg")


if __name__ == "__main__":
    main(sys.argv[1:])
