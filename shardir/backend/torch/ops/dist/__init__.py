"""Emitters of collectives to calls of the runtime, with comments that give the reason. There is a
file per kind, as in `shardir/algebra/collectives/`."""

from xdsl.ir import Operation

from shardir.backend.torch.emit.scope import Entry
from shardir.backend.torch.ops.dist import all_devices, by_position, halo, host, rings

TORCH_DIST: dict[type[Operation], Entry] = {
    **all_devices.TORCH,
    **halo.TORCH,
    **by_position.TORCH,
    **host.TORCH,
    **rings.TORCH,
}
