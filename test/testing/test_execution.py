"""Values of programs: interpreted, on simulated ranks, and on processes."""
# ruff: noqa: E501 (texts of programs)

from pathlib import Path

import numpy as np
import pytest
from xdsl.dialects.func import FuncOp

import shardir
from shardir.extend import ShardirError
from shardir.testing import interpret, on_ranks
from shardir.testing.simulated import run_ranks

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"

MLP = """
dist.mesh @m <dp = 2, tp = 3>
func.func @f(%x: tensor<5x8xf64, #dist.layout<@m, [{dp}, {}]>>,
             %w: tensor<8x7xf64, #dist.layout<@m, [{}, {tp}]>>,
             %v: tensor<7x4xf64, #dist.layout<@m, [{tp}, {dp}]>>, %n: tensor<5xi32>)
    -> (tensor<5x4xf64>, tensor<7x4xf64>, tensor<f64>, tensor<5xi32>) {
  %h = nn.matmul %x, %w : (tensor<5x8xf64, #dist.layout<@m, [{dp}, {}]>>, tensor<8x7xf64, #dist.layout<@m, [{}, {tp}]>>) -> tensor<5x7xf64>
  %p = nn.softmax %h axis -1 : (tensor<5x7xf64>) -> tensor<5x7xf64>
  %y = nn.matmul %p, %v : (tensor<5x7xf64>, tensor<7x4xf64, #dist.layout<@m, [{tp}, {dp}]>>) -> tensor<5x4xf64>
  %u = nn.einsum "ij,ik->jk" %p, %y : (tensor<5x7xf64>, tensor<5x4xf64>) -> tensor<7x4xf64>
  %s = nn.reduce <max> %u dims <0, 1> : (tensor<7x4xf64>) -> tensor<f64>
  %m = nn.neg %n : (tensor<5xi32>) -> tensor<5xi32>
  func.return %y, %u, %s, %m : tensor<5x4xf64>, tensor<7x4xf64>, tensor<f64>, tensor<5xi32>
}
train.gradient @g of @f wrt <0, 1>
"""


def by_numpy(x: np.ndarray, w: np.ndarray, v: np.ndarray, n: np.ndarray) -> list[np.ndarray]:
    h = np.exp(x @ w)
    p = h / h.sum(-1, keepdims=True)
    return [p @ v, p.T @ (p @ v), (p.T @ (p @ v)).max(), -n]


@pytest.fixture(scope="module")
def arguments() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    x, w, v = (rng.standard_normal(shape) for shape in ((5, 8), (8, 7), (7, 4)))
    return [x, w, v, np.arange(5, dtype=np.int32)]


@pytest.mark.parametrize("backend", ["", "simulated", "gloo", "shm"])
def test_a_function_has_the_values_of_numpy(backend: str, arguments: list[np.ndarray]) -> None:
    """With uneven shards: all-reduce, all-gather, reduce-scatter and all-to-all are in it."""
    compiled = shardir.compile(MLP, mode="hybrid")
    if backend:
        found = on_ranks(compiled, arguments, "f", backend)
    else:
        found = interpret(compiled, arguments, "f")
    for x, y in zip(found, by_numpy(*arguments), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("example", ["mlp_by_hand", "ring_attention", "ulysses"])
def test_simulated_ranks_have_the_values_of_the_interpreter(example: str) -> None:
    """With parameters, momentum, donated memory, exchanges and messages in a ring. In f32 both add
    in other orders: as `--check-equivalence`, 4 digits of the largest element."""
    compiled = shardir.compile_file(EXAMPLES / f"{example}.ir")
    names = [op.sym_name.data for op in compiled.module.body.ops if isinstance(op, FuncOp)]
    assert names
    for name in names:
        pairs = zip(on_ranks(compiled, None, name), interpret(compiled, None, name), strict=True)
        for x, y in pairs:
            largest = float(np.abs(y).max(initial=1.0))
            np.testing.assert_allclose(x, y, rtol=0, atol=1e-4 * largest)


def test_an_error_of_a_rank_ends_all(arguments: list[np.ndarray]) -> None:
    compiled = shardir.compile(MLP, mode="hybrid")
    with pytest.raises(ShardirError, match=r"expected argument 0 of @f of shape \[5, 8\]"):
        on_ranks(compiled, [arguments[1], *arguments[1:]], "f")
    with pytest.raises(ShardirError, match="expected one public function, got f, g; name the"):
        interpret(compiled)
    with pytest.raises(ShardirError, match="expected the backend simulated, gloo or shm, got mpi"):
        on_ranks(compiled, arguments, "f", "mpi")
    with pytest.raises(ZeroDivisionError):
        run_ranks(3, lambda rank: 1 // rank)
