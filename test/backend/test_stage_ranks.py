"""Steps in stages on simulated ranks without buffers: those that are accepted end, those that are
refused do not.

The ranks are threads that run the emitted program with the files of the runtime. A send meets its
receive, and then the value moves: as on NCCL with full buffers. Whether all ranks come to their
end does not depend on the order in which threads run.
"""

import random
import re
import threading
from collections import deque
from collections.abc import Sequence
from copy import copy
from itertools import permutations
from typing import Any

import pytest
import torch
from support.emitted import functions_of
from support.extent import extent
from xdsl.dialects.builtin import ArrayAttr, StringAttr
from xdsl.dialects.func import FuncOp

import shardir
from shardir.backend.torch.shardir_runtime.collectives import channels
from shardir.backend.torch.shardir_runtime.collectives import mesh as mesh_module
from shardir.backend.torch.shardir_runtime.collectives.mesh import Mesh
from shardir.diagnostics import ShardirError
from shardir.dialects import train


class DeadlockError(Exception):
    """All ranks wait."""


class Ranks:
    """Threads, and the channels between them."""

    def __init__(self, count: int):
        self.changed = threading.Condition()
        self.running, self.stuck = count, False
        self.sends: dict[Any, deque] = {}
        self.receives: dict[Any, deque] = {}

    def start(self, end: dict[Any, deque], channel: Any, x: torch.Tensor) -> "Transfer":
        """Start a send or a receive, which meets the other one if that has started."""
        with self.changed:
            started = Transfer(self, x)
            end.setdefault(channel, deque()).append(started)
            sends, receives = self.sends.get(channel), self.receives.get(channel)
            while sends and receives:
                sent, received = sends.popleft(), receives.popleft()
                received.x.copy_(sent.x)
                for transfer in (sent, received):
                    transfer.done = True
                    self.running += transfer.waits
                self.changed.notify_all()
            return started

    def stop(self) -> None:
        """A rank has ended, or waits: if no other runs, they wait forever."""
        self.running -= 1
        if not self.running:
            self.stuck = True
            self.changed.notify_all()


class Distributed:
    """The functions of torch.distributed that the runtime calls."""

    @staticmethod
    def isend(x: torch.Tensor, peer: int, group: tuple[Ranks, int, int]) -> "Transfer":
        ranks, *ends = group
        return ranks.start(ranks.sends, tuple(ends), x)

    @staticmethod
    def irecv(x: torch.Tensor, peer: int, group: tuple[Ranks, int, int]) -> "Transfer":
        ranks, *ends = group
        return ranks.start(ranks.receives, tuple(ends), x)


class Transfer:
    def __init__(self, ranks: Ranks, x: torch.Tensor):
        self.ranks, self.x = ranks, x
        self.done = self.waits = False

    def wait(self) -> None:
        with self.ranks.changed:
            if not self.done:
                self.waits = True
                self.ranks.stop()
                self.ranks.changed.wait_for(lambda: self.done or self.ranks.stuck)
            if not self.done:
                raise DeadlockError


