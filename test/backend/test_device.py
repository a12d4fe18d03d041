"""The device of a rank, by its options and the GPUs of its machine."""

import re

import pytest

pytest.importorskip("torch")

from shardir.backend.torch.shardir_runtime.plan.program import PlanError
from shardir.backend.torch.shardir_runtime.run.options import RunOptions
from shardir.backend.torch.shardir_runtime.run.process import device_of


@pytest.mark.parametrize(
    ("given", "local", "gpus", "expected"),
    [
        ({}, 3, 8, "cpu"),
        ({"backend": "nccl"}, 3, 4, "cuda:3"),
        ({"backend": "nccl", "device": "cuda"}, 0, 1, "cuda:0"),
        ({"backend": "gloo", "device": "cpu"}, 3, 0, "cpu"),
        ({"backend": "shm"}, 3, 8, "cpu"),
        ({"backend": "gloo", "device": "cuda"}, 3, 1, "cuda:0"),
        ({"backend": "gloo", "device": "cuda"}, 5, 4, "cuda:1"),
    ],
)
def test_device(given, local, gpus, expected):
    options = RunOptions.of(given)
    assert str(device_of(options, local, gpus)) == expected


@pytest.mark.parametrize(
    ("given", "gpus", "message"),
    [
        ({"backend": "nccl"}, 3, "expected 4 GPUs or more, got 3; use gloo"),
        ({"device": "cuda"}, 0, "expected 1 GPUs or more, got 0; use --device cpu"),
    ],
)
def test_device_that_cannot_be(given, gpus, message):
    options = RunOptions.of(given)

    with pytest.raises(PlanError, match=re.escape(message)):
        device_of(options, 3, gpus)


@pytest.mark.parametrize(
    ("given", "machines", "message"),
    [
        ({}, 2, ""),
        ({"backend": "shm"}, 1, ""),
        ({"backend": "nccl", "device": "cpu"}, 1, "--device cpu: expected --backend gloo or shm"),
        ({"backend": "shm", "device": "cuda"}, 1, "--device cuda: expected --backend gloo or nccl"),
        ({"backend": "shm"}, 2, "--backend shm: expected one machine, got 2; use gloo"),
    ],
)
def test_backend_that_cannot_be(given, machines, message):
    refused = RunOptions.of(given).refused(machines)
    assert refused.startswith(message) and bool(refused) == bool(message)


def test_shm_is_for_linux(monkeypatch):
    monkeypatch.delattr("os.memfd_create")
    options = RunOptions.of({"backend": "shm"})
    assert options.refused(1).startswith("--backend shm: expected Linux, got ")
