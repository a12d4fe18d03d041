"""Programs written in Python: docs/guides/building.md has a page on it."""

from shardir.build.function import FunctionBuilder as FunctionBuilder
from shardir.build.module import Module as Module
from shardir.build.ops import Ops as Ops
from shardir.build.ops import nn as nn
from shardir.build.values import Value as Value
