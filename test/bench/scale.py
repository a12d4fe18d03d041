"""Plans of `auto` for random programs and models: a scale for changes of the search.

    shard-bench scale --json before.json            before a change
    shard-bench scale --against before.json         after it: the ratios, and their summary

Programs are searched without annotations on each ready-made cluster, within the memory of its
devices. `seconds` is the estimated time of the lowered program, with overlap; `GB` what it needs on
a device; `cpu` the CPU seconds of search-strategies. A program that fits on no plan has an error in
place of them. Redistributions are random ones, and those of the models' programs; `seconds` and
`received` are of the plan. With `--against` the redistributions of the record are planned again.
"""

import json
import time
import warnings
from argparse import ArgumentParser
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stderr
from io import StringIO
from math import prod
from pathlib import Path
from random import Random
from typing import Any

from xdsl.context import Context
from xdsl.dialects.builtin import ModuleOp, TensorType

from bench.drawn_layouts import random_layout
from bench.laws import ALL_OPTIMIZERS, random_mesh, random_shape
from bench.plans import bare
from bench.programs import PANGU, bert, experts, gpt, pangu, resnet
from bench.random_steps import random_step
from shardir.algebra.mesh import Mesh
from shardir.algebra.notation import parse_layout
from shardir.algebra.redistribution import plan_redistribution
from shardir.cost import report
from shardir.cost.clusters import load, names
from shardir.diagnostics import ShardirError
from shardir.dialects.dist import RedistributeOp
from shardir.pipelines import build
from shardir.search.graph.transfer_costs import transfer_of
from shardir.search.meshes.declared_mesh import declare
from shardir.syntax.parser import parse

Record = dict[str, Any]

CLUSTERS = names()
AXES = {
    "ascend910": (2, 4), "gloo": (2, 4), "shm": (2, 4), "h100": (2, 8), "h200": (2, 8),
    "pod2048": (8, 8),
}  # fmt: skip
"""The axes of the meshes of models, on the first devices of each cluster."""

LARGE_AXES = {"h200": (64, 8), "pod2048": (64, 4, 8)}
"""The axes of PanGu 207B: smaller clusters have no memory for it."""

RANDOM_PROGRAMS, RANDOM_REDISTRIBUTIONS = 10, 100
"""On each cluster."""

NARROW = "mixed-precision{compute=f16},"
MODELS: dict[str, Callable[[int], str]] = {
    "gpt": lambda n: gpt(layers=4, batch=2 * n, seq=256, hidden=512, vocab=8192, optimizer="adam"),
    "bert": lambda n: bert(layers=4, batch=2 * n, seq=256, hidden=512, vocab=8192),
    "experts": lambda n: experts(layers=4, batch=2 * n, seq=128, width=256, count=8),
    "resnet": lambda n: resnet(blocks=(1, 1, 1, 1), batch=4 * n, image=64),
    "pangu 2.6B": lambda n: pangu(**PANGU["2.6B"], batch=2 * n),
    "pangu 207B": lambda n: pangu(**PANGU["207B"], batch=n),
}
"""The text of each model, by the number of devices."""

SMOKE = {
    "CLUSTERS": ["gloo"], "AXES": {"gloo": (1, 2)}, "RANDOM_PROGRAMS": 1,
    "RANDOM_REDISTRIBUTIONS": 2,
    "MODELS": {"gpt": lambda n: gpt(layers=1, batch=n, seq=8, hidden=16, heads=2, vocab=32)},
}  # fmt: skip


def add_options(parser: ArgumentParser) -> None:
    parser.add_argument("--against", type=Path, metavar="FILE", help="a record to compare with")
    parser.add_argument("--only", choices=["random", "models", "redistributions"])
    parser.add_argument("--cluster", choices=CLUSTERS, help="one cluster alone")
    parser.add_argument("--model", choices=[*MODELS], help="one model alone")


