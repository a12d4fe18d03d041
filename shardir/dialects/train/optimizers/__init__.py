"""The optimizers, one file each. The name of a file is the name of the optimizer in a `train.step`;
the record OPTIMIZER in it has the hyperparameters, and the update as ops.
"""

from typing import ClassVar

from xdsl.irdl import irdl_attr_definition

from shardir.dialects.families import modules_of
from shardir.dialects.text import Kinds, OptionsAttr
from shardir.dialects.train.optimizer import Optimizer

OPTIMIZERS: dict[str, Optimizer] = {
    name: module.OPTIMIZER for name, module in modules_of(__name__).items()
}


@irdl_attr_definition
class OptimizerAttr(OptionsAttr):
    """The optimizer of a train step, with its hyperparameters."""

    name = "train.optimizer"
    KINDS: ClassVar[Kinds] = {name: o.hyperparameters for name, o in OPTIMIZERS.items()}
