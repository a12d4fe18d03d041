"""Run passes, and keep what they know only while they run: why values have their layouts, the
redistributions, and the candidates of a search."""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from contextvars import copy_context
from dataclasses import asdict, dataclass, field
from typing import Any

from xdsl.context import Context
from xdsl.dialects.builtin import ModuleOp
from xdsl.ir import SSAValue
from xdsl.passes import ModulePass

from shardir import pipelines
from shardir.diagnostics import progress_to, report_progress
from shardir.dialects import dist
from shardir.dialects.locations import describe_maker, describe_op, file_location
from shardir.reports.layouts import Explanation
from shardir.reports.redistributions import plan_of
from shardir.rewriting.functions import bodies

SEARCHES = (pipelines.SEARCH, "search-mesh", "search-stages", pipelines.RECOMPUTE)
"""The passes whose progress names candidates."""

MAX_CANDIDATES = 200
"""The number of lines of a search that are kept."""


@dataclass(frozen=True)
class RedistributionRecord:
    """A redistribution before it is lowered.

    Attributes:
        value: its name in the source, with the op that makes it.
        source, target: the layouts.
        readers: the ops that need the target.
        steps: the plan.
        received, bound: bytes that a device receives, and a lower bound on them.
        seconds: of the plan.
    """

    value: str
    source: str
    target: str
    readers: list[str]
    steps: str
    received: int
    bound: int
    seconds: float


@dataclass
class Reasons:
    """What the passes of a program have decided, and why.

    Attributes:
        layouts: by the name of a value, the lines of `--explain`.
        redistributions: by the name of a value and the line of the source.
        candidates: the lines that searches have reported, the last ones if there are many.
    """

    layouts: dict[str, list[str]] = field(default_factory=dict)
    redistributions: dict[tuple[str, int], RedistributionRecord] = field(default_factory=dict)
    candidates: list[str] = field(default_factory=list)

    def of(self, name: str, line: int) -> tuple[list[str], dict[str, Any] | None]:
        """Return the explanation of a value, and its redistribution at a line."""
        moved = self.redistributions.get((name, line))
        return self.layouts.get(name, []), None if moved is None else asdict(moved)


class _Collected(Explanation):
    """Explains all values into `Reasons.layouts`."""

    def __init__(self, layouts: dict[str, list[str]]):
        super().__init__(())
        self.layouts = layouts

    def explain(self, v: SSAValue, lines: Collection[str], where: str) -> str:
        first, *rest = super().explain(v, lines, where).split("\n")
        if v.name_hint is not None:
            self.layouts.setdefault(v.name_hint, [first, *(line[2:] for line in rest)])
        return first


def run_passes(context: Context, module: ModuleOp, passes: Sequence[ModulePass]) -> Reasons:
    """Run passes over a module, in place, and return their reasons."""
    reasons = Reasons()
    explanation = _Collected(reasons.layouts)
    with _candidates(reasons.candidates):
        for p in passes:
            if p.name == pipelines.LOWERING:
                for _ in explanation.made(module):
                    pass
                reasons.redistributions |= _redistributions(module)
            if p.name == pipelines.PROPAGATION:
                for _ in explanation.propagate(module):
                    pass
            p.apply(context, module)
    return reasons


def _redistributions(module: ModuleOp) -> dict[tuple[str, int], RedistributionRecord]:
    meshes, found = dist.meshes_of(module), dict[tuple[str, int], RedistributionRecord]()
    for _, block in bodies(module):
        for op in block.ops:
            if not isinstance(op, dist.RedistributeOp) or op.value.name_hint is None:
                continue
            plan, place = plan_of(op, meshes), file_location(op.location)
            users = dict.fromkeys(use.operation for use in op.out.uses)
            found.setdefault((op.value.name_hint, place[1] if place else 0), RedistributionRecord(
                f"%{op.value.name_hint} from {describe_maker(op.value)}",
                f"[{plan.source}]", f"[{plan.target}]", [describe_op(u) for u in users],
                str(plan), plan.received_bytes, plan.bound_bytes, plan.seconds,
            ))  # fmt: skip
    return found


@contextmanager
def _candidates(lines: list[str]) -> Iterator[None]:
    """Keep the progress of searches, and hand all of it on."""

    outer = copy_context()  # with the sink of the caller

    def keep(text: str) -> None:
        if text.startswith(SEARCHES) and (not lines or lines[-1] != text):
            lines.append(text)
            del lines[:-MAX_CANDIDATES]
        outer.run(report_progress, text)

    with progress_to(keep):
        yield