def records(
    log: Callable[[str], object],
    against: Path | None = None,
    only: str | None = None,
    cluster: str | None = None,
    model: str | None = None,
) -> list[Record]:
    """One record per program: name, cluster, seconds, GB, cpu, total cpu or error; and one per
    redistribution: name, cluster, axes, shape, dtype, source, target, seconds, received. With
    `against` also the ratios, and their summary."""
    if model is not None and only not in (None, "models"):
        raise ShardirError(f"--model: expected models alone with it, got --only {only}; drop one")
    before = recorded(against) if against else []
    clusters = [name for name in CLUSTERS if cluster in (None, name)]
    found = list[Record]()
    for case, mesh, program in _programs(clusters, only, model):
        found.append(measured(case, mesh, program, moved := list[Record]()))
        log(", ".join(f"{k} {v}" for k, v in found[-1].items()))
        if not before:
            found += moved
    if only in (None, "redistributions"):
        given = [r for r in before if "source" in r and r["cluster"] in clusters]
        for each in given or (r for c in clusters for r in _drawn(c)):
            found.append(each | planned(each))
    if not found:
        raise ShardirError(f"expected a case, got none: {model} does not fit on {cluster}")
    return compared(found, before) if before else found


def recorded(file: Path) -> list[Record]:
    """Return the records of a file that `--json` wrote.

    Raises:
        ShardirError: it has none of this benchmark.
    """
    try:
        found = json.loads(file.read_text(encoding="utf-8"))["records"]
        if found and all({"name", "cluster", "axes"} <= r.keys() for r in found):
            return found
    except (ValueError, TypeError, LookupError, AttributeError):
        pass
    except OSError as e:
        raise ShardirError(f"--against: cannot read {file}: {e.strerror}") from None
    raise ShardirError(
        f"--against: expected a record of this benchmark, got {file}; write one with "
        "`shard-bench scale --json FILE`"
    )


def tables(found: list[Record]) -> dict[str, list[Record]]:
    """Return the table of programs, and the summary of ratios."""
    programs = [r for r in found if "cpu" in r or "error" in r]
    return {"programs": programs, "summary": [r for r in found if "worst" in r]}


def _programs(
    clusters: Sequence[str], only: str | None, model: str | None
) -> Iterator[tuple[Record, Mesh, ModuleOp]]:
    """Yield the name and cluster, the mesh and the program of each case."""
    for name in clusters if only in (None, "random") and model is None else ():
        for i in range(RANDOM_PROGRAMS):
            random = Random(f"scale {name} {i}")
            mesh = random_mesh(name, random)
            text = random_step(mesh, random, random.randint(1, 6), ALL_OPTIMIZERS)
            yield {"name": f"random {i}", "cluster": name}, mesh, parse(text)
    for kind, make in MODELS.items() if only in (None, "models") else ():
        for name in clusters if model in (None, kind) else ():
            sizes = (LARGE_AXES if kind == "pangu 207B" else AXES).get(name)
            if sizes is not None:
                mesh = Mesh(
                    "m", tuple(zip("abc", sizes, strict=False)), load(name).part(prod(sizes))
                )
                module = bare(parse(make(mesh.size)))
                declare(module, mesh)
                yield {"name": kind, "cluster": name}, mesh, module


def measured(case: Record, mesh: Mesh, module: ModuleOp, moved: list[Record]) -> Record:
    """Return the record of a program. Its redistributions are added to `moved`, each once."""
    found = case | {"axes": [n for _, n in mesh.axes]}
    spent = dict[str, float]()
    pipeline = (NARROW if case["name"].startswith("pangu") else "") + "auto"
    try:
        with warnings.catch_warnings(), redirect_stderr(StringIO()):
            warnings.simplefilter("ignore")
            for p in build(pipeline):
                begin = time.process_time()
                p.apply(Context(), module)
                spent[p.name] = spent.get(p.name, 0.0) + time.process_time() - begin
                if p.name == "insert-redistributions":
                    moved += _redistributions(found, mesh, module)
    except ShardirError as e:
        return found | {"error": str(e).splitlines()[0], "total cpu": sum(spent.values())}
    costs = report(module)
    return found | {
        "seconds": sum(c.seconds for c in costs),
        "GB": max(c.memory.peak for c in costs) / 1e9,
        "cpu": spent["search-strategies"],
        "total cpu": sum(spent.values()),
    }


