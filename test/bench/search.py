"""The search for strategies: seconds until it ends, and what it proves of the plan.

The step is that of `bytes`, without any annotation, on Gloo's ranks (no cluster). `objective`,
`bound` and `megatron` are modelled seconds of one step: of the plan, of what no plan takes less
than, and of Megatron's plan (the annotations of `programs.gpt`), all by the same model.
"""

import re
from collections.abc import Callable
from time import perf_counter
from typing import Any

from programs import gpt
from xdsl.context import Context
from xdsl.dialects.builtin import ModuleOp

from shardir.passes import PASSES
from shardir.passes.functions import bodies, mesh_of
from shardir.passes.search_strategies import offers as offers_of
from shardir.syntax.parser import parse

LAYERS = (1, 2, 4)
MESHES = ((1, 4), (2, 4))
STATED = re.compile(r", #dist\.layout<[^>]*>")


def applied(text: str, pipeline: str) -> ModuleOp:
    """The module of a text after the passes."""
    module = parse(text)
    for name in pipeline.split(","):
        PASSES[name]()().apply(Context(), module)
    return module


def seconds(module: ModuleOp) -> float:
    """The modelled seconds of the only function, laid out, with its redistributions."""
    ((f, block),) = bodies(module)
    mesh = mesh_of(f, module)
    assert mesh is not None
    offers = offers_of(mesh)
    return sum(offers.spent(op) for op in block.ops)


SEARCHED = "distributed-autodiff,search-strategies"
ANNOTATED = "propagate-strategies,insert-redistributions,distributed-autodiff"


def records(log: Callable[[str], object]) -> list[dict[str, Any]]:
    """One record per mesh and depth: model, devices, axes, ops, seconds, objective, bound, gap,
    megatron."""
    out: list[dict[str, Any]] = []
    for dp, tp in MESHES:
        for layers in LAYERS:
            annotated = gpt(layers=layers, mesh=(dp, tp))
            module = applied(STATED.sub("", annotated), "distributed-autodiff")
            ((f, block),) = bodies(module)
            ops = sum(1 for _ in block.ops)
            start = perf_counter()
            PASSES["search-strategies"]()().apply(Context(), module)
            found = f.attributes["search"].data  # type: ignore[attr-defined]
            out.append({
                "model": f"gpt of {layers} layers", "devices": dp * tp,
                "axes": f"dp={dp},tp={tp}", "ops": ops,
                "seconds": perf_counter() - start,
                **{k: found[k].value.data for k in ("objective", "bound", "gap")},
                "megatron": seconds(applied(annotated, ANNOTATED)),
            })  # fmt: skip
            log(f"dp={dp} tp={tp}, {layers} layers: {out[-1]['seconds']:.1f} s")
    return out
