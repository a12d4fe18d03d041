"""The sample passes of driver.py in the universe of shard-opt."""

from collections.abc import Iterator

import pytest
from support.driver import NAMED, Break, Complain, Crash, Folder, Refuse, Rename

from shardir.dialects.installed import installed
from shardir.passes import PIPELINES


@pytest.fixture
def sample_passes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    made = {p.name: (lambda p=p: p) for p in (Rename, Complain, Crash, Break, Refuse)}
    registry = installed()
    with monkeypatch.context() as m:
        m.setitem(registry.tables, "passes", registry.tables["passes"] | made)
        targets = registry.tables["targets"] | {"folder": lambda: Folder}
        m.setitem(registry.tables, "targets", targets)
        for name, text in NAMED.items():
            m.setitem(PIPELINES, name, text)
        yield
