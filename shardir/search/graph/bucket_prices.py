"""The prices of redistributions whose collectives may be in buckets (buckets.py)."""

from shardir.algebra.collectives.all_devices import AllGather
from shardir.algebra.mesh import Mesh
from shardir.algebra.redistribution import plan
from shardir.algebra.steps import elements, step_forms
from shardir.cost.collective_work import collective_times
from shardir.dialects.nn.types import itemsize
from shardir.search.graph.buckets import LateCollective
from shardir.search.graph.latency_shares import LatencyShares, bucket_key
from shardir.search.graph.transfer_costs import ValueTransfer, bucket_price, transfer_costs


class TransferPrices:
    """The prices of redistributions between devices of a mesh."""

    def __init__(self, mesh: Mesh):
        self.mesh = mesh

    def seconds(self, transfer: ValueTransfer, shares: LatencyShares) -> float:
        """Return the estimated time of a transfer with shares of buckets."""
        return bucket_price(self.mesh, transfer, shares)[0]

    def collectives(self, transfer: ValueTransfer) -> list[LateCollective]:
        """Return the collectives of a transfer that may be in buckets."""
        t, have, target = transfer
        shape, size, mesh = t.get_shape(), itemsize(t), self.mesh
        reduction = have.reduction if have.partial else target.reduction
        costs = transfer_costs(mesh, len(shape), reduction)
        steps = None if costs is None else costs.routes.steps(shape, size, have, target)
        if steps is None:
            by_host = have.host or target.host
            steps = () if by_host else plan(shape, mesh, have, target, size)
        found: list[LateCollective] = []
        reductions = [i for i, step in enumerate(steps) if step.record.reduces]
        first, last = 0, max(reductions, default=-1)
        for i, step in enumerate(steps):
            smaller = elements(mesh, shape, step.layout) < elements(mesh, shape, have)
            shrinks, sends = step.record.reduces and smaller, step.communicates(mesh)
            gathers = step.kind == AllGather.name
            early = i <= last or gathers or not sends
            first = max(first, 0 if shrinks else 1 if early else 2)
            if step.record.fusible and sends:
                kind = t.element_type, step.kind, step.axes, step.dim, step.concat, step.reduction
                forms = step_forms(mesh, shape, have, step)
                shared = tuple(bucket_key(size, step, form) for form in range(len(forms)))
                values = collective_times([(shape, have, step, size)], mesh)
                bytes_ = elements(mesh, shape, have) * size
                found.append(LateCollective(kind, shared, bytes_, values, shrinks, gathers, first))
            have = step.layout
        return found
