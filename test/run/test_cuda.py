# ruff: noqa: E402 (there may be no torch, and no GPU)
"""Programs on a GPU, by NCCL with one rank, against the same on a CPU (`make test-gpu`). The other
tests of this folder run on GPUs by Gloo."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)

import shardir
from shardir.backend.runs import Options, RunError
from shardir.backend.torch.launch.start import run

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
STEPS = 4
ON_ONE = ["bert", "dropout", "encoder_decoder", "lamb", "mixed_precision", "modes", "offload",
          "overlap", "positions", "presets", "reid", "tokens", "ulysses"]  # fmt: skip
"""Examples of training that are also for one rank."""

TOLERANCE = {"mixed_precision": 2e-2}
"""Relative; of f32 else 1e-4: products on GPUs sum in another order."""


def states(program: Path, folder: Path, **options: Any) -> dict[str, np.ndarray]:
    folder.mkdir(exist_ok=True)
    dump = folder / "dump.npz"
    given: dict[str, Any] = {"steps": STEPS, "timeout": 120, "dump": dump, **options}
    run(program, Options(**given))
    return dict(np.load(dump))


@pytest.mark.parametrize("example", ON_ONE)
def test_values_are_those_of_a_cpu(example: str, tmp_path: Path) -> None:
    compiled = shardir.compile_file(EXAMPLES / f"{example}.ir", mode="stand_alone")
    program = compiled.save(tmp_path / "program")
    expected = states(program, tmp_path / "cpu")
    found = states(program, tmp_path / "gpu", backend="nccl")
    tolerance = TOLERANCE.get(example, 1e-4)
    assert expected.keys() == found.keys()
    for name, x in expected.items():
        scale = float(np.max(np.abs(x), initial=1e-3))
        np.testing.assert_allclose(found[name], x, rtol=0, atol=tolerance * scale, err_msg=name)


@pytest.mark.parametrize("example", ON_ONE)
def test_an_arena_has_the_values_of_a_program_without_one(example: str, tmp_path: Path) -> None:
    """A slot whose value is dead is overwritten. Kernels may differ by the alignment of slots."""
    found = []
    for arena in (False, True):
        compiled = shardir.compile_file(EXAMPLES / f"{example}.ir", mode="stand_alone", arena=arena)
        program = compiled.save(tmp_path / str(arena))
        if arena:
            plan = json.loads((program / "plan.json").read_text())
            plan["arena"]["check"] = True
            (program / "plan.json").write_text(json.dumps(plan))
        found.append(states(program, tmp_path / f"{arena}.out", backend="nccl"))
    expected, within = found
    assert expected.keys() == within.keys()
    for name, x in expected.items():
        scale = float(np.max(np.abs(x), initial=1e-3))
        tolerance = TOLERANCE.get(example, 1e-4) * scale
        np.testing.assert_allclose(within[name], x, rtol=0, atol=tolerance, err_msg=name)


@pytest.mark.parametrize("example", ["dropout", "overlap", "offload"])
def test_a_resumed_run_has_the_bits_of_one_that_was_not_interrupted(
    example: str, tmp_path: Path
) -> None:
    compiled = shardir.compile_file(EXAMPLES / f"{example}.ir", mode="stand_alone")
    program, saved = compiled.save(tmp_path / "program"), tmp_path / "saved"
    expected = states(program, tmp_path / "uninterrupted", backend="nccl")
    states(program, tmp_path / "first", backend="nccl", steps=2, checkpoints=saved, save_every=1)
    found = states(program, tmp_path / "rest", backend="nccl", resume=saved)
    for name, x in expected.items():
        if name.startswith("states/"):
            assert found[name].tobytes() == x.tobytes(), name


def test_a_step_by_torch_compile_has_the_same_losses(tmp_path: Path) -> None:
    compiled = shardir.compile_file(EXAMPLES / "transformer_block.ir", mode="stand_alone")
    program = compiled.save(tmp_path / "program")
    plain = shardir.run(program, steps=STEPS, backend="nccl", timeout=300)
    found = shardir.run(program, steps=STEPS, backend="nccl", timeout=300, compile=True)
    for name, losses in plain.losses.items():
        np.testing.assert_allclose(found.losses[name], losses, rtol=1e-4)


def test_a_trace_has_the_times_of_the_gpu(tmp_path: Path) -> None:
    compiled = shardir.compile_file(EXAMPLES / "overlap.ir", mode="stand_alone")
    report = compiled.run(steps=STEPS, backend="nccl", trace=tmp_path / "trace.json")
    assert "measured @step, rank 0" in (tmp_path / "trace.json").read_text()
    assert report.losses


def test_an_index_out_of_range_is_one_error(tmp_path: Path) -> None:
    text = """
    func.func @lookup(
      %table: tensor<4x2xf32> {train.input = #train.init<normal>},
      %ids: tensor<3xi32> {train.input = #train.init<constant, value = 5>}
    ) -> tensor<3x2xf32> {
      %y = nn.gather %table, %ids axis 0 : (tensor<4x2xf32>, tensor<3xi32>) -> tensor<3x2xf32>
      func.return %y : tensor<3x2xf32>
    }
    """
    program = shardir.compile(text, mode="stand_alone").save(tmp_path / "program")
    with pytest.raises(RunError, match=r"^rank 0 failed: .*: an index is out of range"):
        shardir.run(program, backend="nccl", timeout=60)


def test_a_loss_that_is_not_finite_names_its_op(tmp_path: Path) -> None:
    text = """
    func.func private @loss(
      %x: tensor<4xf32> {train.input = #train.init<normal>},
      %w: tensor<4xf32> {train.parameter = "w", train.init = #train.init<constant, value = -1.0>}
    ) -> tensor<f32> {
      %r = nn.sqrt %w : (tensor<4xf32>) -> tensor<4xf32>
      %y = nn.mul %x, %r : (tensor<4xf32>, tensor<4xf32>) -> tensor<4xf32>
      %loss = nn.reduce <mean> %y dims <0> : (tensor<4xf32>) -> tensor<f32>
      func.return %loss : tensor<f32>
    }
    train.step @step of @loss <sgd, lr = 0.1>
    """
    program = shardir.compile(text, mode="stand_alone").save(tmp_path / "program")
    with pytest.raises(RunError, match=r"expected a finite loss, got nan.*nn\.sqrt|sqrt"):
        shardir.run(program, steps=3, backend="nccl", timeout=60)
    report = shardir.run(program, steps=3, backend="nccl", timeout=60, allow_nan=True)
    assert np.isnan(report.losses["step"]).all()


def test_a_module_is_called_by_load(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 4))
    x = torch.randn(3, 8)
    program = shardir.compile(model, x, train=False, mode="stand_alone").save(tmp_path / "out")
    found = shardir.load(program, backend="nccl")(x.cuda())
    assert found.is_cuda
    torch.testing.assert_close(found.cpu(), model(x).detach(), rtol=1e-5, atol=1e-5)
