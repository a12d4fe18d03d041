"""The runtime of an emitted program: the mesh, shards, and collectives on local tensors.

A program calls it like this:

    from shardir_runtime import runtime as rt
    y = rt.all_reduce(rt_mesh, y, "sum", ("tp",))

* An axis is the name of a mesh axis, or `(name, pre, size)`: the middle part of the axis seen as
  [pre, size, rest], major to minor. Axes are a tuple, major to minor.
* A group has the ranks that differ only in its axes, in row-major order of the axes as listed; a
  `root`, `source` or `target` is a position in that order.
* A dimension of size N over n ranks has shards of c = ceil(N / n): rank k holds the elements
  [min(k*c, N), min((k+1)*c, N)). The last shards may be short or empty, in every collective.
* A result may be an argument, or a view of it. Only `donate=True` writes into one.
* With `wait=False` a collective is only started, and returns a `buffers.Pending`; its arguments
  must not change before its `wait()`.
* A group of one rank never communicates.
"""

import sys
from collections.abc import Callable
from pathlib import Path

from .collectives import position
from .collectives.gathers import all_gather, all_to_all
from .collectives.host import copy
from .collectives.mesh import Axes, Group, Mesh, bounds
from .collectives.reductions import all_reduce, reduce_scatter
from .collectives.rings import gathered_product, scattered_product
from .collectives.shards import all_slice, gather_global, local_bounds
from .collectives.transfers import broadcast, gather, permute, recv, scatter, send
from .plan.axes import Sized
from .run.main import main as run_program

__all__ = [
    "Axes",
    "Group",
    "Mesh",
    "Sized",
    "all_gather",
    "all_reduce",
    "all_slice",
    "all_to_all",
    "bounds",
    "broadcast",
    "copy",
    "gather",
    "gather_global",
    "gathered_product",
    "local_bounds",
    "main",
    "permute",
    "recv",
    "reduce_scatter",
    "scatter",
    "scattered_product",
    "send",
]


def main(functions: dict[str, Callable], single: bool = False) -> None:
    """Run the functions of the plan.json beside the program (run/main.py); `single`: on one device,
    unsplit."""
    program = sys._getframe(1).f_code.co_filename
    position.attach(program)
    run_program(Path(program).absolute().parent, functions, single)
