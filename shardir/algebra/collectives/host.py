"""The copy between a device and the memory of its host."""

from typing import ClassVar

from shardir.algebra.collectives.base import (
    Collective,
    CollectiveStep,
    GroupForms,
    Transfer,
    record,
)
from shardir.algebra.forms import Form, Forms
from shardir.algebra.layout import Layout
from shardir.algebra.mesh import Axes, Mesh


@record
class Copy(Collective):
    """Each device's shard moves to host memory, or from there to the device. No device
    communicates with another."""

    name = "copy"
    transposed = "copy"
    planned = False

    def forms_on(self, mesh: Mesh, axes: Axes) -> Forms:
        """One form: the latency of the host's link, and the bytes of the shard over it."""
        link = mesh.cluster_or_default.host_link
        return (Form("copy", link.latency, 1 / link.bandwidth),)

    forms: ClassVar[GroupForms] = staticmethod(lambda levels: ())

    @property
    def communicates(self) -> bool:
        return False

    def moves(self, n: int) -> bool:
        return True

    def after(self, mesh: Mesh, before: Layout, step: CollectiveStep) -> Layout:
        return before.on_device if before.host else before.on_host

    def buffers(self, t: Transfer) -> int:
        return 0
