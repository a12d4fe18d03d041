"""The costs of the stages of a step, for `algebra/schedules`.

The seconds of an action are those of its function, and of the sums over microbatches of its
results. The bytes of a microbatch on a stage are the larger of: the values that the backward parts
read from the forward part and from other stages; and the values that W reads. Arguments of the step
are not counted.
"""

from collections.abc import Callable, Iterable, Sequence

from xdsl.dialects.func import CallOp, FuncOp, ReturnOp
from xdsl.ir import BlockArgument, SSAValue

from shardir.algebra.mesh import Mesh
from shardir.algebra.schedules import Action, PipelineCosts, Schedule, lower_bound
from shardir.cost.memory import LiveStorages
from shardir.cost.seconds import cost_of
from shardir.cost.stage_graph import StageGraph, split_backward_seconds
from shardir.cost.stages import TimedRun, times_of_step
from shardir.dialects import train
from shardir.dialects.nn.types import size_of
from shardir.dialects.train import StepRuns

BACKWARD = "IBW"
"""The actions that run backward parts."""


def pipeline_costs(
    f: FuncOp, mesh: Mesh, times: Iterable[Iterable[TimedRun]] | None = None
) -> PipelineCosts:
    """Return the costs of the stages of a step, on the mesh's cluster. A backward part B counts as
    I, the gradients of inputs.

    Args:
        times: the runs of each rank, from `times_of_step`, if they are known.
    """
    stages = range(step_schedule(f).stages)
    seconds = dict[tuple[int, str], float]()
    for begin, end, run in (t for runs in times or times_of_step(f, mesh).ranks for t in runs):
        if (action := run.action) is not None:
            seconds[action.stage, action.kind] = end - begin
    seconds = split_backward_seconds(seconds)

    def of(*kinds: str) -> tuple[float, ...]:
        return tuple(sum(seconds.get((s, kind), 0.0) for kind in kinds) for s in stages)

    sent, returned = (
        tuple(_transfer_seconds(f, mesh, s, s + step) for s in range(*ends))
        for step, ends in ((1, (len(stages) - 1,)), (-1, (1, len(stages))))
    )
    held = _HeldBytes(f, mesh)
    return PipelineCosts(
        of("F"), of("I", "B"), of("W"), sent, tuple(float(held.of(s)) for s in stages), returned
    )


def bound_of_loop(f: FuncOp, mesh: Mesh, times: Sequence[Sequence[TimedRun]]) -> float:
    """Return a lower bound, in seconds, on the loop over the microbatches: for any order of its
    functions, on the ranks of its schedule."""
    schedule = step_schedule(f)
    graph = StageGraph.of(StepRuns(f), mesh, times)
    bound = graph.bound(schedule.placement, schedule.microbatches)
    if not graph.is_chain:
        return bound
    costs = pipeline_costs(f, mesh, times)
    return max(bound, lower_bound(schedule.placement, schedule.microbatches, costs))


def step_schedule(f: FuncOp) -> Schedule:
    """Return the schedule of a step in stages."""
    text = train.schedule_of(f)
    assert text is not None
    return Schedule.parse(text)


def _transfer_seconds(f: FuncOp, mesh: Mesh, source: int, target: int) -> float:
    """Return the seconds of the longest transfer from one stage to another in the loop."""
    seconds = [0.0]
    for op in f.body.block.ops:
        if (
            isinstance(op, train.TransferOp)
            and op.source.value.data == source
            and target in op.targets.data
            and _is_in_loop(op.x)
            and (cost := cost_of(op, mesh)) is not None
        ):
            seconds.append(cost.seconds)
    return max(seconds)


def _action(op: CallOp) -> Action | None:
    """Return the action of a call, without its microbatch; None outside the loop."""
    callee = train.callee_of(op)
    if callee is None:
        return None
    kind, stage = train.action_of(callee), train.stage_of(callee)
    return None if kind is None or stage is None else Action(stage, kind)


def _is_in_loop(v: SSAValue) -> bool:
    """Whether a function in the loop over the microbatches makes a value."""
    op = v.owner
    return isinstance(op, train.EitherOp) or (isinstance(op, CallOp) and _action(op) is not None)


class _HeldBytes:
    """The bytes of a microbatch that a stage holds between its actions."""

    def __init__(self, f: FuncOp, mesh: Mesh):
        self.mesh = mesh
        self.calls = {
            action: op for op in f.body.block.ops
            if isinstance(op, CallOp) and (action := _action(op)) is not None
        }  # fmt: skip
        self.roots = dict[CallOp, Callable[[SSAValue], SSAValue]]()
        """By call, the map from values of its function to their storages."""

    def of(self, stage: int) -> int:
        """Return the maximum of the bytes that a stage holds between its actions."""
        by_kind = {kind: self.calls.get(Action(stage, kind)) for kind in BACKWARD}
        calls = [op for op in by_kind.values() if op is not None]
        before = self._read_bytes(calls)
        last = by_kind["W"]
        return before if last is None else max(before, self._read_bytes([last]))

    def _read_bytes(self, calls: list[CallOp]) -> int:
        """Return the bytes of the storages that calls read and do not make."""
        sizes = dict[SSAValue, int]()
        for v in (v for op in calls for v in op.operands):
            if (storage := self._storage(v)) is not None and storage.owner not in calls:
                sizes[storage] = max(sizes.get(storage, 0), size_of(v))
        return sum(sizes.values())

    def _storage(self, v: SSAValue) -> SSAValue | None:
        """Return the result of a call in the loop that a value shares its memory with; None for a
        value that no call in the loop makes."""
        while isinstance(v.owner, train.TransferOp | train.EitherOp):
            v = v.owner.operands[-1]
        op = v.owner
        if not isinstance(op, CallOp) or _action(op) is None:
            return None
        callee = train.callee_of(op)
        assert callee is not None
        end = callee.body.block.last_op
        assert isinstance(end, ReturnOp)
        root = self._root_in(op, callee)
        storage = root(end.operands[op.results.index(v)])
        if isinstance(storage, BlockArgument):
            return self._storage(op.operands[storage.index])
        sharing = (r for r, x in zip(op.results, end.operands, strict=True) if root(x) is storage)
        return next(sharing)

    def _root_in(self, op: CallOp, callee: FuncOp) -> Callable[[SSAValue], SSAValue]:
        if op not in self.roots:
            self.roots[op] = LiveStorages(callee, self.mesh).root
        return self.roots[op]
