"""The emission of a step in stages: the table of its schedule and values, and its functions.

STEP = stages.Pipeline(
    schedule=["0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"],
    parts=[
        ("F", 0, "step_forward_0", "x_1 w1", "h"),
        ...

@STEP.part
def step_forward_0(mesh, x, w1): ...
"""

from collections.abc import Mapping, Sequence

from xdsl.dialects.builtin import TensorType
from xdsl.dialects.func import CallOp, FuncOp, ReturnOp
from xdsl.ir import Operation, SSAValue

from shardir.algebra.layout import replicated
from shardir.algebra.mesh import Axis
from shardir.algebra.schedules import Schedule
from shardir.analysis.accumulation import added_in_place
from shardir.backend.torch.emit import names
from shardir.backend.torch.emit.names import Names, join_items
from shardir.backend.torch.emit.scope import Program, function_text
from shardir.backend.torch.emit.straight_line import RankText, StageText
from shardir.backend.torch.emit.types import DTYPES
from shardir.diagnostics import Failure
from shardir.dialects import train
from shardir.dialects.dist import global_shape, layout_of
from shardir.dialects.nn.types import element_name


def called_functions(f: FuncOp) -> list[FuncOp]:
    """Return the functions of a step in stages, in the order of their calls."""
    calls = (train.callee_of(op) for op in f.body.block.ops if isinstance(op, CallOp))
    return [callee for callee in calls if callee is not None]


def places_of(f: FuncOp) -> list[list[int]]:
    """Return, for each argument of a step in stages, the ranks along the stage axis that read
    it."""
    schedule = train.schedule_of(f)
    assert schedule is not None
    ranks = Schedule.parse(schedule).placement
    functions = {g.sym_name.data: g for g in called_functions(f)}
    argument_of: dict[SSAValue, SSAValue] = {}
    readers: dict[SSAValue, set[int]] = {v: set() for v in f.body.block.args}
    for op in f.body.block.ops:
        if isinstance(op, train.MicrobatchOp | train.CarriedOp):
            argument_of[op.out] = op.x
        elif isinstance(op, CallOp):
            stage = train.stage_of(functions[op.callee.root_reference.data])
            assert stage is not None
            for v in op.operands:
                if (root := argument_of.get(v, v)) in readers:
                    readers[root].add(ranks[stage])
    return [sorted(readers[v]) for v in f.body.block.args]


