"""The `dist` dialect: meshes, layouts, redistribution, and the collectives of the local view.

    dist.mesh @m <dp = 2, tp = 4>
    %y = dist.redistribute %x : (tensor<8x8xf32, #dist.layout<@m, [{dp}, {}]>>)
                              -> tensor<8x8xf32, #dist.layout<@m, [{}, {}]>>
    %b = dist.all_gather %a dim 0 over <dp> : (tensor<4x8xf32, #dist.local<@m, [{dp}, {}]>>)
                                            -> tensor<8x8xf32, #dist.local<@m, [{}, {}]>>

A global value has the global shape and a `#dist.layout`; a local one has the shape of a device's
shard and a `#dist.local`, with the axes over which it is split, replicated or partial.
"""

from shardir.dialects.dist.attributes import *
from shardir.dialects.dist.base import *
from shardir.dialects.dist.collectives import *
from shardir.dialects.dist.point_to_point import *
from shardir.dialects.dist.products import *
from shardir.dialects.dist.propagation import *
from shardir.dialects.dist.redistribute import *
from shardir.dialects.dist.steps import *
from shardir.dialects.dist.types import *
from shardir.dialects.dist.windows import *
