"""One rank of the benchmark of loops: `loop_rank.py OUT KIND DIRECTORY ROWS WIDTH HIDDEN ROUNDS
STEPS`, as loop.py starts it."""

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import shardir

out, kind, directory, *numbers = sys.argv[1:]
rows, width, hidden, rounds, steps = map(int, numbers)
torch.set_num_threads(1)
torch.manual_seed(0)
x, labels = torch.randn(rows, width), torch.randn(rows, width)


def measured_steps() -> tuple[list[float], list[float]]:
    """Return the seconds of a step of a run, and of the loop, in each round."""
    found: tuple[list[float], list[float]] = [], []
    with shardir.start(directory) as trainer:
        session, function = trainer._session, trainer.first
        shards = trainer._inputs(function, (x, labels), {}, False)

        def of_run() -> None:
            with torch.no_grad():
                loss = session.train_step(function, trainer.steps_done, shards)[0]
            loss.item()

        def of_loop() -> None:
            trainer.step(x, labels).item()

        for number in range(rounds + 1):
            sides = list(zip((of_run, of_loop), found, strict=True))
            for step, seconds in sides if number % 2 else sides[::-1]:
                begun = time.perf_counter()
                for _ in range(steps):
                    step()
                if number:
                    seconds.append((time.perf_counter() - begun) / steps)
    return found


def start_of_fsdp() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    model = nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, width))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    size, rank = dist.get_world_size(), dist.get_rank()
    part = slice(rank * rows // size, (rank + 1) * rows // size)
    loss = nn.functional.mse_loss(model(x[part]), labels[part])
    loss.backward()
    optimizer.step()
    dist.all_reduce(total := loss.detach().clone())
    total.item()


value: object = None
begun = time.perf_counter()
if kind == "steps":
    value = measured_steps()
elif kind == "FSDP2":
    start_of_fsdp()
    value = time.perf_counter() - begun
    dist.destroy_process_group()
else:
    with shardir.start(directory) as trainer:
        trainer.step(x, labels).item()
        value = time.perf_counter() - begun
if os.environ["RANK"] == "0":
    Path(out).write_text(json.dumps(value))
