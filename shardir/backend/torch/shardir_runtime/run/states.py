"""The parameters and states of a program on one rank: their shards and current layouts."""

import math
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..collectives.broadcast import from_rank_0
from ..collectives.host import move_to
from ..collectives.mesh import Mesh
from ..collectives.reductions import all_reduce
from ..collectives.shards import gather_global, local_bounds
from ..data.files import read_part
from ..ops import random
from ..plan.arrays import DividedArray, FileArray
from ..plan.program import STAGE, PlanArgument, PlanError, PlanValue, ProgramPlan

DTYPES = {
    "f32": torch.float32,
    "f64": torch.float64,
    "bf16": torch.bfloat16,
    "f16": torch.float16,
    "i64": torch.int64,
    "i32": torch.int32,
    "i1": torch.bool,
}

CONVERTED = {
    "i32": (torch.uint8, torch.int8, torch.int16),
    "i64": (torch.uint8, torch.int8, torch.int16, torch.int32),
}
"""The dtypes that an input of a type takes too, as all their values fit."""


class States:
    """The parameters and states, by their keys.

    Args:
        seed: of the initial values.
        broadcasts: whether rank 0 makes all initial values and sends them to all ranks.
    """

    def __init__(self, plan: ProgramPlan, mesh: Mesh, seed: int, broadcasts: bool = False):
        self.plan, self.mesh, self.seed = plan, mesh, seed
        self.broadcasts = broadcasts and mesh.size > 1
        self.values: dict[str, Tensor] = {}
        self.types: dict[str, PlanValue] = {}
        """The types of all states; a layout changes with the function that made the state."""
        self.places: dict[str, tuple[int, ...]] = {
            a.key: a.at for f in plan.functions for a in f.args
            if a.role != "input" and a.at is not None
        }  # fmt: skip
        """The positions of the stages that have a state, if not all have it."""
        self.initialize()

    def initialize(self) -> None:
        """Give all states their initial values."""
        self.values.clear()
        self.types.clear()
        retained = [a for f in self.plan.functions for a in f.args if a.role != "input"]
        # The copies come last.
        for arg in sorted(retained, key=lambda arg: arg.copies is not None):
            if arg.key not in self.types:
                self.types[arg.key] = arg
                is_here = self.is_here(arg.key)
                takes_part = self.broadcasts and arg.copies is None  # as all ranks do
                x = self.filled(arg) if is_here or takes_part else None
                if is_here and x is not None:
                    self.values[arg.key] = x

    def is_here(self, key: str, rank: int | None = None) -> bool:
        """Whether a rank, by default this one, has a state."""
        return self.is_among(self.places.get(key), rank)

    def is_among(self, places: Sequence[int] | None, rank: int | None = None) -> bool:
        """Whether a rank, by default this one, has one of these positions along the axis of stages;
        None for all positions."""
        if places is None or STAGE not in self.mesh.axes:
            return True
        if rank is None:
            return self.mesh.index((STAGE,)) in places
        return self.mesh.members((STAGE,), rank).index(rank) in places

    def bounds(self, value: PlanValue) -> list[tuple[int, int]]:
        """Return the range [start, stop) of each dimension of this rank's shard."""
        return local_bounds(self.mesh, value.shape, value.dims)

    def gathered(self, x: Tensor, value: PlanValue, partial: Any = None) -> Tensor:
        """Return the global value of shards, on every rank."""
        x = x.to(self.mesh.device)
        return gather_global(self.mesh, x, value.dims, partial, value.shape)

    def state(self, key: str) -> Tensor:
        """Return the global value of a state, on every rank."""
        return self.gathered(self._everywhere(key), self.types[key])

    def _everywhere(self, key: str) -> Tensor:
        """Return this rank's shard of a state, even if only other stages have the state."""
        if self.places.get(key) is None or STAGE not in self.mesh.axes:
            return self.values[key]
        type, first = self.types[key], self.mesh.index((STAGE,)) == self.places[key][0]
        shape = [stop - start for start, stop in self.bounds(type)]
        empty = torch.zeros(shape, dtype=DTYPES[type.dtype], device=self.mesh.device)
        x = self.values[key].to(self.mesh.device, copy=True) if first else empty
        return all_reduce(self.mesh, x, "sum", (STAGE,))

    def shard(self, arg: PlanArgument) -> Tensor | None:
        """Return a state in the layout that a function expects, usually its current one; None if
        only other stages need it."""
        if arg.at is not None and not self.is_here(arg.key):
            return None
        if self.types[arg.key].dims == arg.dims and (arg.at or arg.key not in self.places):
            x = self.values[arg.key]
        elif self.types[arg.key].dims == arg.dims:
            x = self._everywhere(arg.key)
        else:
            x = part(self.state(arg.key), self.bounds(arg)).contiguous()
        return move_to(self.mesh, x, arg.host)

    def shard_of(self, arg: PlanArgument, x: Tensor, local: bool = False) -> Tensor:
        """Return this rank's shard of a global input, whose microbatches may be concatenated.

        Args:
            local: whether x is this rank's shard.

        Raises:
            PlanError: the input has another shape or dtype.
        """
        bounds = self.bounds(arg)
        if local:
            x = checked_input(arg, x, tuple(b - a for a, b in bounds), self.mesh.rank)
        else:
            x = part(checked_input(arg, x, arg.shape), bounds)
        x = x.contiguous()
        return move_to(self.mesh, x, arg.host)

    def norm(self, keys: Iterable[str]) -> float:
        """Return the norm of all elements of states. All ranks call it."""
        mesh, total = self.mesh, torch.zeros((), dtype=torch.float64)
        for key in keys:
            shards = mesh.count(tuple(axis for dim in self.types[key].dims for axis in dim))
            square = self.values[key].double().square().sum()
            total = total.to(square.device) + square * shards / mesh.size  # each element once
        total = total.to(mesh.device)
        if mesh.size > 1:
            total = all_reduce(mesh, total, "sum", tuple(mesh.axes))
        return math.sqrt(total)

    def put(self, arg: PlanArgument, x: Tensor) -> None:
        """Set a state to a global value, converted to its type."""
        self.types[arg.key] = arg
        if not self.is_here(arg.key):
            return
        shard = part(x.detach(), self.bounds(arg))
        shard = shard.to(dtype=DTYPES[arg.dtype], copy=True).contiguous()
        self.values[arg.key] = move_to(self.mesh, shard, arg.host)
        for copy in {a.key: a for f in self.plan.functions for a in f.args}.values():
            if copy.role != "input" and copy.init == {"kind": "copy", "of": arg.key}:
                shard = self._copy_state(copy, self.bounds(copy))
                self.values[copy.key], self.types[copy.key] = shard, copy

    def filled(self, arg: PlanArgument) -> Tensor:
        """Return this rank's shard of an initial value, which does not depend on the mesh."""
        bounds = self.bounds(arg)
        if arg.copies is not None:
            return self._copy_state(arg, bounds)
        if self.broadcasts:
            shape, dtype = arg.shape, DTYPES[arg.dtype]
            x = from_rank_0(self.mesh, shape, dtype, bounds, partial(self._initial, arg))
        else:
            x = self._initial(arg, bounds)
        return move_to(self.mesh, x, arg.host)

    def _initial(self, arg: PlanArgument, bounds: list[tuple[int, int]]) -> Tensor:
        """Return a part of an initial value, in host memory."""
        dtype = DTYPES[arg.dtype]
        if isinstance(arg.source, FileArray | DividedArray):
            return read_part(arg.source, bounds).to(dtype)
        key = f"{self.seed}/{arg.key}"
        return random.fill(arg.init["kind"], arg.init, arg.shape, bounds, key, dtype)

    def _copy_state(self, arg: PlanArgument, bounds: list[tuple[int, int]]) -> Tensor:
        """Return this rank's shard of a state that begins as a copy of another."""
        of = arg.init["of"]
        more = len(arg.shape) - len(self.types[of].shape)
        x = self.values[of]
        if self.types[of].dims != arg.dims[more:]:
            x = part(self.state(of), bounds[more:])
        shape = [stop - start for start, stop in bounds]
        x = x.to(DTYPES[arg.dtype]).expand(shape).clone(memory_format=torch.contiguous_format)
        return move_to(self.mesh, x, arg.host)


