"""Clusters in files: the text of one `dist.cluster`, so that a file is also a program.

    load("h200")            a ready-made one, of the folder ready/
    load("here/ours.ir")    a file

A name is that of a file in ready/, without its ending, or `gloo`: the default of the algebra.
"""

import re
from pathlib import Path

from shardir.algebra.cluster import DEFAULT, Cluster
from shardir.algebra.notation import parse_cluster
from shardir.diagnostics import NotationError, ShardirError

READY = Path(__file__).parent / "ready"

DEFAULT_NAME = "gloo"
"""The name of DEFAULT."""

_CLUSTER = re.compile(r"\s*dist\.cluster\s+@[\w$.]+\s*<(.*)>\s*", re.DOTALL)


def names() -> tuple[str, ...]:
    """Return the names of the ready-made clusters."""
    return tuple(sorted([DEFAULT_NAME, *(p.stem for p in READY.glob("*.ir"))]))


def load(name_or_path: str | Path) -> Cluster:
    """Return a cluster by its name, or from a file.

    Raises:
        ShardirError: there is no such cluster, or the file has another text.
    """
    if name_or_path == DEFAULT_NAME:
        return DEFAULT
    path = READY / f"{name_or_path}.ir" if str(name_or_path) in names() else Path(name_or_path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        raise ShardirError(
            f"expected a cluster, got {name_or_path}; use a readable file or {', '.join(names())}"
        ) from None
    found = _CLUSTER.fullmatch(re.sub(r"//[^\n]*", "", text))
    if found is None:
        raise ShardirError(
            f"{path}: expected one cluster; use dist.cluster @name "
            "<levels [node = 8 {bandwidth = 4.5e+11, latency = 3e-06}]>"
        )
    try:
        return parse_cluster(found[1])
    except NotationError as e:
        raise ShardirError(f"{path}: {e}") from None
