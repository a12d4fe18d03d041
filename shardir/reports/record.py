"""The record of a report: what is known of compiled programs, as plain values for JSON.

Everything comes from the cost model, the simulator and the passes; nothing is estimated here. The
page (page.py) draws the record, and `shard-report --json` prints it. Times are in seconds, memory
in bytes, shares from 0 to 1. Long lists are columns: `names[i]` and `seconds[i]` are of one op, and
`places[i]`, `kinds[i]` and `layers[i]` are indices into the lists of strings of that name.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from typing import Any

SCHEMA = 1
"""The version of the record."""

EventRows = dict[str, dict[str, list[Any]]]
"""By name of a row, columns of its events: begin and end in seconds, the op, the kind of event."""

COMPUTES, WAITS, LATE, MOVES = range(4)
"""The kinds of events: computation, the wait for a collective, the wait for the last device to
begin it, and a collective on its links."""


@dataclass(frozen=True)
class Split:
    """The seconds of a rank in a step: they add up to those of the step.

    Attributes:
        computation: of its ops.
        exposed: in which it waits for communication that has begun.
        late: in which it waits for the last device to begin.
        bubble: of a pipeline: the rest, in which it waits for other stages.
        hidden: seconds of communication beside computation, which are no part of the sum.
    """

    computation: float
    exposed: float
    late: float
    bubble: float
    hidden: float


@dataclass(frozen=True)
class MeshRecord:
    """A mesh: its axes, major to minor, and the levels of its cluster, innermost first."""

    name: str
    axes: list[tuple[str, int]]
    size: int
    levels: list[dict[str, Any]]
    level_of_axis: dict[str, str]
    """By axis, the name of the outermost level that a group along it crosses."""
    memory: int | None
    rates: dict[str, float]
    memory_bandwidth: float | None


@dataclass(frozen=True)
class MemoryRecord:
    """The memory of a device.

    Attributes:
        peak, parts: bytes at the peak, and those of each purpose.
        at: the op at the peak.
        storages: of the largest storages that live there, those of equal layers together: name,
            bytes, purpose, and number.
        others: bytes of further storages, and of buffers of collectives.
        arguments: bytes of parameters, states and inputs, which are held throughout.
        limit: bytes of a device; None if unknown.
        block, bound: of a planned block of memory (an arena), and the lower bound of any plan.
        host: the peak in the memory of the host.
    """

    peak: int
    parts: dict[str, int]
    at: str
    storages: list[tuple[str, int, str, int]]
    others: int
    arguments: int
    limit: int | None
    block: int | None
    bound: int | None
    host: int


@dataclass(frozen=True)
class RankRecord:
    """The timeline of ranks that do the same.

    Attributes:
        name: `all 64 ranks`, `pipeline rank 1`.
        runs: of a pipeline: begin, end, label and function of each run of a stage's function, whose
            rows are in `functions` of the program, from its begin.
        memory: pairs of a time and the live bytes from then on.
    """

    name: str
    split: Split
    rows: EventRows
    runs: list[tuple[float, float, str, str]]
    memory: list[tuple[float, int]]
    use: MemoryRecord


@dataclass(frozen=True)
class CollectiveRecord:
    """A collective, or a copy between device and host.

    Attributes:
        op: its index among the ops.
        over, ranks: its axes, and the number of ranks in a group.
        form: the algorithm that is priced.
        started: whether the device goes on beside it.
        cause: the ops that make it necessary.
        layouts: of operand and result.
        why: the lines of `--explain` on its value, with alternatives and their costs.
        moved: the redistribution that it is a part of.
    """

    op: int
    over: str
    ranks: int
    form: str
    started: bool
    cause: str
    layouts: str
    why: list[str]
    moved: dict[str, Any] | None


@dataclass(frozen=True)
class ArgumentRecord:
    """A parameter, a state or an input: `layout` is an index into the layouts of the program."""

    name: str
    role: str
    dtype: str
    shape: list[int]
    local: list[int]
    bytes: int
    layout: int


@dataclass(frozen=True)
class LayoutRecord:
    """A layout: by dimension the number of shards, and by rank its shard of each dimension."""

    text: str
    shards: list[int]
    axes: list[str]
    ranks: list[list[int]]


@dataclass(frozen=True)
class LayerRecord:
    """Equal layers, by the names of values.

    Attributes:
        name: `layers.*`.
        count: of the layers.
        computation, communication, exposed: seconds of all of them.
        each: seconds of ops by the number of the layer.
    """

    name: str
    count: int
    computation: float
    communication: float
    exposed: float
    bytes: int
    each: dict[str, float]


@dataclass(frozen=True)
class MeasuredRecord:
    """The recorded calls of a run, as means over ranks and calls.

    Attributes:
        ranks, calls: their numbers.
        seconds: of a call.
        ops: by op, its seconds: of computation, or of a collective from its begin to its end; None
            for one that the trace does not have.
        exposed: by op, the seconds in which a rank waits for it.
        split: the seconds of computation, and those of waits.
        timelines: the rows of the last call of each rank, from its begin.
    """

    ranks: int
    calls: int
    seconds: float
    ops: list[float | None]
    exposed: list[float | None]
    split: dict[str, float]
    timelines: list[EventRows]


@dataclass(frozen=True)
class ProgramRecord:
    """A function of a compiled program: a training step, or another one."""

    label: str
    function: str
    mesh: MeshRecord
    plan: str
    sentences: list[str]
    seconds: float
    split: Split
    flops: int
    peak_share: float | None
    samples: float | None
    tokens: float | None
    memory: MemoryRecord
    strings: dict[str, list[str]]
    """Kinds, places (`net.ir:22`), layers and phases."""
    ops: dict[str, list[Any]]
    """Columns: name, kind, place, layer, phase, flops, bytes, seconds, exposed, again."""
    collectives: list[CollectiveRecord]
    ranks: list[RankRecord]
    functions: dict[str, EventRows]
    layouts: list[LayoutRecord]
    arguments: list[ArgumentRecord]
    layers: list[LayerRecord]
    narrowest: str
    """The element type whose rate is the peak rate."""
    recomputed: dict[str, Any] | None
    search: dict[str, Any] | None
    candidates: list[str]
    measured: MeasuredRecord | None = None


@dataclass(frozen=True)
class ReportRecord:
    """The record of a report: programs side by side, and the table of a comparison."""

    title: str
    programs: Sequence[ProgramRecord]
    comparison: Sequence[Mapping[str, Any]] = ()
    version: str = field(default_factory=lambda: version("shardir"))
    schema: int = SCHEMA

    def json(self) -> str:
        """Return the record as JSON."""
        return json.dumps(asdict(self), separators=(",", ":"), ensure_ascii=False)
