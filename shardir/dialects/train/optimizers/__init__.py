"""The optimizers, one file each, named as in a `train.step`. Its record OPTIMIZER has the
hyperparameters, and the update as ops. An update op of the optimizer's own is in the same file.
"""

from typing import ClassVar

from xdsl.irdl import irdl_attr_definition

from shardir.dialects.families import defined_in, modules_of
from shardir.dialects.text import Kinds, OptionsAttr
from shardir.dialects.train.optimizer import Optimizer
from shardir.dialects.train.updates import SgdOp, Update

MODULES = modules_of(__name__)
OPTIMIZERS: dict[str, Optimizer] = {name: module.OPTIMIZER for name, module in MODULES.items()}
UPDATES: list[type[Update]] = [
    SgdOp, *(op for module in MODULES.values() for op in defined_in(module, Update)),
]  # fmt: skip


@irdl_attr_definition
class OptimizerAttr(OptionsAttr):
    """The optimizer of a train step, with its hyperparameters."""

    name = "train.optimizer"
    KINDS: ClassVar[Kinds] = {name: o.hyperparameters for name, o in OPTIMIZERS.items()}
