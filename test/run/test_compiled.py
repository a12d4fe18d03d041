"""`--compile`: what is between collectives is compiled by torch; losses are those without it."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest
from support.device import on_cpu
from support.extent import long_form

pytest.importorskip("torch")

import shardir
from shardir.backend.runs import RunError

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"

TEXT = """
func.func private @loss(
  %x: tensor<8x6xf32> {train.input = #train.init<normal>},
  %w: tensor<6x3xf32> {train.parameter = "w", train.init = #train.init<normal>}
) -> tensor<f32> {
  %y = nn.matmul %x, %w : (tensor<8x6xf32>, tensor<6x3xf32>) -> tensor<8x3xf32>
  %s = nn.square %y : (tensor<8x3xf32>) -> tensor<8x3xf32>
  %loss = nn.reduce <mean> %s dims <0, 1> : (tensor<8x3xf32>) -> tensor<f32>
  func.return %loss : tensor<f32>
}
train.step @step of @loss <sgd, lr = 0.1>
"""


@on_cpu("there Triton compiles")
def test_without_a_compiler_there_is_one_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = shardir.compile(TEXT, mode="stand_alone").save(tmp_path / "program")
    monkeypatch.setenv("CXX", str(tmp_path / "none"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    with pytest.raises(RunError, match=r"^compile=True: torch.compile fails[^\n]*; leave it"):
        shardir.run(program, steps=1, compile=True, timeout=60)
    with pytest.raises(RunError, match=r"^compile=True: expected no detect_anomaly=True"):
        shardir.run(program, steps=1, compile=True, detect_anomaly=True, timeout=60)


@long_form
@pytest.mark.parametrize(
    "example", ["offload.ir", "overlap.ir", "ulysses.ir", "transformer_block.ir"]
)
def test_losses_are_those_of_each_op(example: str, tmp_path: Path) -> None:
    """On ranks, with collectives that have been started early, and with exchanges."""
    program = shardir.compile_file(EXAMPLES / example).save(tmp_path / "program")
    plain = shardir.run(program, steps=4, timeout=300)
    found = shardir.run(program, steps=4, timeout=300, compile=True)
    for name, losses in plain.losses.items():
        np.testing.assert_allclose(found.losses[name], losses, rtol=1e-5)


@long_form
@on_cpu("there the order of sums varies")
def test_without_collectives_a_step_is_one_graph(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With lookups, attention, and a loss whose labels are checked."""
    import torch

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    program = shardir.compile_file(EXAMPLES / "bert.ir", mode="stand_alone").save(tmp_path / "bert")
    tokens, rows = torch.arange(24, dtype=torch.int32).view(4, 6) % 12, torch.arange(4).int()
    given = (tokens, tokens % 2, rows + 3, tokens - 6, rows % 2)
    counters = torch._dynamo.utils.counters
    counters.clear()
    plain, found = (shardir.load(program, compile=how) for how in (False, True))
    for _ in range(3):
        torch.testing.assert_close(found(*given), plain(*given))
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]
    with pytest.raises((IndexError, RuntimeError), match=r"index.* out of range"):
        found(tokens + 1, *given[1:])