def run_on_threads(
    step: Any, edges: Sequence[tuple[int, int]], arguments: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return the results of a step, each from a rank that makes it, with channels for these pairs
    of ranks. Raises what a rank does."""
    count = len(step.orders)
    ranks, found, errors = Ranks(count), dict[str, torch.Tensor](), list[Exception]()

    def run(rank: int) -> None:
        try:
            mesh = Mesh([("stage", count)], rank)
            mesh._channels = {(s, t): (ranks, s, t) for s, t in edges}
            results = copy(step).run(mesh, **{n: x.clone() for n, x in arguments.items()})
            mesh.wait()
            kept = step.kept_states(rank)
            for name, x in zip(step.results, results, strict=True):
                maker = step.maker.get(name)
                if name in kept or (maker and step.rank_of[maker.stage] == rank):
                    found[name] = x
        except Exception as e:
            errors.append(e)
        finally:
            with ranks.changed:
                ranks.stop()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    if errors:
        raise errors[0]
    return found


HEAD = """
dist.mesh @m <d = 1>
func.func private @loss(%x: tensor<2x2xf64> {train.input = #train.init<normal>},
  %u: tensor<2x2xf64> {train.parameter = "u", train.init = #train.init<normal>},
  %v: tensor<2x2xf64> {train.parameter = "v", train.init = #train.init<normal>},
  %w: tensor<2x2xf64> {train.parameter = "w", train.init = #train.init<normal>},
  %s: tensor<2x2xf64> {train.state = "s", train.init = #train.init<constant, value = 0.5>}
) -> (tensor<f64>, tensor<2x2xf64> {train.updates = "s"}) {"""

TAIL = """
  %loss = nn.reduce <mean> %z dims <0, 1> : (tensor<2x2xf64>) -> tensor<f64>
  func.return %loss, %t : tensor<f64>, tensor<2x2xf64>
}
train.step @step of @loss <sgd, lr = 0.1>
    accumulate <mean, microbatches = COUNT> clip <norm, max = 1.0> pipeline <PIPELINE>
"""

TWO = "(tensor<2x2xf64>, tensor<2x2xf64>) -> tensor<2x2xf64>"
ONE = "(tensor<2x2xf64>) -> tensor<2x2xf64>"

CHAIN = f"""
  %a = nn.matmul %x, %u : {TWO}
  %b = nn.tanh %a {{train.stage = 1 : i64}} : {ONE}
  %c = nn.matmul %b, %v {{train.stage = 2 : i64}} : {TWO}
  %y = nn.matmul %c, %w {{train.stage = 3 : i64}} : {TWO}
  %t = nn.tanh %s : {ONE}
  %z = nn.add %y, %t : {TWO}"""
"""A state of the last stage alone."""

SKIPS = f"""
  %h = nn.matmul %x, %u : {TWO}
  %t = nn.add %h, %s : {TWO}
  %a = nn.mul %h, %s : {TWO}
  %b = nn.matmul %a, %v {{train.stage = 1 : i64}} : {TWO}
  %c = nn.tanh %b {{train.stage = 2 : i64}} : {ONE}
  %d = nn.add %c, %t {{train.stage = 3 : i64}} : {TWO}
  %e = nn.matmul %d, %w : {TWO}
  %y = nn.matmul %e, %u : {TWO}
  %z = nn.add %y, %x : {TWO}"""
"""Skip connections over stages, a tied parameter, and a state of the first stage."""

STATES = f"""
  %a = nn.matmul %x, %u : {TWO}
  %b = nn.add %a, %s {{train.stage = 1 : i64}} : {TWO}
  %c = nn.matmul %b, %v {{train.stage = 2 : i64}} : {TWO}
  %t = nn.tanh %c : {ONE}
  %y = nn.matmul %c, %w {{train.stage = 3 : i64}} : {TWO}
  %z = nn.tanh %y : {ONE}"""
"""A state that a later stage makes than the one that reads it."""

FROZEN = f"""
  %q = nn.stop_gradient %u : {ONE}
  %a = nn.matmul %x, %q : {TWO}
  %b = nn.tanh %a {{train.stage = 1 : i64}} : {ONE}
  %c = nn.matmul %b, %v {{train.stage = 2 : i64}} : {TWO}
  %y = nn.matmul %c, %w {{train.stage = 3 : i64}} : {TWO}
  %t = nn.tanh %s : {ONE}
  %z = nn.add %y, %t : {TWO}"""
"""No gradient comes back to the first stages."""

PIPELINES = (
    "1f1b, ranks = 4", "gpipe, ranks = 4", "interleaved, ranks = 2, chunks = 2",
    "zbv, ranks = 2, chunks = 2", "zb-h1, ranks = 4", "dualpipev, ranks = 2, chunks = 2",
)  # fmt: skip


class Program:
    """A step in stages, as a module and as Python."""

    def __init__(self, body: str, pipeline: str, microbatches: int = 4):
        tail = TAIL.replace("PIPELINE", pipeline).replace("COUNT", str(microbatches))
        found = shardir.compile(HEAD + body + tail)
        self.text = found.program
        functions = [f for f in found.module.body.ops if isinstance(f, FuncOp)]
        self.f = next(f for f in functions if train.schedule_of(f) is not None)
        self.lines = (train.schedule_of(self.f) or "").splitlines()
        values = torch.Generator().manual_seed(0)
        self.arguments = {
            n: torch.randn(*shape, 2, 2, generator=values, dtype=torch.float64)
            for n, shape in {"x": [microbatches], "u": [], "v": [], "w": [], "s": []}.items()
        }

    def refusal(self, lines: list[str]) -> str:
        """Return why the verifier refuses a schedule; empty if it does not."""
        self.f.attributes[train.SCHEDULE] = ArrayAttr(map(StringAttr, lines))
        self.in_flight = len(self.arguments["x"])
        self.edges = [*permutations(range(len(lines)), 2)]
        try:
            order = train.proven_order(self.f)
            self.in_flight, self.edges = order.in_flight, order.runs.edges()
        except ShardirError as e:
            return str(e)
        return ""

    def run(self, lines: list[str]) -> dict[str, torch.Tensor]:
        """Return the results of all ranks. Raises what a rank does, DeadlockError if all wait."""
        orders = [line.replace(",", " ") for line in lines]
        text = re.sub(r"schedule=\[.*?\],", f"schedule={orders!r},", self.text, flags=re.S)
        names = functions_of(re.sub(r"in_flight=\d+", f"in_flight={self.in_flight}", text))
        return run_on_threads(names["STEP"], self.edges, self.arguments)


@pytest.fixture(autouse=True)
def simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channels, "dist", Distributed)


def changed(lines: list[str], chance: random.Random) -> list[str]:
    """Return a schedule in which some actions are elsewhere, are missing, or are repeated."""
    orders = [line.split(",") for line in lines]
    for _ in range(chance.randint(1, 3)):
        order = chance.choice(orders)
        i = chance.randrange(len(order))
        j = min(len(order) - 1, max(0, i + chance.randint(-5, 5)))
        match chance.choice("xxxxxxmmmmmmmmmmdr"):
            case "x":
                order[i], order[j] = order[j], order[i]
            case "m":
                order.insert(j, order.pop(i))
            case "d" if len(order) > 1:
                del order[i]
            case _:
                order.insert(j, order[i])
    return [",".join(order) for order in orders]


def agrees(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    same = (torch.allclose(found[n], x, rtol=1e-12, atol=1e-12) for n, x in expected.items())
    return found.keys() == expected.keys() and all(same)


BODIES = {"chain": CHAIN, "skips": SKIPS, "states": STATES, "frozen": FROZEN}


@pytest.mark.parametrize("body", BODIES)
def test_what_is_accepted_ends_and_what_is_refused_does_not(body: str) -> None:
    chance, counts = random.Random(0), {True: 0, False: 0}
    pipelines = [p for p in PIPELINES if not (body == "states" and "chunks" in p)]
    programs = [Program(BODIES[body], p) for p in extent(chance.sample(pipelines, 2), pipelines)]
    assert all(not program.refusal(program.lines) for program in programs)
    expected = programs[0].run(programs[0].lines)
    assert {"v", "w", "loss"} <= {n.split("_")[0] for n in expected}
    for _ in range(extent(60, 3000)):
        program = chance.choice(programs)
        lines = changed(program.lines, chance)
        refusal = program.refusal(lines)
        try:
            ends = agrees(program.run(lines), expected)
        except (DeadlockError, KeyError, RuntimeError):
            ends = False
        if refusal.startswith("[G16] train.schedule: "):  # its actions: a convention
            assert "expected" in refusal
        else:
            assert ends == (not refusal), (lines, refusal)
            assert ends or "for each other: " in refusal
            counts[ends] += 1
    assert min(counts.values()) > extent(60, 3000) / 20, counts


def _is_update_or_count(of: Any) -> bool:
    if isinstance(of, train.StageRun):
        return str(of).startswith("@step_update")
    return of.value.name.name_hint.startswith("count")


def test_ranks_do_not_wait_to_update_what_they_have() -> None:
    """Rank 0 sends ranks 2 and 3 the count of steps, after these have updated theirs."""
    tail = TAIL.replace("sgd", "adamw").replace("clip <norm, max = 1.0>", "")
    tail = tail.replace("PIPELINE", "1f1b, ranks = 4").replace("COUNT", "4")
    found = shardir.compile(HEAD + CHAIN + tail)
    f = next(f for f in found.module.body.ops if isinstance(f, FuncOp) and train.schedule_of(f))
    order = train.proven_order(f)
    for events in order.events[2:]:
        last = [e.kind for e in events if _is_update_or_count(e.of)]
        assert last == ["run", "receive", "wait"]
    names = functions_of(found.program)
    step = names["STEP"]
    others = threading.Barrier(3)

    def together(function: Any) -> Any:
        def update(*args: Any) -> Any:
            made = function(*args)
            others.wait(10)
            return made

        return update

    step.parts[:] = [
        p._replace(function=together(p.function)) if p.kind == "update" else p for p in step.parts
    ]
    step.index()
    wanted = names["step"].__code__.co_varnames[1 : names["step"].__code__.co_argcount]
    shapes = {"x": (4, 2, 2), "count": ()}
    arguments = {n: torch.zeros(shapes.get(n, (2, 2)), dtype=torch.float64) for n in wanted}
    arguments["count"] = arguments["count"].long()
    results = run_on_threads(step, order.runs.edges(), arguments)
    assert results["count_1"].item() == 1


def test_sends_are_in_flight_as_far_as_a_schedule_needs_it() -> None:
    """Rank 0 computes stage 0 for all microbatches, and takes what rank 1 sends for stage 2 only
    then: rank 1 would wait for it, and rank 0 for rank 1."""
    program = Program(CHAIN, "looped-bfs, ranks = 2, chunks = 2", microbatches=8)
    assert not program.refusal(program.lines)
    assert program.in_flight > 2
    found = program.run(program.lines)
    program.in_flight = 2
    with pytest.raises(DeadlockError):
        program.run(program.lines)
    other = Program(CHAIN, "1f1b, ranks = 4", microbatches=8)
    assert not other.refusal(other.lines)
    assert agrees(found, other.run(other.lines))


class Groups:
    """The groups that a rank makes, and what it sends first, in place of torch.distributed."""

    def __init__(self) -> None:
        self.made: list[list[int]] = []
        self.first: list[tuple[str, int, int]] = []

    def new_group(self, ranks: list[int], **_: Any) -> int:
        self.made.append(ranks)
        return len(self.made) - 1

    def get_backend(self) -> str:
        return "nccl"

    def send(self, x: torch.Tensor, peer: int, group: int) -> None:
        self.first.append(("send", peer, group))

    def recv(self, x: torch.Tensor, peer: int, group: int) -> None:
        self.first.append(("receive", peer, group))


def test_each_direction_between_two_ranks_is_a_group_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All ranks make all groups in one order; the two of each connect it. Groups over other axes
    with the same ranks are the same channel."""
    made, first = [], []
    for rank in range(4):
        groups = Groups()
        monkeypatch.setattr(mesh_module, "dist", groups)
        mesh = Mesh([("stage", 2), ("tp", 2)], rank, "meta")  # as on a GPU
        for axes, source, target in ((("stage",), 0, 1), (("stage",), 1, 0), (("tp",), 0, 1)):
            mesh.connect(axes, source, target)
        mesh.connect(("stage", "tp"), 0, 2)  # as from 0 to 1 over stage
        made.append(groups.made)
        first.append(groups.first)
        assert mesh.channel(0, 2) != mesh.channel(2, 0)
    assert made == [[[0, 2], [1, 3], [2, 0], [3, 1], [0, 1], [2, 3]]] * 4
    assert first[0] == [("send", 2, 0), ("receive", 2, 2), ("send", 1, 4)]
    assert first[3] == [("receive", 1, 1), ("send", 1, 3), ("receive", 2, 5)]
