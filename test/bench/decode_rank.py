"""One rank of the decode benchmark: `decode_rank.py PROGRAM OUT WIDTH ROUNDS`, as decode.py starts
it."""

import json
import sys
import time
from pathlib import Path
from statistics import median
from types import FunctionType
from typing import Any

import generate
import torch
import torch.distributed as dist

import shardir

TOKENS = 8
"""The tokens of a turn."""


class ByHand:
    """The program as one would write it: its function on shards, with calls of torch.distributed
    in place of the runtime's; the samples split over dp."""

    def __init__(self, program: Any):
        session = program._session
        (plan,) = session.plan.functions
        mesh, function = session.mesh, session.functions[plan.name]
        self.retained = [session.states.shard(a) for a in plan.args if a.role != "input"]
        self.groups = {axis: mesh.group((axis,)).process_group for axis in mesh.axes}
        self.mesh, self.collectives = mesh, 0
        names = {**function.__globals__, "rt": self}
        self.function = FunctionType(function.__code__, names)

    def all_reduce(self, mesh: Any, x: torch.Tensor, op: str, axes: Any, donate: bool) -> Any:
        self.collectives += 1
        dist.all_reduce(x, group=self.groups[axes[0]])
        return x

    def __call__(self, tokens: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        group = self.groups.get("dp")
        if group is None:
            return self.function(self.mesh, *self.retained, tokens, position)[0]
        tokens = tokens.chunk(group.size())[group.rank()]
        logits = self.function(self.mesh, *self.retained, tokens, position)[0]
        parts = [torch.empty_like(logits) for _ in range(group.size())]
        dist.all_gather(parts, logits, group=group)
        self.collectives += 1
        return torch.cat(parts)


def main() -> None:
    directory, out, width, rounds = sys.argv[1:]
    torch.set_num_threads(1)
    program = shardir.load(directory, timeout=60)
    tokens, position = generate.example()
    by_hand = ByHand(program)
    torch.manual_seed(0)
    model = generate.GPT(int(width)).eval()
    variants = {"shardir": program, "by hand": by_hand, "one device": model}
    times: dict[str, list[float]] = {name: [] for name in variants}
    cpu: dict[str, list[float]] = {name: [] for name in variants}
    with torch.inference_mode():
        expected = model(tokens, position)
        for variant in (program, by_hand):
            torch.testing.assert_close(variant(tokens, position), expected, rtol=1e-4, atol=1e-5)
        collectives = by_hand.collectives
        for _ in range(int(rounds) + 1):
            for name, variant in variants.items():
                dist.barrier()
                begun, used = time.perf_counter(), time.thread_time()
                for _ in range(TOKENS if name != "one device" or not dist.get_rank() else 0):
                    variant(tokens, position)
                cpu[name].append((time.thread_time() - used) / TOKENS * 1e3)
                times[name].append((time.perf_counter() - begun) / TOKENS * 1e3)
    if dist.get_rank() == 0:
        used = {name: median(found[1:]) for name, found in cpu.items()}
        numbers = {"own": used["shardir"] - used["by hand"], "collectives": collectives}
        Path(out).write_text(json.dumps([
            {"variant": name, "median": median(found[1:]), "cpu": used[name],
             **(numbers if name == "shardir" else {})}
            for name, found in times.items()
        ]))  # fmt: skip


main()
