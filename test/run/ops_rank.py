"""One rank of test_ops_on_ranks.py: it runs emitted functions on its shards of their arguments.

python ops_rank.py DIRECTORY RANK: DIRECTORY has jobs.json, a list of [name, function, types of the
arguments], and for each name its program and an .npz with the arguments `NUMBER_RANK`.
"""

import json
import os
import sys
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from support.device import DEVICE

from shardir.backend.torch.shardir_runtime import runtime as rt
from shardir.backend.torch.shardir_runtime.run.program_module import with_this_runtime

TYPES = {
    "f32": torch.float32, "f64": torch.float64, "bf16": torch.bfloat16, "f16": torch.float16,
    "i32": torch.int32, "i64": torch.int64, "i1": torch.bool,
}  # fmt: skip
WIDER = {torch.bfloat16: torch.float32, torch.float16: torch.float32}


def main(directory: Path, rank: int) -> None:
    torch.set_num_threads(1)
    if hasattr(os, "sched_setscheduler"):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(str(directory / "store"), 4),
        rank=rank, world_size=4, timeout=timedelta(seconds=20),
    )  # fmt: skip
    mesh = rt.Mesh([("a", 2), ("b", 2)], rank, torch.device(DEVICE))
    out, failures = {}, []
    for name, function, elements in json.loads((directory / "jobs.json").read_text()):
        space: dict[str, Any] = {"__name__": name}
        path = directory / f"{name}.py"
        exec(compile(with_this_runtime(path.read_bytes()), str(path), "exec"), space)
        with np.load(directory / f"{name}.npz") as given:
            arguments = [
                torch.tensor(given[f"{i}_{rank}"]).to(DEVICE, TYPES[e])
                for i, e in enumerate(elements)
            ]
        try:
            with torch.no_grad():
                results = space[function](mesh, *arguments)
        except Exception:  # report all failures; a rank that fails alone ends by the timeout
            failures.append(f"{name}: {traceback.format_exc(limit=-3)}")
            continue
        for i, x in enumerate(results if isinstance(results, tuple) else (results,)):
            out[f"{name}_{i}"] = x.to("cpu", WIDER.get(x.dtype, x.dtype)).numpy()
    np.savez(directory / f"results_{rank}.npz", **out)
    print("\n".join(failures) or f"rank {rank}: all ran")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
