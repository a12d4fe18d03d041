"""How long ops take together: what is started goes on while the device calculates.

A device does its ops one after the other. A collective of s seconds, of which its messages wait for
a (its form's latency), occupies the links of the outermost level that it crosses: those that cross
the same links go one behind the other. One that is `async` lets the device go on, which loses
`interference` of s - a (of cores, caches and memory that both want), and a `dist.wait` ends when it
does:

    start   end = links free = max(now, links free) + s;  now += interference * (s - a)
    wait    now = max(now, end)

So a collective and a calculation of c seconds beside it take max(s, interference * (s - a) + c).
"""

from collections.abc import Iterable, Sequence

import numpy as np
from xdsl.ir import Operation

from shardir.algebra.cluster import Cluster
from shardir.algebra.forms import levels_of
from shardir.algebra.mesh import Axes, Mesh
from shardir.cost.seconds import OpCost
from shardir.dialects import dist

LESS = 1 - 1e-9
"""What is less by rounding alone is no less."""


def elapsed(costs: Iterable[OpCost], mesh: Mesh) -> float:
    """The seconds from the first op, in the order of the program, to the end of the last."""
    now, free, ends = 0.0, dict[str, float](), dict[Operation, float]()
    for c in costs:
        if isinstance(c.op, dist.WaitOp):
            now = max(now, ends.get(c.op.started, now))  # none where a group is one device
        elif c.communicates:
            name = level_of(mesh, c.axes)
            end = max(now, free.get(name, 0.0)) + c.seconds
            if dist.is_started(c.op):
                ends[c.op] = end
                now += mesh.cluster_or_default.interference * (c.seconds - c.latency)
            else:
                now = end
            free[name] = end
        else:
            now += c.seconds
    return max((now, *free.values()))


def level_of(mesh: Mesh, axes: Axes) -> str:
    """The level of the cluster, by its name, whose links a group over `axes` shares."""
    levels = levels_of(mesh, axes)
    return levels[-1][1].name if levels else ""


def cuts(
    sending: Sequence[float], ready: Sequence[float], latency: float, on: Cluster
) -> list[int]:
    """Where to cut a buffer, so that the last of it arrives the soonest: behind so many values, the
    last number being that of all. Each part starts when its last value is there; it costs a latency
    and an op's overhead.

    Args:
        sending: the seconds of the bytes of each value.
        ready: when each is there, ascending, if the device does not lose time to what is started.
    """
    sent = np.concatenate([[0.0], np.cumsum(sending)])
    seconds = latency + sent[None, :] - sent[:, None]  # [i, j]: the values from i up to j
    seconds[np.tri(len(sent), dtype=bool)] = np.inf
    late = on.interference * sent
    begin = np.concatenate([[0.0], ready])[None, :] + late[:, None]
    ends = np.where(np.arange(len(sent)) > 0, np.inf, 0.0)  # of so many values, in k parts
    least = (begin + seconds)[:, -1].min()  # if the links were free
    best, count, before = np.inf, 0, list[np.ndarray]()
    while len(before) < len(sending) and least + len(before) * on.overhead < best * LESS:
        after = np.maximum(ends[:, None], begin) + seconds
        ends, cost = after.min(0), after[:, -1].min() + len(before) * on.overhead
        before.append(after.argmin(0))
        if cost < best * LESS:
            best, count = cost, len(before)
    found = [len(sending)]
    for previous in reversed(before[1:count]):
        found.append(int(previous[found[-1]]))
    return found[::-1]
