"""Random modules of torch: on one device and on ranks they train as they do in torch.

`make modules MODULES=2000` judges more of them, others each time, and reduces those that fail.
"""

import pytest
from support.extent import extent
from support.modules.generator import drawn_module
from support.modules.judge import GOOD, in_double, judged, runs, valid_part
from support.modules.reducer import reproducer, shrunk
from support.modules.search import optimizer_of

PARTS, COUNT, ON_RANKS = extent(1, 4), extent(10, 600), extent(1, 3)

REFUSED = ("hook", "buffer in memory of another", "parameters in one memory")
"""The features with which modules are refused (docs/guides/imported.md)."""


@pytest.mark.parametrize("part", range(PARTS))
def test_random_modules_train_as_in_torch(part: int) -> None:
    for seed in range(part, COUNT, PARTS):
        check(seed)


def test_random_modules_train_on_ranks() -> None:
    seeds = iter(range(COUNT, COUNT + 100))
    for _ in range(ON_RANKS):
        while not check(next(seeds), ranks=True):
            pass


def check(seed: int, ranks: bool = False) -> bool:
    """Judge the module of a seed; return whether torch takes it."""
    optimizer = optimizer_of(seed)
    with in_double():
        module = drawn_module(seed, REFUSED)
    if (valid := valid_part(module, optimizer)) is None:
        return False
    verdict = judged(*valid, optimizer, outputs=seed % 3 == 0, ranks=ranks)
    assert verdict.kind in GOOD, f"seed {seed}\n{reproducer(valid[0], verdict)}"
    return True


def test_a_module_is_reduced_to_the_statements_that_fail() -> None:
    with in_double():
        module = next(m for m in map(drawn_module, range(1000)) if ".flip(0)" in m.body)
    found = shrunk(module, lambda m: ".flip(0)" in m.body and runs(m))
    assert sum(len(c.forward) for c in found.classes) <= 2
