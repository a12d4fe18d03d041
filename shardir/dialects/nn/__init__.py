"""The `nn` dialect: tensor ops, one class each, in families.

A family is a file with ops. The dialect is what the files define: FAMILIES follows from them, and
nothing lists the ops. The imports below are for names alone: `nn.X` is any class of a family.
"""

from xdsl.dialects.builtin import UnitAttr
from xdsl.ir import Attribute, Dialect, Operation

from shardir.dialects.families import defined_in, modules_of
from shardir.dialects.nn.activation import *
from shardir.dialects.nn.along_axis import *
from shardir.dialects.nn.arithmetic import *
from shardir.dialects.nn.attention import *
from shardir.dialects.nn.base import *
from shardir.dialects.nn.base import TensorOp
from shardir.dialects.nn.contraction import *
from shardir.dialects.nn.control import *
from shardir.dialects.nn.convolution import *
from shardir.dialects.nn.creation import *
from shardir.dialects.nn.cross_entropy import *
from shardir.dialects.nn.custom import *
from shardir.dialects.nn.elementary import *
from shardir.dialects.nn.elementwise import *
from shardir.dialects.nn.extremes import *
from shardir.dialects.nn.indexing import *
from shardir.dialects.nn.joining import *
from shardir.dialects.nn.logic import *
from shardir.dialects.nn.losses import *
from shardir.dialects.nn.movement import *
from shardir.dialects.nn.norms import *
from shardir.dialects.nn.ordering import *
from shardir.dialects.nn.pooling import *
from shardir.dialects.nn.positions import *
from shardir.dialects.nn.properties import *
from shardir.dialects.nn.random import *
from shardir.dialects.nn.reduction import *
from shardir.dialects.nn.row_norms import *
from shardir.dialects.nn.rows import *
from shardir.dialects.nn.scores import *
from shardir.dialects.nn.selection import *
from shardir.dialects.nn.shape import *
from shardir.dialects.nn.slicing import *
from shardir.dialects.nn.sliding import *
from shardir.dialects.nn.softmax import *
from shardir.dialects.nn.statistics import *
from shardir.dialects.nn.windows import *

UNIT = UnitAttr()
_MODULES = modules_of(__name__)

FAMILIES: dict[str, list[type[TensorOp]]] = {
    name: ops for name, module in _MODULES.items() if (ops := defined_in(module, TensorOp))
}
"""The ops of each family, by the name of its file."""

Nn = Dialect(
    "nn",
    [op for module in _MODULES.values() for op in defined_in(module, Operation)],
    [a for module in _MODULES.values() for a in defined_in(module, Attribute)],
)
