"""A step in stages in straight-line form: a function for each rank, with its runs and transfers as
plain calls in the proven order.

def step_on_rank_0(mesh, x, w1):
    # 0F0
    a_0 = step_forward_0(mesh, x[0], w1)
    a_0_to_1 = stages.send(mesh, a_0, 1)
    d_a_0 = stages.receive(mesh, STEP["d_a"], 1)
    # 0B0
    d_a_0 = d_a_0.wait()
    a_0_to_1.wait()
    ...
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from xdsl.ir import BlockArgument, SSAValue

from shardir.backend.torch.emit import names
from shardir.backend.torch.emit.names import Names, join_items
from shardir.dialects import train
from shardir.dialects.train import StageMessage, StageOrder, StageRun, StepValue


class StageText(NamedTuple):
    """The names of the step, the table of types, functions and values; and the results that are
    added to sums in place."""

    name: str
    table: str
    functions: dict[str, str]
    values: dict[SSAValue, str]
    added: dict[SSAValue, train.AccumulateOp]


class RankText:
    """The function of one rank."""

    def __init__(self, text: StageText, order: StageOrder, rank: int, results: Sequence[SSAValue]):
        self.text, self.order, self.rank = text, order, rank
        self.runs, self.results = order.runs, results
        self.keys = train.updated_keys(self.runs.f)
        self.name = f"{text.name}_on_rank_{rank}"
        self.names = Names([*text.functions.values(), text.table])
        self.parameters = [v for v in self.runs.f.body.block.args if self._reads(v)]
        self.variables: dict[StepValue, str] = {}
        """The variable of each value of a microbatch, or outside the loop."""
        self.arguments = {v: self.names.new(text.values[v]) for v in self.parameters}
        self.totals: dict[SSAValue, int] = {}
        """The number of microbatches in each sum or collected value so far."""
        self.lines: list[tuple[list[str], set[str]]] = []
        """The lines of each event, and the variables that they name."""
        self.sends: dict[StageMessage, str] = {}

    def _reads(self, argument: SSAValue) -> bool:
        """Whether a function of this rank reads an argument."""
        same = {argument} | {
            use.operation.results[0] for use in argument.uses
            if isinstance(use.operation, train.MicrobatchOp | train.CarriedOp)
        }  # fmt: skip
        own = (op for op in self.runs.callees if self.runs.rank(op) == self.rank)
        return any(not same.isdisjoint(op.operands) for op in own)

    def function(self) -> list[str]:
        """Return the lines of the rank's function."""
        events = self.order.events[self.rank]
        awaited = {e.of for e in events if e.kind == "wait"}
        for event in events:
            of = event.of
            if isinstance(of, StageRun):
                self._run(of)
            elif event.kind == "receive":
                self._receive(of)
            elif event.kind == "send":
                self._send(of, of in awaited)
            else:
                self._wait(of)
        end = [self._result(v, key) for v, key in zip(self.results, self.keys, strict=True)]
        self._add(
            join_items("return [", end, "]", 4), {text for text in end if text.isidentifier()}
        )
        parameters = ["mesh", *(self.arguments[v] for v in self.parameters)]
        return [*join_items(f"def {self.name}(", parameters, "):", 0), *self._body()]

    def call(self, indent: int) -> list[str]:
        """Return the lines of the call in the step."""
        arguments = ["mesh", *(self.text.values[v] for v in self.parameters)]
        return join_items(f"return {self.name}(", arguments, ")", indent)

    # ---- events ----

    def _run(self, run: StageRun) -> None:
        sums = [self.text.added[v].out for v in run.op.results if v in self.text.added]
        arguments = [
            self._variable(StepValue(v, None)) if v in self.totals else "None" for v in sums
        ]
        arguments += [self._text(v, run.microbatch) for v in run.op.operands]
        k = None if self.runs.is_outside(run.op) else run.microbatch
        results = [self._variable(StepValue(v, k)) for v in self.runs.results(run.op)]
        lines = [f"    # {run}"] if run.action is not None else []
        callee = self.text.functions[run.op.callee.string_value()]
        head = f"{', '.join(results)} = " if results else ""
        lines += join_items(f"    {head}{callee}(", ["mesh", *arguments], ")", 0)
        self._add(lines, {*results, *(g for g in arguments if g.isidentifier() and g != "None")})
        for total in self.runs.sums:
            if total.x in self.runs.results(run.op):
                self._add_up(total, self._variable(StepValue(total.x, k)), run.microbatch or 0)

    def _add_up(self, total: train.OfMicrobatches, x: str, k: int) -> None:
        """Add the part of a microbatch to a sum, which gets its own memory with the second part; or
        to the collected values."""
        name = self._variable(StepValue(total.out, None))
        count = self.totals[total.out] = self.totals.get(total.out, 0) + 1
        if isinstance(total, train.CollectOp):
            first = [f"    {name} = {x}.new_empty(({total.count.value.data}, *{x}.shape))"]
            lines = [*(first if count == 1 else []), f"    {name}[{k}] = {x}"]
        else:
            first_parts = {1: f"{name} = {x}", 2: f"{name} = {name} + {x}"}
            if total in self.text.added.values():  # it is the sum
                count = 1
            lines = [f"    {first_parts.get(count, f'{name} += {x}')}"]
        self._add(lines, {name, x})

    def _receive(self, message: StageMessage) -> None:
        name, v = self._variable(message.value), message.value.name
        type = f"{self.text.table}[{names.literal(self.text.values[v])}]"
        self._add([f"    {name} = stages.receive(mesh, {type}, {message.source})"], {name})

    def _send(self, message: StageMessage, is_awaited: bool) -> None:
        name = self._text(*message.value)
        call = f"stages.send(mesh, {name}, {message.target})"
        if is_awaited:
            self.sends[message] = self.names.new(f"{name}_to_{message.target}")
            self._add([f"    {self.sends[message]} = {call}"], {name})
        else:
            self._add([f"    stages.hold(mesh, {call})"], {name})

    def _wait(self, message: StageMessage) -> None:
        if message.source == self.rank:
            self._add([f"    {self.sends[message]}.wait()"], set())
        else:
            name = self._variable(message.value)
            self._add([f"    {name} = {name}.wait()"], {name})

    # ---- values ----

    def _text(self, v: SSAValue, k: int | None) -> str:
        """Return the text of a value that a function reads for microbatch k, or outside of the loop
        (None)."""
        while not isinstance(v, BlockArgument):
            match v.owner:
                case train.TransferOp():
                    v = v.owner.x
                case train.MicrobatchOp():
                    return f"{self._text(v.owner.x, None)}[{k}]"
                case train.CarriedOp() if k:
                    v, k = self.runs.carries[v].x, k - 1
                case train.CarriedOp():
                    v = v.owner.x
                case train.CarryOp():
                    v, k = v.owner.x, self.runs.count - 1
                case train.OfMicrobatches():
                    return self._variable(StepValue(v, None))
                case _:
                    v = self.runs.named.get(v, v)
                    outside = self.runs.is_outside(self.runs.makers(v)[0])
                    return self._variable(StepValue(v, None if outside else k))
        return self.arguments[v]

    def _variable(self, value: StepValue) -> str:
        if value not in self.variables:
            v, k = value
            named = self.text.values[v] if k is None else f"{self.text.values[v]}_{k}"
            if isinstance(v.owner, train.AccumulateOp):
                named = f"{self.text.values[v.owner.x]}_sum"
            elif isinstance(v.owner, train.CollectOp):
                named = f"all_{self.text.values[v.owner.x]}"
            self.variables[value] = self.names.new(named)
        return self.variables[value]

    def _result(self, v: SSAValue, key: str | None) -> str:
        """Return the text of a result: its variable if this rank has it, else zeros, or None for a
        state."""
        source: SSAValue | None = v
        while source is not None and isinstance(source.owner, train.TransferOp):
            source = source.owner.x
        if isinstance(source, BlockArgument):
            return self.arguments.get(source, "None")
        read = None if source is None else self.runs.read(source, None)
        if read is not None:
            is_here = self.runs.rank(read.runs[0].op) == self.rank
            if is_here or self.rank in self.runs.targets(read.value.name):
                return self._text(v, None)
        zeros = f"stages.zeros(mesh, {self.text.table}[{names.literal(self.text.values[v])}])"
        return "None" if key is not None else zeros

    # ---- lines ----

    def _add(self, lines: list[str], used: set[str]) -> None:
        self.lines.append((lines, used))

    def _body(self) -> Iterator[str]:
        """Yield the lines, with each variable deleted after its last use."""
        last = {name: i for i, (_, used) in enumerate(self.lines) for name in used}
        kept = set(self.arguments.values())
        for i, (lines, used) in enumerate(self.lines):
            yield from lines
            dead = sorted(n for n in used - kept if last[n] == i)
            if dead and i + 1 < len(self.lines):
                yield from join_items("    del ", dead, "", 0)
