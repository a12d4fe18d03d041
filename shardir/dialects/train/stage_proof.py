"""The proof that a step in stages terminates on all ranks, however long functions and transfers
take.

    0F1 (net.ir:7) -> %h of microbatch 1 to rank 1 (net.ir:8) -> 1F1 (net.ir:9) -> ...

A graph has a node for each run of a function and for each message. A message is its send and its
receive, which happen together, since nothing is buffered. Edges go from a node to the nodes that
wait for it:

1. along the order of each rank, in which a message starts at its event and is awaited before the
   run that reads it;
2. from the run that makes a value to the run that reads it.

A channel moves its messages in the order in which both ends start them, so no message waits for a
later one. Hence the step terminates if the graph has no cycle.

All ranks of a stage run the same functions in the same order, and their collectives stay within the
stage. So a run is one node for all members of a group.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator

from xdsl.dialects.func import FuncOp
from xdsl.ir import Block, SSAValue

from shardir.algebra.mesh import axes_text
from shardir.algebra.schedules import check_actions
from shardir.algebra.schedules.checking import cycle_text, find_cycle
from shardir.diagnostics import Failure, ShardirError, coded
from shardir.dialects.dist import AxesAttr, find_mesh, layout_of
from shardir.dialects.locations import short_location
from shardir.dialects.train.stage_order import StageMessage, StageOrder
from shardir.dialects.train.stage_runs import StageRun, StepRuns
from shardir.dialects.train.stages import SCHEDULE, STAGE_AXIS, schedule_of, stage_of

OrderNode = StageRun | StageMessage


def check_order(f: FuncOp) -> None:
    """Check that a step in stages terminates on all ranks; other functions are skipped. Raises
    ShardirError as `proven_order` does."""
    if SCHEDULE in f.attributes:
        proven_order(f)


def proven_order(f: FuncOp) -> StageOrder:
    """Return an order of a step in stages that terminates. The number of sends in flight is the
    first of ranks, 2 ranks, 4 ranks, ... with which it does, up to one for each microbatch.

    Raises:
        ShardirError: with all errors of the first kind that occurs:

            1. the schedule does not fit the step;
            2. a stage reads a value that is not transferred to it;
            3. the sends and receives of a channel differ, or their orders do;
            4. runs and messages wait for each other.
    """
    runs = _runs(f)
    if errors := list(_schedule_errors(runs)):
        raise Failure([(f, e) for e in errors])
    order = StageOrder(runs, runs.schedule.ranks)
    errors = list(_unsent(order)) or list(_mismatches(order))
    while not errors and (cycle := _cycle(order)):
        if order.in_flight < runs.count:
            order = StageOrder(runs, 2 * order.in_flight)
        else:
            errors = [cycle]
    if errors:
        raise Failure([(f, e) for e in errors])
    return order


def _runs(f: FuncOp) -> StepRuns:
    """Return the runs of a step. Raises ShardirError if its schedule is malformed or deadlocks."""
    if schedule_of(f) is None:
        message = f"expected an array of lines of actions as {SCHEDULE}, got another attribute"
        raise ShardirError(coded("G16", message, use='write train.schedule = ["0F0,0B0"]'))
    try:
        runs = StepRuns(f)
        check_actions(runs.schedule)
    except ShardirError as e:
        lines = str(e).splitlines()
        raise Failure(
            [(f, coded("G16", f"{SCHEDULE}: {line}", use="")) for line in lines]
        ) from None
    return runs


def _schedule_errors(runs: StepRuns) -> Iterator[str]:
    """Yield an error for each difference between the schedule and the step."""
    schedule = runs.schedule
    named: dict[int, str] = {}
    for op, stage in runs.stages.items():
        named.setdefault(stage, f"@{op.callee.string_value()}")
    for op in (op for ops in runs.transfers.values() for op in ops):
        for stage in (op.source.value.data, *op.targets.data):
            named.setdefault(stage, f"the transfer of %{op.x.name_hint}")
    errors = [
        coded(
            "G16",
            f"expected a stage from 0 to {schedule.stages - 1} for {name}, got {stage}",
            use="write the actions of this stage",
        )
        for stage, name in named.items() if stage not in range(schedule.stages)
    ]  # fmt: skip
    for what, wanted, got in (
        ("microbatches", runs.count, schedule.microbatches),
        ("ranks", _ranks(runs.f) or schedule.ranks, schedule.ranks),
    ):
        if wanted != got:
            message = f"expected a schedule for {wanted} {what}, got one for {got}"
            errors.append(coded("G16", message, use=f"write the actions of {wanted} {what}"))
    return iter(errors or [*_missing_runs(runs), *_collectives(runs)])


def _ranks(f: FuncOp) -> int:
    """Return the size of the axis of stages in the mesh of a step; 0 without such an axis."""
    layouts = (layout_of(v) for v in f.body.block.args)
    names = {layout.mesh for layout in layouts if layout is not None}
    sizes = (dict(find_mesh(f, name).axes).get(STAGE_AXIS, 0) for name in names)
    return max(sizes, default=0)


def _missing_runs(runs: StepRuns) -> Iterator[str]:
    """Yield an error for each function and microbatch with another number of runs than one."""
    for (stage, kind), op in runs.actions.items():
        loop = runs.loop(runs.rank(op))
        times = Counter(run.microbatch for run in loop if run.op is op)
        for k in range(runs.count):
            if times[k] != 1 and runs.is_due(op, k):
                name, action = op.callee.string_value(), f"{stage}{kind}{k}"
                message = f"expected {action}, which runs @{name}, once, got it {times[k]} times"
                yield coded("G16", message, use=f"write {action}")


def _collectives(runs: StepRuns) -> Iterator[str]:
    """Yield an error for each op in a function of a stage that needs ranks of other stages."""
    for callee in runs.callees.values():
        for op in callee.body.block.ops:
            axes = op.properties.get("axes")
            if isinstance(axes, AxesAttr) and any(a.name == STAGE_AXIS for a in axes.data):
                over, stage = axes_text(axes.data), stage_of(callee)
                message = f"expected {op.name} among ranks of stage {stage}, got one over {over}"
                yield coded("G16", message, use="transfer the value between the stages")


def _unsent(order: StageOrder) -> Iterator[str]:
    """Yield an error for each value that a rank reads and another rank does not send to it."""
    unsent: dict[tuple[SSAValue, int], tuple[str, int]] = {}
    for rank in order.ranks:
        reads = [(str(run), r) for run in order.runs.runs(rank) for r in order.reads(run)]
        reads += [("the step", r) for r in order.runs.states(rank)]
        for reader, (value, makers, _) in reads:
            source = order.runs.rank(makers[0].op)
            if source != rank and rank not in order.runs.targets(value.name):
                unsent.setdefault((value.name, rank), (reader, source))
    for (v, rank), (reader, source) in unsent.items():
        message = (
            f"expected %{v.name_hint} on rank {rank}, where {reader} reads it, got it on {source}"
        )
        yield coded("G16", message, use="transfer it to the stage that reads it")


def _mismatches(order: StageOrder) -> Iterator[str]:
    """Yield an error for each channel with a receive that would take a wrong value."""
    sends, receives = (_channels(order, kind) for kind in ("send", "receive"))
    for (source, target), sent in sends.items():
        received = receives[source, target]
        for i, message in enumerate(sent):
            if i == len(received):
                text = f"expected a receive of {_text(message)}, got none"
                yield coded("G16", text, use="read it there, or drop the transfer")
            elif received[i] != message:
                text = (
                    f"rank {source} to rank {target}: expected receives in the order of the sends, "
                    f"{_text(message)} next, got {_text(received[i])}"
                )
                yield coded("G16", text, use="let the stages read values in the order of the text")
            else:
                continue
            break


def _channels(order: StageOrder, kind: str) -> dict[tuple[int, int], list[StageMessage]]:
    """Return the messages of each directed pair of ranks, in the order of their sends or receives
    (`kind`)."""
    channels: defaultdict[tuple[int, int], list[StageMessage]] = defaultdict(list)
    for events in order.events:
        for event in events:
            if event.kind == kind and isinstance(message := event.of, StageMessage):
                channels[message.source, message.target].append(message)
    return channels


def _cycle(order: StageOrder) -> str:
    """Return an error if runs and messages wait for each other, else an empty text."""
    after: dict[OrderNode, set[OrderNode]] = {
        event.of: set() for events in order.events for event in events
    }
    for events in order.events:
        last: list[OrderNode] = []
        """The nodes that the next event of the rank waits for."""
        for kind, node in events:
            if kind == "wait":
                last.append(node)
                continue
            for before in last:
                after[before].add(node)
            if kind == "run":
                last = [node]
    for node in after:
        if isinstance(node, StageRun):
            for read in order.reads(node):
                for run in read.runs:
                    if order.runs.rank(run.op) == order.runs.rank(node.op):
                        after[run].add(node)
    index = {node: i for i, node in enumerate(after)}
    ordered = {node: sorted(followers, key=index.__getitem__) for node, followers in after.items()}
    cycle = find_cycle(ordered)
    if not cycle:
        return ""
    placed = [n if isinstance(n, StageMessage) else order.runs.rank(n.op) for n in cycle]
    shown = cycle_text([_placed_text(n) for n in cycle], placed)
    message = f"expected a step that ends, got runs and transfers that wait for each other: {shown}"
    return coded("G16", message)


def _text(node: OrderNode) -> str:
    """Return a run, or a message: `%h of microbatch 1 to rank 1`."""
    if isinstance(node, StageRun):
        return str(node)
    (v, microbatch), _, target = node
    which = "" if microbatch is None else f" of microbatch {microbatch}"
    return f"%{v.name_hint}{which} to rank {target}"


def _placed_text(node: OrderNode) -> str:
    """Return a node with its source line."""
    op = node.op if isinstance(node, StageRun) else node.value.name.owner
    where = "" if isinstance(op, Block) else short_location(op)
    return f"{_text(node)} ({where})" if where else _text(node)
