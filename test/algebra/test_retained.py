"""Tables of paths that are retained: those used last, up to a number of bytes."""

from collections import OrderedDict

import numpy as np
import pytest

from shardir.algebra import retained
from shardir.algebra.mesh import Mesh
from shardir.algebra.notation import parse_layout
from shardir.algebra.retained import RetainedTables
from shardir.algebra.routes import Routes


@pytest.fixture(autouse=True)
def no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the tables that other tests have made."""
    monkeypatch.setattr(RetainedTables, "_last", OrderedDict())
    monkeypatch.setattr(RetainedTables, "_bytes", 0)
    monkeypatch.setattr(retained, "MAX_BYTES", 300)


def test_what_was_used_last_is_retained() -> None:
    made = []

    def use(tables: RetainedTables, key: str, size: int = 100) -> None:
        def make() -> tuple[np.ndarray]:
            made.append(key)
            return (np.zeros(size, np.int8),)

        assert tables.get(key, make)[0].nbytes == size

    some, others = RetainedTables(), RetainedTables()
    for tables, key in ((some, "a"), (others, "b"), (some, "c"), (some, "a")):
        use(tables, key)
    assert made == ["a", "b", "c"]
    use(others, "d")  # b, which was used first, is freed
    for tables, key in ((some, "a"), (some, "c"), (others, "d"), (others, "b")):
        use(tables, key)
    assert made == ["a", "b", "c", "d", "b"]
    use(some, "all", 1000)
    use(some, "all", 1000)
    use(others, "d")
    assert made[5:] == ["all", "d"]


def test_tables_that_two_make_at_once_count_once() -> None:
    """The second one begins, and ends, while the first one makes its own."""
    tables, some = RetainedTables(), (np.zeros(100, np.int8),)
    first = tables.get("a", lambda: (tables.get("a", lambda: some)[0].copy(),))
    assert first is some and RetainedTables._bytes == 100


def test_paths_of_many_shapes_take_no_more_bytes_than_allowed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And those that are found again are the same."""
    mesh = Mesh("m", (("a", 2), ("b", 3)))
    ends = parse_layout("@m, [{b, a}, {}]"), parse_layout("@m, [{}, {a}], partial sum {b}")
    known = Routes(mesh, 2, "sum", mesh.names)
    monkeypatch.setattr(retained, "MAX_BYTES", limit := 200_000)
    paths = []
    for _ in range(2):
        paths += [known.steps((6 * n, 6), 4, *ends) for n in range(1, 60)]
        assert limit / 2 < sum(RetainedTables._last.values()) <= limit
    assert None not in paths and paths[:59] == paths[59:]
