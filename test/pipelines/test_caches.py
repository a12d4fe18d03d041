"""A process that compiles many programs retains those of a few."""

import gc

import pytest

import shardir
from shardir.algebra.layout import Layout
from shardir.api import caches

TEXT = """dist.mesh @retained{i} <dp = 2>
func.func @f(
    %x: tensor<{n}x8xf32, #dist.layout<@retained{i}, [{{dp}}, {{}}]>>,
    %w: tensor<8x8xf32> {{train.parameter = "w{i}", train.init = #train.init<normal>}}
) -> tensor<f32> {{
  %h = nn.matmul %x, %w
      : (tensor<{n}x8xf32, #dist.layout<@retained{i}, [{{dp}}, {{}}]>>, tensor<8x8xf32>)
      -> tensor<{n}x8xf32>
  %y = nn.reduce <mean> %h dims <0, 1> : (tensor<{n}x8xf32>) -> tensor<f32>
  func.return %y : tensor<f32>
}}
train.step @step of @f <sgd, lr = 0.1>
"""


def compile_program(i: int) -> str:
    compiled = shardir.compile(TEXT.format(i=i, n=8 + 2 * i))
    return compiled.program + compiled.text


def layouts_of(i: int) -> int:
    """Return how many layouts on the mesh of a program are alive."""
    gc.collect()
    return sum(isinstance(x, Layout) and x.mesh == f"retained{i}" for x in gc.get_objects())


def test_a_program_is_freed_with_the_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caches, "EVERY", 1)
    monkeypatch.setattr(caches, "MAX_ENTRIES", 10**9)
    first = compile_program(0)
    compile_program(1)
    assert layouts_of(0)  # programs share what is cached
    monkeypatch.setattr(caches, "MAX_ENTRIES", caches.number_of_entries() // 2)
    compile_program(2)  # begins with empty caches
    assert layouts_of(0) == layouts_of(1) == 0
    assert layouts_of(2)
    assert compile_program(0) == first


def test_caches_are_looked_at_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """A large program finds its entries in most of its compilations."""
    dropped: list[int] = []
    monkeypatch.setattr(caches, "MAX_ENTRIES", 0)
    monkeypatch.setattr(caches, "drop_caches", lambda: dropped.append(1))
    for _ in range(3 * caches.EVERY):
        caches.bound_caches()
    assert len(dropped) == 3
