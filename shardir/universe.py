"""What shardir adds to any xDSL tool: found through the `xdsl.universe` entry point."""

from xdsl.universe import Universe
from xdsl.utils.target import Target

from shardir.dialects import DIALECTS
from shardir.pipelines import PASSES


def torch() -> type[Target]:
    from shardir.backend.torch.target import TorchTarget

    return TorchTarget


UNIVERSE = Universe(all_dialects=DIALECTS, all_passes=PASSES, all_targets={"torch": torch})
