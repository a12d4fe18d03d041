"""A rank of `with_ray.py`, the program of docs/guides/machines.md, with a trainer in place of
Ray's: it joins the ranks, and calls the function in each. Prints the losses.

python ray_rank.py PROGRAM DIRECTORY STORE RANKS RANK
"""

import json
import runpy
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import torch.distributed as dist

program, directory, store, ranks, rank = sys.argv[1:]
losses: list[float] = []


class TorchTrainer:
    """Ray's, for one process of each rank."""

    def __init__(self, train_loop: Any, train_loop_config: Any, scaling_config: Any):
        self.call = lambda: train_loop(train_loop_config)
        assert scaling_config.num_workers == int(ranks)

    def fit(self) -> None:
        if int(ranks) > 1:
            dist.init_process_group(
                "gloo", init_method=f"file://{store}", rank=int(rank), world_size=int(ranks)
            )
        self.call()


names: dict[str, dict[str, Any]] = {
    "ray": {},
    "ray.train": {"ScalingConfig": SimpleNamespace, "report": lambda x: losses.append(x["loss"])},
    "ray.train.torch": {"TorchTrainer": TorchTrainer},
}
for name, content in names.items():
    module = ModuleType(name)
    vars(module).update(content)
    sys.modules[name] = module
vars(sys.modules["ray"])["train"] = sys.modules["ray.train"]
runpy.run_path(program)["main"](directory, int(ranks), steps=4)
print("losses", json.dumps(losses))
