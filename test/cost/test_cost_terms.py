"""The relative model's four terms: by hand, and against the bytes of the lowered program."""

from pathlib import Path

import pytest
from support.extent import sampled

import shardir
from shardir.cost import Coefficients, Terms, clusters, relative, report

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
PLACED = "propagate-strategies,insert-redistributions,distributed-autodiff"


def terms_of(name: str) -> dict[str, Terms]:
    module = shardir.compile_file(EXAMPLES / name, PLACED).module
    return {c.name: c.terms for c in relative(module)}


def test_rows_then_columns() -> None:
    """y [8, 8] f32 by rows of 4 is gathered: 6 rows of 32 B are received. Backward they go back by
    a reduce-scatter, which ends a partial value, and so does W's all-reduce: 2 * 3 / 4 of 192 B.
    x [2, 6] @ w [6, 8] -> [2, 8], then y [8, 8] @ v [8, 3] -> [8, 3]."""
    found = terms_of("matmul_rows_then_columns.ir")
    assert found["net"] == Terms(cal=4 * (12 + 48 + 16) + 4 * (64 + 24 + 24), inter=192)
    assert (found["gradient"].inter, found["gradient"].inner) == (192, 192 + 288)


def test_a_step_knows_what_is_for_gradients() -> None:
    """z2 [64 / 2, 128] is reduced over tp = 2 and the loss over dp = 2: by a ring of two, as many
    bytes as there are. The gradients of a rank's 8,970 parameters are reduced over dp."""
    step = terms_of("digits.ir")["step"]
    assert (step.inner, step.inter, step.dp) == (32 * 128 * 4 + 4, 0, 4 * 8970)


def test_coefficients() -> None:
    terms = Terms(cal=1, inner=20, inter=300, dp=4000) + Terms(cal=1)
    assert terms.cost(Coefficients(1, 1, 1, 1)) == 4322
    assert terms.cost(Coefficients(0.5, 2, 3, 0.25)) == 1 + 40 + 900 + 1000
    given = Coefficients.of(clusters.load("h200"))
    assert given == Coefficients(1 / 4.8e12, 1 / 4.5e11, 1 / 4.5e11, 1 / 5e10)
    module = shardir.compile_file(EXAMPLES / "digits.ir", PLACED).module
    (plain, step), (_, other) = relative(module), relative(module, None, Coefficients(0, 0, 0, 1))
    assert other.cost == step.terms.dp and plain.terms.dp == 0
    assert step.terms == sum((t for _, t in step.ops), Terms())


@pytest.mark.parametrize("path", sampled(sorted(EXAMPLES.glob("*.ir")), 10), ids=lambda p: p.stem)
def test_the_terms_are_the_bytes_of_the_lowered_program(path: Path) -> None:
    """Of the same plans: the bytes that computation touches, and the sum of those received."""
    planned = relative(shardir.compile_file(path, PLACED).module)
    lowered = {
        f.name: f for f in report(shardir.compile_file(path, f"{PLACED},lower-to-spmd").module)
    }
    for plan in planned:
        ops, terms = lowered[plan.name].ops, plan.terms
        computed = sum(c.bytes for c in ops if not c.communicates)
        received = sum(c.bytes for c in ops if c.communicates)
        assert (terms.cal, terms.inner + terms.inter + terms.dp) == (computed, received)
