"""The costs that a search for a plan asks for: times of steps, and lower bounds of what is left."""

from shardir.algebra.bound import latency_bound, seconds_bound
from shardir.algebra.collectives import CollectiveStep
from shardir.algebra.layout import Layout
from shardir.algebra.mesh import Axes
from shardir.algebra.moves import RedistributionProblem
from shardir.algebra.steps import step_seconds


class PlanCosts:
    """The costs of steps of a problem, by the records of collectives."""

    def __init__(self, problem: RedistributionProblem, itemsize: int):
        self.problem, self.itemsize = problem, itemsize
        self._latencies: dict[tuple[str, Axes], float] = {}

    def seconds(self, before: Layout, step: CollectiveStep) -> float:
        """Return the time of a step, in its fastest form."""
        return step_seconds(self.problem.mesh, self.problem.shape, before, step, self.itemsize)

    def latency(self, step: CollectiveStep) -> float:
        """Return the latency of a step: a lower bound of its time."""
        if (found := self._latencies.get((step.kind, step.axes))) is None:
            mesh = self.problem.mesh
            found = step.forms(mesh)[0].latency if step.communicates(mesh) else 0.0
            self._latencies[step.kind, step.axes] = found
        return found

    def bound(self, source: Layout, target: Layout) -> float:
        """Return a lower bound of the time of any plan between two layouts."""
        p = self.problem
        return seconds_bound(p.mesh, p.shape, source, target, self.itemsize)

    def latency_bound(self, source: Layout, target: Layout) -> float:
        """Return a lower bound of its latencies."""
        return latency_bound(self.problem.mesh, source, target)
