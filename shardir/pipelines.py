"""Pipelines and modes, and the options that add passes: a plan, a precision, files.

A mode is a pipeline named after the way it decides layouts. It takes the options of its passes.
"""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from xdsl.passes import ModulePass
from xdsl.utils.arg_spec import ArgSpec

from shardir.diagnostics import ShardirError, did_you_mean
from shardir.dialects.installed import of_registry
from shardir.passes import PASSES
from shardir.rewriting.options import UsageError, instantiate
from shardir.rewriting.registry import Loaders, build, expand, known_passes, known_pipelines
from shardir.syntax.files import read_text

SEARCH, PROPAGATION, LOWERING = "search-strategies", "propagate-strategies", "lower-to-spmd"
DIFFERENTIATION = "distributed-autodiff"
DECIDERS = (PROPAGATION, SEARCH)
"""The passes that decide on layouts."""

RECOMPUTE = "choose-recompute"
PRECISION = "mixed-precision"

READERS = (
    *DECIDERS, "assign-stages", "data-parallel", DIFFERENTIATION, "require-layouts",
)  # fmt: skip
"""The passes that read annotations: a plan is applied before the first of them."""

DEFAULT = "train"
"""The pipeline of a compilation that names none."""


class Mode(NamedTuple):
    """A pipeline, and how it decides on layouts that the source leaves open."""

    pipeline: str
    does: str


MODES: dict[str, Mode] = {
    "stand_alone": Mode("single-device", "one device: annotated layouts are dropped"),
    "data": Mode("data", "inputs split along dimension 0 over all devices, parameters replicated; "
                 "an annotation that contradicts this is an error"),
    "hybrid": Mode("hybrid", "annotations stay; values that they leave open are data parallel"),
    "semi_auto": Mode("train", "annotations are propagated to the other values"),
    "auto": Mode("auto", "a search finds the minimum estimated time; annotations stay"),
    "manual": Mode("manual", "every value is annotated, in the local view or by layouts; any "
                   "other is an error"),
}  # fmt: skip
"""The modes by the names that `--mode` reads: MindSpore's, without their `_parallel`."""


def pipeline_of(pipeline: str | None, mode: str | None, default: str) -> str:
    """Return `pipeline`, or the pipeline of the mode with the mode's options; else `default`.

    Raises:
        UsageError: both are set, or the mode does not exist.
    """
    if mode is None:
        return default if pipeline is None else pipeline
    if pipeline is not None:
        raise UsageError(
            f"expected a mode or a pipeline, got the mode {mode} and {pipeline!r}; use one of them"
        )
    word, brace, options = mode.partition("{")
    name = word.strip().lower().replace("-", "_").removesuffix("_parallel")
    modes = known_modes()
    if name not in modes:
        hint = did_you_mean(name, modes) or f"; there are {', '.join(modes)}"
        raise UsageError(f"there is no mode {word.strip()}{hint}")
    return f"{modes[name].pipeline}{brace}{options}"


def known_modes() -> dict[str, Mode]:
    """Return the modes of shardir, and of installed packages."""
    return {name: Mode(*mode) for name, mode in of_registry("modes", MODES).items()}


def with_plan(passes: Sequence[ModulePass], plan: Any) -> list[ModulePass]:
    """Return the passes with apply-plan before the first that reads annotations, else at the end;
    and again before a pass that decides on layouts after differentiation.

    `plan`: a file, the text of a plan, which has a `:`, several lines or presets, or a plan in
    Python (shardir/algebra/plan_notation.py).

    Raises:
        ShardirError: it is none of these.
    """
    found = list(passes)
    if plan is None:
        return found
    from shardir.algebra.plan_notation import is_plan, text_of  # which few commands need

    if not isinstance(plan, str | Path):
        plan = text_of(plan)
    at = next((i for i, p in enumerate(found) if p.name in READERS), len(found))
    new: Any = PASSES["apply-plan"]()
    is_text = isinstance(plan, str) and is_plan(plan)
    if not is_text and not Path(plan).exists():
        raise ShardirError(
            f"expected a plan, got {plan}, which is neither a file nor presets; write "
            '"megatron(tp) * fsdp(dp)", or lines: \'"PATTERN" : [{axis}, ...]\''
        )
    given = {"plan": plan} if is_text else {"file": str(plan)}
    last = max((i for i, p in enumerate(found) if p.name in DECIDERS), default=at)
    if any(p.name == DIFFERENTIATION for p in found[at:last]):
        found.insert(last, new(**given, lines="after"))
        given["lines"] = "before"
    found.insert(at, new(**given))
    return found


def with_recompute(
    passes: Sequence[ModulePass], recompute: str | float | None, offload: bool = False
) -> list[ModulePass]:
    """Return the passes with a policy or a budget for choose-recompute, and for a search; and
    whether values may be in host memory.

    Raises:
        UsageError: there is no such pass.
    """
    found: list[Any] = list(passes)
    if recompute is None and not offload:
        return found
    if not any(p.name == RECOMPUTE for p in found):
        given = "offload" if recompute is None else "recompute"
        raise UsageError(f"expected the pass {RECOMPUTE} for {given}, got none; add it, or a mode")
    options: dict[str, Any] = {} if recompute is None else {"recompute": str(recompute)}
    if offload:
        options["offload"] = True
    return [
        dataclasses.replace(p, **options) if p.name in (RECOMPUTE, SEARCH) else p for p in found
    ]


