"""Clusters in files. A file has the text of one `dist.cluster`, so it is a program too.

load("h200")            ready/h200.ir, a ready-made cluster
load("here/ours.ir")    a file of the user
load("gloo")            the default of the algebra
"""

import re
from pathlib import Path

from shardir.algebra.cluster import DEFAULT, Cluster
from shardir.algebra.notation import parse_cluster
from shardir.diagnostics import NotationError, ShardirError
from shardir.dialects.installed import of_registry

READY = Path(__file__).parent / "ready"

DEFAULT_NAME = "gloo"
"""The name of DEFAULT."""

_CLUSTER = re.compile(r"\s*dist\.cluster\s+@[\w$.]+\s*<(.*)>\s*", re.DOTALL)


def names() -> tuple[str, ...]:
    """Return the names of the ready-made clusters, and of those of installed packages."""
    return tuple(sorted(of_registry("clusters", _ready())))


def _ready() -> dict[str, str]:
    """Return the files of the ready-made clusters by name; "" for DEFAULT."""
    return {DEFAULT_NAME: ""} | {p.stem: str(p) for p in READY.glob("*.ir")}


def load(name_or_path: str | Path) -> Cluster:
    """Return a ready-made cluster by its name, or the cluster in a file.

    Raises:
        ShardirError: no cluster has the name, or the file is not the text of one cluster.
    """
    if name_or_path == DEFAULT_NAME:
        return DEFAULT
    given, ready = str(name_or_path), _ready()
    added = of_registry("clusters", ready)
    if given in added and given not in ready:
        return _read(added[given], f"the cluster {given}")
    path = Path(ready.get(given, name_or_path))
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        raise ShardirError(
            f"expected a cluster, got {name_or_path}; use a readable file or {', '.join(names())}"
        ) from None
    return _read(text, str(path))


def _read(text: str, name: str) -> Cluster:
    """Return the cluster of a text; errors have the name."""
    match = _CLUSTER.fullmatch(re.sub(r"//[^\n]*", "", text))
    if match is None:
        raise ShardirError(
            f"{name}: expected one cluster; use dist.cluster @name "
            "<levels [node = 8 {bandwidth = 4.5e+11, latency = 3e-06}]>"
        )
    try:
        return parse_cluster(match[1])
    except NotationError as e:
        raise ShardirError(f"{name}: {e}") from None
