"""Layer 2: the dialects. `DIALECTS` is what xDSL discovers, one line each."""

from collections.abc import Callable

from xdsl.ir import Dialect


def _dist() -> Dialect:
    from shardir.dialects.dist.dialect import Dist

    return Dist


def _nn() -> Dialect:
    from shardir.dialects.nn import Nn

    return Nn


def _train() -> Dialect:
    from shardir.dialects.train import Train

    return Train


DIALECTS: dict[str, Callable[[], Dialect]] = {"dist": _dist, "nn": _nn, "train": _train}
