"""A plan in a sentence: where its layouts come from, and what each axis splits."""

from collections.abc import Iterator, Sequence

from xdsl.dialects.builtin import DictionaryAttr, FloatAttr, ModuleOp, StringAttr
from xdsl.dialects.func import FuncOp
from xdsl.passes import ModulePass

from shardir import pipelines
from shardir.algebra.mesh import Mesh
from shardir.diagnostics import size_text
from shardir.reports.record import ArgumentRecord, LayoutRecord
from shardir.rewriting.functions import bodies


def plan_text(lowered: ModuleOp, passes: Sequence[ModulePass]) -> str:
    """Return where the layouts come from: a plan, a search with its gap, or propagation."""
    found = list[str]()
    for p in passes:
        if p.name == "apply-plan":
            given = vars(p)
            lines = given["plan"].strip().splitlines()
            many = f"{len(lines)} lines"
            found.append(many if len(lines) > 1 else "".join(lines) or str(given["file"]))
        if p.name == "data-parallel":
            found.append("the batch is split")
        if p.name == pipelines.SEARCH:
            found += [_search(f) for f, _ in bodies(lowered)]
    if not found and any(p.name == pipelines.PROPAGATION for p in passes):
        found.append("propagated from the program's annotations")
    return "; ".join(dict.fromkeys(filter(None, found))) or "none"


def _search(f: FuncOp) -> str:
    search = f.attributes.get("search")
    if not isinstance(search, DictionaryAttr):
        return ""
    gap, presets = search.data.get("gap"), search.data.get("presets")
    of = f"{presets.data}, " if isinstance(presets, StringAttr) else ""
    share = gap.value.data if isinstance(gap, FloatAttr) else 0.0
    return f"searched: {of}at most {share:.1%} slower than the fastest"


def axis_sentences(
    arguments: Sequence[ArgumentRecord], layouts: Sequence[LayoutRecord], mesh: Mesh,
    pipeline: int = 1,
) -> list[str]:  # fmt: skip
    """Return for each axis of several ranks the shares of parameters, states and inputs, by bytes
    of the whole program, that it splits.

    Args:
        pipeline: the number of ranks of a pipeline; 1 without stages.
    """
    return [*_sentences(arguments, layouts, mesh, pipeline)]


def _sentences(
    arguments: Sequence[ArgumentRecord], layouts: Sequence[LayoutRecord], mesh: Mesh,
    pipeline: int,
) -> Iterator[str]:  # fmt: skip
    for name, size in mesh.axes:
        if size == 1:
            continue
        parts = []
        for role, plural in (
            ("input", "inputs"), ("parameter", "parameters"), ("state", "states of the optimizer"),
        ):  # fmt: skip
            total = split = 0
            for a in arguments:
                if a.role == role:
                    layout = layouts[a.layout]
                    whole = a.bytes
                    for shards in layout.shards:
                        whole *= shards
                    total += whole
                    split += whole * any(_has(text, str(name)) for text in layout.axes)
            if split:
                share = split / total
                parts.append(plural if share > 0.995 else f"{share:.0%} of the {plural}")
        if parts:
            *first, last = parts
            listed = f"{', '.join(first)} and {last}" if first else last
            yield f"{name} ({size} ranks) splits {listed}"
        elif size == pipeline:
            yield f"{name} ({size} ranks) is the pipeline: each rank runs stages of its own"
        else:
            yield f"{name} ({size} ranks) splits no argument"
    total = sum(a.bytes for a in arguments if a.role != "input")
    if total:
        yield f"a rank holds {size_text(total)} of parameters and states"


def _has(text: str, axis: str) -> bool:
    """Whether the text of axes, `{dp, tp:(1)2}`, has an axis."""
    words = text.strip("{}").split(", ") if text.startswith("{") else [text]
    return any(word.partition(":")[0].strip() == axis for word in words)
