"""An emitted directory, written by hand: a two-layer network on dp = 2, tp = 2, uneven shards.

The hidden layer of 9 is split over tp (5 and 4), the batch of 15 over dp (8 and 7), and the result
of `predict` over both axes.
"""

import json
from pathlib import Path

import numpy as np

from shardir.backend.torch.directory import copy_runtime

PROGRAM = """\
import torch
from shardir_runtime import runtime as rt


def step(rt_mesh, x, t, scale, w1, w2, m1):
    h = x @ w1  # [15 over dp, 9 over tp]
    y = rt.all_reduce(rt_mesh, torch.relu(h) @ w2, "sum", ("tp",), donate=True)
    d = y - t
    loss = rt.all_reduce(rt_mesh, (d * d).sum() / 45, "sum", ("dp",))
    dy = d * (2 / 45)
    dw2 = torch.relu(h).t() @ dy
    dw1 = x.t() @ ((dy @ w2.t()) * (h > 0))
    dw1, dw2 = rt.all_reduce(rt_mesh, [dw1, dw2], "sum", ("dp",))
    m1 = 0.5 * m1 + dw1
    return loss, w1 - scale * m1, w2 - scale * dw2, m1


def predict(rt_mesh, x, w1, w2):
    partial = torch.relu(x @ w1) @ w2
    return rt.reduce_scatter(rt_mesh, partial, "sum", 0, ("tp",)), partial.sum(), x.sum()


if __name__ == "__main__":
    rt.main({"step": step, "predict": predict})
"""

SINGLE = """\
import torch
from shardir_runtime import runtime as rt


def step(rt_mesh, x, t, scale, w1, w2, m1):
    h = x @ w1
    d = torch.relu(h) @ w2 - t
    loss = (d * d).sum() / 45
    dy = d * (2 / 45)
    m1 = 0.5 * m1 + x.t() @ ((dy @ w2.t()) * (h > 0))
    return loss, w1 - scale * m1, w2 - scale * torch.relu(h).t() @ dy, m1


def predict(rt_mesh, x, w1, w2):
    y = torch.relu(x @ w1) @ w2
    return y, y.sum(), x.sum()


if __name__ == "__main__":
    rt.main({"step": step, "predict": predict}, single=True)
"""

NORMAL = {"kind": "normal", "mean": 0.0, "std": 0.5}


def value(name, shape, dims, dtype="f32", **more):
    return {"name": name, "shape": shape, "dims": dims, "dtype": dtype, **more}


def plan():
    file = {"kind": "file", "file": "data/x.npy"}
    w1 = value("w1", [8, 9], [[], ["tp"]], role="parameter", key="w1", init=NORMAL)
    w2 = value("w2", [9, 3], [["tp"], []], role="parameter", key="w2", init=NORMAL)
    zero = {"kind": "constant", "value": 0.0}
    step = {
        "kind": "step",
        "args": [
            value("x", [15, 8], [["dp"], []], role="input", init=file),
            value("t", [15, 3], [["dp"], []], role="input", init={**file, "file": "data/t.npy"}),
            value("scale", [], [], role="input", init={"kind": "values", "data": [0.1]}),
            w1,
            w2,
            value("m1", [8, 9], [[], ["tp"]], role="state", key="w1.momentum", init=zero),
        ],
        "results": [
            value("loss", [], []),
            value("w1", [8, 9], [[], ["tp"]], updates="w1"),
            value("w2", [9, 3], [["tp"], []], updates="w2"),
            value("m1", [8, 9], [[], ["tp"]], updates="w1.momentum"),
        ],
    }
    everywhere = {"op": "sum", "axes": [["dp", 1, 2], "tp"]}
    predict = {
        "kind": "function",
        "args": [value("x", [16, 8], [["dp"], []], role="input", init=file), w1, w2],
        "results": [
            value("y", [16, 3], [["dp", "tp"], []], partial=[]),
            value("total", [], [], partial=everywhere),
            value("x_total", [], [], partial={"op": "sum", "axes": ["dp"]}),
        ],
    }
    return {
        "version": 1,
        "mesh": {"name": "m", "axes": [["dp", 2], ["tp", 2]]},
        "groups": [["dp"], ["tp"]],
        "functions": {"step": step, "predict": predict},
        "single": "single.py",
    }


def write(directory: Path, program: str = PROGRAM, **changes) -> Path:
    """Write the directory as shard-opt would."""
    (directory / "data").mkdir(parents=True)
    copy_runtime(directory)
    (directory / "program.py").write_text(program)
    (directory / "single.py").write_text(SINGLE)
    (directory / "plan.json").write_text(json.dumps({**plan(), **changes}))
    random = np.random.default_rng(0)
    np.save(directory / "data/x.npy", random.normal(size=(40, 8)).astype(np.float32))
    np.save(directory / "data/t.npy", random.normal(size=(40, 3)))  # f64 in the file
    return directory


COUNTDOWN = '''\
import os
import signal
import sys
import time

import torch
from shardir_runtime import runtime as rt

calls = 0


def step(rt_mesh, x):
    """Write the rank's process id; in the third step the time, and fail on rank 1 by ERROR."""
    global calls
    calls += 1
    if calls == 1:  # once, so that a reader in a later step finds a complete file
        with open(f"{os.environ['PIDS']}/{rt_mesh.rank}", "w") as file:
            file.write(str(os.getpid()))
    if calls == 3:
        with open(f"{os.environ['PIDS']}/ready{rt_mesh.rank}", "w") as file:
            file.write(str(time.time()))
    if calls == 3 and rt_mesh.rank == 1:
        exec({
            "kill": "os.kill(os.getpid(), signal.SIGKILL)",
            "stop": "os.kill(os.getpid(), signal.SIGSTOP)",
            "raise": "raise ValueError('no such luck')",
            "exit": "os._exit(7)",
            "leave": "sys.exit()",
            "hang": "time.sleep(1000)",
            "": "",
        }[os.environ["ERROR"]])
    if os.environ["ERROR"] == "":
        time.sleep(0.05)
    return rt.all_reduce(rt_mesh, x, "sum", ("dp",))


if __name__ == "__main__":
    rt.main({"step": step})
'''


IDLE = """\
import os
import signal
import time

rank, folder = os.environ["RANK"], os.environ["PIDS"]
if rank == "1":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
for name, value in ((rank, os.getpid()), (f"ready{rank}", time.time())):
    with open(f"{folder}/{name}", "w") as file:
        file.write(str(value))
time.sleep(1000)
"""


def countdown_plan():
    x = value("x", [], [], role="input", init={"kind": "constant", "value": 1.0})
    step = {"kind": "step", "args": [x], "results": [value("loss", [], [])]}
    mesh = {"name": "m", "axes": [["dp", 2]]}
    return {"mesh": mesh, "groups": [["dp"]], "functions": {"step": step}, "single": None}
