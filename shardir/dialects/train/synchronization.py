"""Replicas that train independently, and are synchronised periodically.

    train.step @step of @loss <adamw, lr = 0.001>
        sync <nesterov, replicas = 4, every = 8, lr = 0.7, momentum = 0.9>

Four replicas of the program do eight steps each; then the outer optimizer moves the parameters by
their mean change, and all replicas continue from there. This is local SGD (Stich, 2019) for
<sgd, lr = 1.0>, and DiLoCo (Douillard et al., 2023) with Nesterov's momentum.

`distributed-autodiff` writes the request on the step's function, as `train.sync`. `local-steps`
adds the function that synchronises every `train.every` steps, and replaces `train.sync` by
`train.replicas`: the step runs on each replica's own values.
"""

from typing import ClassVar

from xdsl.dialects.builtin import IntegerAttr, i64
from xdsl.dialects.func import FuncOp
from xdsl.irdl import irdl_attr_definition
from xdsl.utils.exceptions import VerifyException

from shardir.diagnostics import coded
from shardir.dialects.text import Kinds, OptionsAttr, OptionSpec
from shardir.dialects.train.optimizers import OPTIMIZERS, OptimizerAttr

SYNC, REPLICAS, EVERY = "train.sync", "train.replicas", "train.every"
REPLICA = "replica"
"""The mesh axis of replicas, and the suffix of the keys of their values."""

_OWN = {"replicas": OptionSpec(int, minimum=1), "every": OptionSpec(int, minimum=1)}


@irdl_attr_definition
class SyncAttr(OptionsAttr):
    """The number of replicas, the steps between two synchronisations, and the outer optimizer."""

    name = "train.synchronization"
    KINDS: ClassVar[Kinds] = {name: {**_OWN, **o.hyperparameters} for name, o in OPTIMIZERS.items()}

    @property
    def optimizer(self) -> OptimizerAttr:
        """The outer optimizer."""
        kind, options = self.data
        return OptimizerAttr((kind, tuple(pair for pair in options if pair[0] not in _OWN)))


def key_of_replica(key: str) -> str:
    """The key of each replica's own value of a parameter or state."""
    return f"{key}.{REPLICA}"


def is_of_replica(key: str) -> bool:
    """Whether a key names the replicas' own values."""
    return key.endswith(f".{REPLICA}")


def sync_of(f: FuncOp) -> SyncAttr | None:
    """The requested synchronisation of a step; `local-steps` removes it."""
    sync = f.attributes.get(SYNC)
    return sync if isinstance(sync, SyncAttr) else None


def replicas_of(f: FuncOp) -> int | None:
    """The number of replicas whose values a function updates; None without replicas."""
    return _count(f, REPLICAS)


def every_of(f: FuncOp) -> int | None:
    """The number of steps between two runs of a function; None if it does not set one."""
    return _count(f, EVERY)


def set_count(f: FuncOp, name: str, count: int) -> None:
    f.attributes[name] = IntegerAttr(count, i64)


def _count(f: FuncOp, name: str) -> int | None:
    count = f.attributes.get(name)
    return count.value.data if isinstance(count, IntegerAttr) else None


def check_counts(f: FuncOp) -> None:
    """Raises VerifyException if a function's `train.every` or `train.replicas` is not a positive
    number."""
    for name in (EVERY, REPLICAS):
        if name in f.attributes and (_count(f, name) or 0) < 1:
            raise VerifyException(
                coded(
                    "G10",
                    f"expected {name} of @{f.sym_name.data} to be at least 1, got "
                    f"{f.attributes[name]}",
                    use=f"write {name} = 8 : i64",
                )
            )
