"""docs/guides/machines.md: the commands in its YAML are those of shard-run, and its program for Ray
trains on ranks that something else has joined, as on one device."""

import json
import os
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest
import yaml
from support.extent import long_form
from support.forked import run_ranks

import shardir
from shardir.tools import run as tool

PAGES = Path(__file__).parents[2]
PAGE = (PAGES / "docs/guides/machines.md").read_text()


def file(page: str, name: str) -> str:
    found = re.search(rf"^<!-- file: {name} -->\n```\w*\n(.*?)^```$", page, re.M | re.S)
    assert found is not None
    return found[1]


@pytest.mark.parametrize(
    ("name", "variables", "rdzv"),
    [
        ("pytorchjob.yaml", {"RANK": "1", "WORLD_SIZE": "2"}, "train-master-0:29400"),
        ("trainjob.yaml",
         {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "train-node-0-0.train",
          "PET_MASTER_PORT": "29500"}, "train-node-0-0.train:29500"),
    ],
)  # fmt: skip
def test_commands_of_kubernetes(name, variables, rdzv, tmp_path, monkeypatch):
    spec = yaml.safe_load(file(PAGE, name))["spec"]
    if "trainer" in spec:
        pods = [spec["trainer"]]
        assert spec["trainer"]["numNodes"] == 2
    else:
        replicas = spec["pytorchReplicaSpecs"].values()
        assert sum(of["replicas"] for of in replicas) == 2
        pods = [c for of in replicas for c in of["template"]["spec"]["containers"]]
    (tmp_path / "shard-run").write_text('#!/bin/sh\nprintf "%s\\0" "$@"\n')
    (tmp_path / "shard-run").chmod(0o755)
    env = {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", **variables}
    for pod in pods:
        argv = [*pod["command"], *pod["args"]]
        said = subprocess.run(argv, env=env, capture_output=True, text=True, check=True).stdout
        given = tool.parser().parse_args(said.split("\0")[:-1])
        assert (given.nnodes, given.node_rank, given.rdzv) == ("2", 1, rdzv)
        assert (given.backend, given.checkpoints) == ("nccl", given.resume)


def losses_of(output: str) -> list[float]:
    (line,) = re.findall(r"^losses (.*)$", output, re.M)
    return json.loads(line)


@long_form
def test_the_program_for_ray(tmp_path):
    (tmp_path / "with_ray.py").write_text(file(PAGE, "with_ray.py"))
    text = file((PAGES / "docs/start/text-program.md").read_text(), "mlp.ir")
    found = []
    for ranks, mode in ((4, None), (1, "stand_alone")):
        directory = shardir.compile(text, mode=mode).save(tmp_path / f"out-{ranks}")
        script, store = Path(__file__).with_name("ray_rank.py"), tmp_path / f"store-{ranks}"
        given = [tmp_path / "with_ray.py", directory, store, ranks]
        found += map(losses_of, run_ranks(script, ranks, given, 60))
    *of_ranks, alone = found
    assert len(alone) == 4
    assert all(of_rank == of_ranks[0] for of_rank in of_ranks)
    np.testing.assert_allclose(of_ranks[0], alone, rtol=1e-6)