def checked_input(
    arg: PlanArgument, x: Tensor, shape: tuple[int, ...], rank: int | None = None
) -> Tensor:
    """Return an input of a shape, whose microbatches may be concatenated.

    Args:
        rank: the rank whose shard it is; None for a global input.

    Raises:
        PlanError: it has another shape or dtype.
    """
    found, dtype = arg.batches_of(x, shape), DTYPES[arg.dtype]
    if found.dtype in CONVERTED.get(arg.dtype, ()):
        found = found.to(dtype)
    if tuple(found.shape) != shape or found.dtype != dtype:
        where = "" if rank is None else f" on rank {rank}"
        fix, wanted = f"use .to({dtype})", [*shape]
        if tuple(found.shape) != shape:
            fix = "shapes are those of the program: leave out a short batch, or pad it"
            if arg.microbatches:
                wanted = [shape[0] * shape[1], *shape[2:]]
                fix = f"{fix}; its rows are those of {shape[0]} microbatches of {shape[1]}"
        raise PlanError(
            f"expected {arg.name} of {wanted} and {dtype}{where}, got {list(x.shape)} and "
            f"{x.dtype}; {fix}"
        )
    return found


def part(x: Tensor, bounds: Iterable[tuple[int, int]]) -> Tensor:
    """Return a view of the range [start, stop) of each dimension."""
    for dim, (start, stop) in enumerate(bounds):
        x = x.narrow(dim, start, stop - start)
    return x