class StagesScope:
    """The emission of a step in stages."""

    def __init__(self, program: Program, f: FuncOp, called: Mapping[FuncOp, str]):
        self.program, self.f, self.called = program, f, called
        self.functions = {g.sym_name.data: g for g in called_functions(f)}
        self.table = Names(called.values()).new(called[f].upper())
        self.names = Names([self.table])
        self.known: dict[SSAValue, str] = {}
        self.slices: dict[str, str] = {}
        self.parts: list[str] = []
        self.sums: dict[str, str] = {}
        self.collected: dict[str, str] = {}
        self.carried: dict[str, list[str]] = {}
        self.transfers: list[str] = []
        self.added = added_in_place(f.body.block.ops)
        """The results of functions that are added to sums in place."""
        self.totals: dict[FuncOp, list[SSAValue]] = {}
        for op in (op for op in f.body.block.ops if isinstance(op, CallOp)):
            g, end = self.functions.get(op.callee.root_reference.data), None
            if g is not None and isinstance(end := g.body.block.last_op, ReturnOp):
                pairs = zip(op.results, end.operands, strict=True)
                self.totals[g] = [made for v, made in pairs if v in self.added]

    def text(self) -> list[str]:
        """Return the lines: the table, the functions of the stages, and the step.

        Raises:
            Failure: the step has ops without a stage.
        """
        self.program.used.add("stages")
        schedule = train.schedule_of(self.f)
        assert schedule is not None
        arguments = [self._name(v) for v in self.f.body.block.args]
        outside = "begin"
        for op in self.f.body.block.ops:
            if isinstance(op, train.MicrobatchesOp):
                outside = "update"
            self._add(op, outside)
        last = self.f.body.block.last_op
        assert isinstance(last, ReturnOp)
        results = [self._name(v) for v in last.operands]
        keys = train.updated_keys(self.f)
        shapes = [
            f"{names.literal(n)}: {self._type(v, 0, ())}"
            for n, v, key in zip(results, last.operands, keys, strict=True) if key is None
        ]  # fmt: skip
        if self.program.straight_line:
            return self._straight_line(arguments, last.operands, shapes)
        name, table = self.called[self.f], self.table
        lines = [f"{table} = stages.Pipeline("]
        orders = [names.literal(line.replace(",", " ")) for line in schedule.split("\n")]
        lines += self._list("schedule", orders)
        lines += self._dict("slices", [self._pair(n, x) for n, x in self.slices.items()])
        states = [names.tuple_text([names.literal(n), *map(names.literal, rest)])
                  for n, rest in self.carried.items()]  # fmt: skip
        lines += self._list("carried", states)
        lines += self._list("parts", self.parts)
        lines += self._dict("transfers", self.transfers)
        lines += self._dict("sums", [self._pair(n, x) for n, x in self.sums.items()])
        if self.collected:
            pairs = [self._pair(n, x) for n, x in self.collected.items()]
            lines += self._dict("collected", pairs)
        lines += [f"    in_flight={train.proven_order(self.f).in_flight},"]
        lines += [f"    results={names.literal(' '.join(results))},"]
        lines += self._dict("shapes", shapes)
        lines += [")", "", ""]
        for g in self.functions.values():
            text = function_text(self.program, g, self.called[g], self.totals[g])
            lines += [f"@{table}.part", *text, "", ""]
        lines += join_items(f"def {name}(", ["mesh", *arguments], "):", 0)
        keywords = ["mesh", *(f"{n}={n}" for n in arguments)]
        return [*lines, *join_items(f"return {table}.run(", keywords, ")", 4)]

    def _straight_line(
        self, arguments: Sequence[str], results: Sequence[SSAValue], shapes: Sequence[str]
    ) -> list[str]:
        """Return the lines of the straight-line form: the schedule, the types of received values
        and zeros, the functions of stages and ranks, and the step."""
        order, name = train.proven_order(self.f), self.called[self.f]
        functions = {n: self.called[g] for n, g in self.functions.items()}
        shown = StageText(name, self.table, functions, self.known, self.added)
        ranks = [RankText(shown, order, rank, results) for rank in order.ranks]
        mesh, at = self.program.mesh, self.program.rank
        if at is not None and mesh is not None:  # one rank only
            ranks = [ranks[mesh.coordinate(at, Axis(train.STAGE_AXIS))]]
        lines = [
            *names.comment_lines(
                f"@{name} on each rank of the stages, in the order of its schedule:"
            )
        ]
        for rank, actions in enumerate(order.runs.schedule.orders):
            lines += names.comment_lines(f"{rank}: {' '.join(map(str, actions))}")
        lines += _lines(f"{self.table} = {{", [*self.transfers, *shapes], "}", 0)
        for g in self.functions.values():
            if any(order.runs.schedule.placement[train.stage_of(g) or 0] == r.rank for r in ranks):
                text = function_text(self.program, g, self.called[g], self.totals[g])
                lines += ["", "", *text]
        for rank in ranks:
            lines += ["", "", *rank.function()]
        lines += ["", "", *join_items(f"def {name}(", ["mesh", *arguments], "):", 0)]
        lines += [f"    rank = mesh.index(({names.literal(train.STAGE_AXIS)},))"]
        for rank in ranks[:-1]:
            lines += [f"    if rank == {rank.rank}:", *rank.call(8)]
        return [*lines, *ranks[-1].call(4)]

    def _add(self, op: Operation, outside: str) -> None:
        match op:
            case train.MicrobatchOp():
                self.slices[self._name(op.out)] = self._name(op.x)
            case CallOp():
                g = self.functions[op.callee.root_reference.data]
                inputs = [self._name(v) for v in op.operands]
                outputs = " ".join(self._name(v) for v in op.results)
                sums = [self._name(self.added[v].out) for v in op.results if v in self.added]
                inputs = " ".join([*sums, *inputs])
                stage = train.stage_of(g)
                kind, name = train.action_of(g) or outside, self.called[g]
                texts = [
                    names.literal(kind),
                    str(stage),
                    *map(names.literal, (name, inputs, outputs)),
                ]
                self.parts.append(names.tuple_text(texts))
            case train.TransferOp():
                name = self.known[op.out] = self._name(op.x)
                type = self._type(op.x, op.source.value.data, op.targets.data)
                self.transfers.append(f"{names.literal(name)}: {type}")
            case train.AccumulateOp():
                self.sums[self._name(op.out)] = self._name(op.x)
            case train.CollectOp():
                self.collected[self._name(op.out)] = self._name(op.x)
            case train.CarriedOp():
                self.carried[self._name(op.out)] = [self._name(op.x)]
            case train.CarryOp():
                self.carried[self._name(op.carried)] += [self._name(op.x), self._name(op.out)]
            case train.Mark() | train.EitherOp() | ReturnOp():
                pass
            case _:
                message = f"expected calls in a step in stages, got {op.name}"
                raise Failure.at(op, f"{message}; run split-stages")

    def _name(self, v: SSAValue) -> str:
        if v not in self.known:
            either = (u.operation for u in v.uses if isinstance(u.operation, train.EitherOp))
            same = next((op.out for op in either), None)
            self.known[v] = self.names.new(v.name_hint) if same is None else self._name(same)
        return self.known[v]

    def _type(self, v: SSAValue, source: int, targets: Sequence[int]) -> str:
        mesh = self.program.mesh
        assert isinstance(v.type, TensorType)
        shape = global_shape(v.type, mesh)
        layout = layout_of(v) or replicated("", len(shape))
        texts = [
            str(source), names.tuple_text([str(t) for t in targets]),
            DTYPES[element_name(v.type.element_type)], names.tuple_text([str(n) for n in shape]),
            names.tuple_text([names.axes_text(axes) for axes in layout.dims]),
        ]  # fmt: skip
        return f"stages.StageValue({', '.join(texts)})"

    @staticmethod
    def _pair(name: str, of: str) -> str:
        return f"{names.literal(name)}: {names.literal(of)}"

    @staticmethod
    def _list(name: str, items: Sequence[str]) -> list[str]:
        return _lines(f"{name}=[", items, "],")

    @staticmethod
    def _dict(name: str, items: Sequence[str]) -> list[str]:
        return _lines(f"{name}={{", items, "},")


def _lines(head: str, items: Sequence[str], end: str, indent: int = 4) -> list[str]:
    """Return items, one per line, between a head and an end."""
    space = " " * indent
    if not items:
        return [f"{space}{head}{end}"]
    return [f"{space}{head}", *(f"{space}    {item}," for item in items), f"{space}{end}"]
