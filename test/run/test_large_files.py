# ruff: noqa: E402 (torch may not be installed)
"""Training from a file that is larger than memory: a sparse one of 10 GB, which costs nothing."""

import re

import numpy as np
import pytest

torch = pytest.importorskip("torch")


import shardir
from shardir.backend.torch.shardir_runtime.data import files
from shardir.backend.torch.shardir_runtime.plan import arrays

LARGE, SMALL = 10_000_000_000, 10_000_000
LENGTH, STEPS = 8, 12

PROGRAM = """
dist.mesh @m <dp = 2>

func.func private @loss(
    %x: X {train.input = #train.init<integers, low = 0, high = 9>},
    %y: Y {train.input = #train.init<integers, low = 0, high = 9>},
    %w: tensor<16x16xf32> {train.parameter = "w", train.init = #train.init<normal>}
) -> tensor<f32> {
  %e = nn.gather %w, %x axis 0 : (tensor<16x16xf32>, X) -> tensor<2048x8x16xf32>
  %l = nn.cross_entropy %e, %y : (tensor<2048x8x16xf32>, Y) -> tensor<2048x8xf32>
  %loss = nn.reduce <mean> %l dims <0, 1> : (tensor<2048x8xf32>) -> tensor<f32>
  func.return %loss : tensor<f32>
}
train.step @step of @loss <sgd, lr = 0.1>
"""
TYPES = {"X": "tensor<2048x8xi32, #dist.layout<@m, [{dp}, {}]>>", "Y": "tensor<2048x8xi32>"}


@pytest.fixture
def tokens(tmp_path):
    """Sparse files of tokens, by their bytes."""
    paths = {}
    for size in (SMALL, LARGE):
        paths[size] = tmp_path / f"{size}.bin"
        with paths[size].open("wb") as file:
            file.truncate(size)
    yield paths
    for path in paths.values():
        path.unlink()


def test_memory_does_not_depend_on_the_size_of_a_file(tokens, tmp_path):
    """The rows of all steps are on 100 MB of pages of a rank, if they are in different ones."""
    text = re.sub(r"\b[XY]\b", lambda name: TYPES[name[0]], PROGRAM)
    program = shardir.compile(text).save(tmp_path / "program")
    peaks = {}
    for size, path in tokens.items():
        report = shardir.run(program, steps=STEPS, timeout=60, data={"x,y": f"{path}:u16"})
        peaks[size] = report.memory
    assert peaks[LARGE] < peaks[SMALL] + 50_000_000


def test_rows_are_found_beyond_32_bits(tokens):
    path = tokens[LARGE]
    rows = arrays.sequences(arrays.array_in(path, "u16"), (LENGTH,), 1)
    last = LARGE // 2 // LENGTH - 2
    with path.open("rb+") as file:
        file.seek(2 * (last * LENGTH + 1))
        file.write(np.arange(1, LENGTH + 1, dtype="<u2").tobytes())
    found = files.ArrayReader(rows).read([(0, LENGTH)], torch.tensor([last, 0, last]))
    assert found.tolist() == [[*range(1, LENGTH + 1)], [0] * LENGTH, [*range(1, LENGTH + 1)]]
