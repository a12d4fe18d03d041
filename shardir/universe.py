"""The dialects, passes and target of shardir for any xDSL tool: the `xdsl.universe` entry point."""

from xdsl.universe import Universe

from shardir.backend import BACKENDS
from shardir.dialects import DIALECTS
from shardir.pipelines import PASSES

UNIVERSE = Universe(all_dialects=DIALECTS, all_passes=PASSES, all_targets=dict(BACKENDS))
