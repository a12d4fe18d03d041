"""Random values on real ranks: on any mesh the bits of numpy, in the forward part and when they are
drawn again in the backward part, and different ones at each step."""

import numpy as np
import pytest
from support.extent import extent

pytest.importorskip("torch")

import shardir
from shardir.backend.runs import Options
from shardir.backend.torch.launch.start import run
from shardir.dialects.random import fill, positions, seed_at, uniform

PROGRAM = """
dist.mesh @m <MESH>
#x = #dist.layout<@m, LAYOUT>
func.func private @loss(
    %w: tensor<9x6xf32, #x> {train.parameter = "w", train.init = #train.init<normal>},
    %key: tensor<i64> {
      train.state = "key", train.init = #train.init<integers, low = 0, high = 1000000000000000>
    }
) -> (tensor<f32>, tensor<i64> {train.updates = "key"}) {
  %d = nn.dropout %w, %key p 0.25 stream 1 {recompute} : (tensor<9x6xf32, #x>, tensor<i64>) -> tensor<9x6xf32>
  %e = nn.sub %d, %w {recompute} : (tensor<9x6xf32>, tensor<9x6xf32, #x>) -> tensor<9x6xf32>
  %q = nn.square %e : (tensor<9x6xf32>) -> tensor<9x6xf32>
  %l = nn.reduce <sum> %q dims <0, 1> : (tensor<9x6xf32>) -> tensor<f32>
  %one = nn.constant dense<1> : tensor<i64> -> tensor<i64>
  %next = nn.add %key, %one : (tensor<i64>, tensor<i64>) -> tensor<i64>
  func.return %l, %next : tensor<f32>, tensor<i64>
}
train.step @step of @loss <sgd, lr = 0.25>
func.func @drawn(%key: tensor<i64> {train.state = "key"}) -> (tensor<9x6xf32, #x>, tensor<9x6xi1>) {
  %n = nn.random <normal, mean = 1.0, std = 2.0> %key stream 2 : (tensor<i64>) -> tensor<9x6xf32, #x>
  %b = nn.random <bernoulli, p = 0.5> %key stream 3 : (tensor<i64>) -> tensor<9x6xi1>
  func.return %n, %b : tensor<9x6xf32, #x>, tensor<9x6xi1>
}
"""  # noqa: E501 - the text of a program
SHAPE, STEPS = (9, 6), 2
POSITIONS = positions(SHAPE, [(0, n) for n in SHAPE])


def retained(key: int) -> np.ndarray:
    return uniform(seed_at(key, 1), POSITIONS) >= 0.25


def after(w: np.ndarray, key: int) -> np.ndarray:
    """One step, elementwise and in single precision: the loss is sum((mask w / (1 - p) - w)^2)."""
    scale = np.float32(1 / 0.75)
    dl = 2 * ((w * retained(key)) * scale - w)
    return w - np.float32(0.25) * ((dl * retained(key)) * scale - dl)


@pytest.mark.parametrize(
    ("mesh", "layout"),
    [
        ("a = 2, b = 2", "[{b}, {a}]"),
        *extent([], [("d = 1", "[{}, {}]"), ("d = 2", "[{d}, {}]")]),
        *extent([], [("a = 2, b = 4", "[{}, {b, a}]")]),  # two ranks hold nothing
    ],
)
def test_any_mesh_draws_the_same(mesh, layout, tmp_path):
    text = PROGRAM.replace("MESH", mesh).replace("LAYOUT", layout)
    program = shardir.compile(text)
    assert program.program.count("ops_random.dropout") == 3  # forward, again, its gradient
    program.save(tmp_path / "out")
    dump = tmp_path / "dump.npz"
    run(tmp_path / "out", Options(timeout=60, steps=STEPS, dump=dump))
    found = np.load(dump)
    key = int(fill("integers", {"low": 0, "high": 10**15}, (), None, "0/key", np.int64))
    w = fill("normal", {}, SHAPE, None, "0/w", np.float32)
    for step in range(STEPS):
        w = after(w, key + step)
    assert found["states/w"].tobytes() == w.tobytes()
    assert found["states/key"] == key + STEPS
    normal = fill("normal", {"mean": 1.0, "std": 2.0}, SHAPE, None, seed_at(key + STEPS, 2))
    assert found["results/drawn/0"].tobytes() == normal.tobytes()
    bits = fill("bernoulli", {"p": 0.5}, SHAPE, None, seed_at(key + STEPS, 3), bool)
    assert (found["results/drawn/1"].astype(bool) == bits).all()
    assert (retained(key) != retained(key + 1)).any()