def with_precision(passes: Sequence[ModulePass], precision: str | None) -> list[ModulePass]:
    """Return the passes after casts to a narrow type for products, if there is one.

    Raises:
        UsageError: there is no such type, or the pipeline has such casts.
    """
    if precision is None:
        return list(passes)
    if precision not in ("bf16", "f16"):
        raise UsageError(f"expected a precision, bf16 or f16, got {precision!r}")
    if any(p.name == PRECISION for p in passes):
        raise UsageError(f"expected a precision or the pass {PRECISION}, got both; drop one")
    return [*build(f"{PRECISION}{{compute={precision}}}"), *passes]


def planned(passes: Sequence[ModulePass]) -> int:
    """Return the index of the pass after which annotations are a plan: the first apply-plan, or the
    last one that decides on layouts.

    Raises:
        UsageError: there is no such pass.
    """
    for names, which in ((("apply-plan",), 0), (DECIDERS, -1)):
        if at := [i for i, p in enumerate(passes) if p.name in names]:
            return at[which]
    raise UsageError("expected a pass that decides on layouts, got none; add a plan or a mode")


def with_files(
    passes: Sequence[ModulePass], save: str | Path | None, graph: str | Path | None = None
) -> list[ModulePass]:
    """Return the passes with save-strategies after the last one that decides on layouts, and with a
    search that writes its cost graph.

    Raises:
        UsageError: there is no such pass, or the graph's file has no known ending.
    """
    found = list(passes)
    if save is not None:
        at = max((i for i, p in enumerate(found) if p.name in DECIDERS), default=None)
        if at is None:
            raise UsageError(
                f"--save-strategies: no pass decides on layouts; run one of {', '.join(DECIDERS)}, "
                "or choose the mode data, hybrid, semi_auto or auto"
            )
        new: Any = PASSES["save-strategies"]()
        found.insert(at + 1, new(str(save)))
    if graph is not None:
        at = next((i for i, p in enumerate(found) if p.name == SEARCH), None)
        if at is None:
            raise UsageError(f"--cost-graph: no pass searches; run {SEARCH}, or --mode=auto")
        from shardir.search.plans.drawing import writer_of  # the search, which few commands run

        try:
            writer_of(Path(graph))
        except ShardirError as e:
            raise UsageError(f"--cost-graph: {e}") from None
        search: Any = found[at]
        found[at] = dataclasses.replace(search, graph=str(graph))
    return found


def recorded(passes: Sequence[ModulePass]) -> str:
    """Return passes as JSON, to run them again elsewhere: with a plan's text instead of its file,
    and without output files."""
    found = []
    for p in passes:
        given: Any = p
        match p.name:
            case "save-strategies":
                continue
            case "apply-plan" if given.file:
                given = dataclasses.replace(given, file="", plan=read_text(Path(given.file)))
            case "split-stages":
                given = dataclasses.replace(given, save_schedule="")
            case _ if p.name == SEARCH:
                given = dataclasses.replace(given, graph=None)
        spec = given.pipeline_pass_spec()
        found.append([spec.name, spec.parameters] if spec.parameters else spec.name)
    return json.dumps(found)


def of_record(text: str) -> list[ModulePass]:
    """Return the passes that `recorded` wrote.

    Raises:
        ValueError: the text is another one; UsageError: there is no such pass or option.
    """
    passes, found = known_passes(), []
    for entry in json.loads(text):
        name, parameters = (entry, {}) if isinstance(entry, str) else entry
        if name not in passes:
            raise UsageError(f"there is no pass {name}")
        found.append(instantiate("pass", passes[name](), ArgSpec(name, parameters)))
    return found


def for_devices(passes: Sequence[ModulePass], count: int) -> list[ModulePass]:
    """Return the passes with a search for meshes of so many devices, if there is one."""
    given: Any = passes
    return [
        dataclasses.replace(p, devices=count) if p.name in ("search-mesh", "search-stages") else p
        for p in given
    ]


def text_of(passes: Sequence[ModulePass]) -> str:
    """Return the text of a pipeline, with all options that are not at their defaults."""
    return ",".join(str(p.pipeline_pass_spec()) for p in passes)


def runs_on_one_device(p: ModulePass) -> bool:
    """Whether the program of one device has the effect of a pass too: its ONE_DEVICE."""
    return getattr(p, "ONE_DEVICE", False)


def in_order(passes: Loaders = PASSES) -> list[str]:
    """Return the names of all passes in the order of the pipelines, then passes of no pipeline."""
    known = {**PASSES, **passes}
    pipelines = known_pipelines()
    used = [s.name for text in pipelines.values() for s in expand(text, known, pipelines)]
    return [n for n in dict.fromkeys([*used, *passes]) if n in passes]