def _redistributions(program: Record, mesh: Mesh, module: ModuleOp) -> Iterator[Record]:
    """Yield each redistribution of a program once."""
    seen = set[tuple[str, ...]]()
    for op in module.walk():
        if isinstance(op, RedistributeOp):
            t, source, target = transfer_of(op)
            if source.host or target.host:
                continue
            case = _case(program["cluster"], mesh, t, str(source), str(target))
            key = tuple(map(str, case.values()))
            if key not in seen:
                seen.add(key)
                yield {"name": f"of {program['name']}", **case, **planned(case)}


def _case(cluster: str, mesh: Mesh, t: TensorType, source: str, target: str) -> Record:
    return {
        "cluster": cluster, "axes": [n for _, n in mesh.axes], "shape": [*t.get_shape()],
        "dtype": str(t.element_type), "source": source, "target": target,
    }  # fmt: skip


def _drawn(cluster: str) -> Iterator[Record]:
    """Yield random redistributions of f32."""
    for i in range(RANDOM_REDISTRIBUTIONS):
        random = Random(f"scale redistribution {cluster} {i}")
        mesh = random_mesh(cluster, random)
        shape = random_shape(mesh, random)
        source, target = (random_layout(mesh, len(shape), random) for _ in range(2))
        yield {
            "name": "random", "cluster": cluster, "axes": [n for _, n in mesh.axes],
            "shape": [*shape], "dtype": "f32", "source": str(source), "target": str(target),
        }  # fmt: skip


def planned(case: Record) -> Record:
    """Return the seconds and the received bytes of a redistribution."""
    sizes = case["axes"]
    mesh = Mesh(
        "m", tuple(zip("abc", sizes, strict=False)), load(case["cluster"]).part(prod(sizes))
    )
    source, target = (parse_layout(case[end]) for end in ("source", "target"))
    found = plan_redistribution(tuple(case["shape"]), case["dtype"], mesh, source, target)
    return {"seconds": found.seconds, "received": found.received_bytes}


def compared(found: list[Record], before: list[Record]) -> list[Record]:
    """Return the records with their ratios to those of before, then the summary of each kind: the
    mean and the worst ratio, and that of the sums."""
    keys = ("name", "cluster", "axes", "shape", "dtype", "source", "target")

    def key(r: Record) -> str:
        return ", ".join(str(r[k]) for k in keys if k in r)

    old, pairs = (
        {key(r): r for r in before},
        dict[tuple[str, str], list[tuple[float, float, str]]](),
    )
    for r in found:
        then = old.get(key(r))
        if then is None or ("error" in r) != ("error" in then):
            r["changed"] = "no record" if then is None else str(then.get("error", "was planned"))
            continue
        kind = "random" if r["name"].startswith("random") else r["name"]
        kind = f"{kind}, redistributions" if "source" in r else kind
        for figure in ("seconds", "received", "cpu", "GB"):
            if then.get(figure):
                r[f"{figure} ratio"] = r[figure] / then[figure]
                pairs.setdefault((kind, figure), []).append((r[figure], then[figure], key(r)))
    summary = list[Record]()
    for (kind, figure), each in pairs.items():
        worst, of = max((now / then, of) for now, then, of in each)
        summary.append({
            "kind": kind, "figure": figure, "cases": len(each),
            "mean": sum(now / then for now, then, _ in each) / len(each),
            "sum": sum(now for now, _, _ in each) / sum(then for _, then, _ in each),
            "worst": worst, "of": of,
        })  # fmt: skip
    return found + summary
