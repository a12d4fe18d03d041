"""The arena of an emitted program: one block of memory, allocated at the first call, where values
of its functions have slots at the offsets of plan.json.

    "arena": {"bytes": 4096, "others": 20, "check": false, "functions": {"step": {"h": {
        "dtype": "f32", "bytes": 1024, "each_run": false, "offsets": [0], "live": [[3, 7]]}, ...}}}

`others`: the peak bytes of values outside the arena. `each_run`: whether a slot has an offset for
each run of the loop that makes its value. `live`: for each offset, the first and the last op of a
call that need the slot. `g.0`, `g.1` and `g.buffers` are the slots of the results and buffers of a
collective. `check`: whether a dead slot is overwritten by NaN, or the largest integer, before the
next op that has a slot.
"""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .collectives.buffers import ALIGNMENT, CollectiveMemory, Memory
from .plan.fields import Field
from .run.states import DTYPES

BUFFERS = "buffers"


class ArenaSlot:
    """The memory of a value in each run."""

    def __init__(self, block: Tensor, field: Field):
        self.bytes = field.get("bytes", int).value
        self.dtype = DTYPES[field.get("dtype").one_of(DTYPES)]
        self.each_run = field.get("each_run", bool).value
        self.live = [span.ints(0) for span in field.get("live").items()]
        offsets = field.get("offsets").ints(0)
        if self.bytes < 0:
            raise field.fail(f"expected at least 0 bytes, got {self.bytes}")
        for i in offsets:
            if i % ALIGNMENT or i + self.bytes > block.numel():
                raise field.fail(
                    f"expected {self.bytes} bytes at a multiple of {ALIGNMENT} in an arena of "
                    f"{block.numel()}, got offset {i}"
                )
        if len(self.live) != len(offsets) or not offsets:
            raise field.fail(f"expected {len(self.live)} offsets, got {len(offsets)}")
        self.memory = [block[i : i + self.bytes] for i in offsets]

    def tensors(self) -> list[Tensor]:
        """Return for each run a tensor without elements, which torch resizes within its memory."""
        return [x.view(self.dtype)[:0] for x in self.memory]

    def spoil(self, run: int) -> None:
        """Overwrite the memory of a run."""
        values = self.memory[run].view(self.dtype)
        if values.is_floating_point():
            values.fill_(float("nan"))
        else:
            values.fill_(1 if self.dtype == torch.bool else torch.iinfo(self.dtype).max)


class Slots:
    """The slots of a function as attributes: a tensor or the memory of a collective; of a slot with
    `each_run`, a list of them."""

    def __init__(self, values: dict[str, dict[str, ArenaSlot]], field: Field):
        self.__field = field
        for name, parts in values.items():
            runs = _memory_of_runs(parts)
            setattr(self, name, runs if _each_run(parts) else runs[0])

    def __getattr__(self, name: str) -> Any:
        raise self.__field.fail(f"expected a slot {name}, got none")


def _memory_of_runs(parts: dict[str, ArenaSlot]) -> list[Any]:
    """Return for each run the tensor of a value, or the memory of a collective from its parts."""
    if "" in parts:
        return parts[""].tensors()
    runs = []
    for blocks in zip(*(slot.memory for slot in parts.values()), strict=True):
        memory = {part: Memory(block) for part, block in zip(parts, blocks, strict=True)}
        buffers = memory.pop(BUFFERS, None)
        runs.append(CollectiveMemory({int(i): x for i, x in memory.items()}, buffers))
    return runs


def _each_run(parts: dict[str, ArenaSlot]) -> bool:
    return any(slot.each_run for slot in parts.values())


class CheckedSlots:
    """The slots of a function as attributes, with a check: reading a slot overwrites dead slots."""

    def __init__(self, values: dict[str, dict[str, ArenaSlot]]):
        self._values = values
        self._runs = {name: _memory_of_runs(parts) for name, parts in values.items()}
        self._live: list[tuple[ArenaSlot, int]] = []

    def __getattr__(self, name: str) -> Any:
        each = EachRun(self, name)
        return each if _each_run(self._values[name]) else each[0]

    def begin(self, name: str, run: int) -> Any:
        """Return the memory of a slot, whose life begins."""
        parts, out = self._values[name].values(), self._runs[name][run]
        now = min(slot.live[run][0] for slot in parts)
        for slot, k in [*self._live]:
            first, last = slot.live[k]
            if last < now or first > now:  # the latter: of the previous call or microbatch
                slot.spoil(k)
                self._live.remove((slot, k))
        self._live += [(slot, run) for slot in parts]
        if isinstance(out, Tensor) and out.nbytes > (most := sum(slot.bytes for slot in parts)):
            raise ValueError(f"expected at most {most} bytes of {name}, got {out.nbytes}")
        return out


class EachRun:
    """The memory of a slot with `each_run`."""

    def __init__(self, slots: CheckedSlots, name: str):
        self._slots, self._name = slots, name

    def __getitem__(self, run: int) -> Any:
        return self._slots.begin(self._name, run)


class Arena:
    """The arena of the program in a file."""

    def __init__(self, program: str):
        self._plan = Path(program).with_name("plan.json")
        self._functions: dict[str, Slots | CheckedSlots] = {}
        self._block: Tensor | None = None

    def slots(self, mesh: Any, function: str) -> Slots | CheckedSlots:
        """Return the slots of a function."""
        if function not in self._functions:
            with torch.inference_mode(False):  # calls outside that mode write into it too
                self._functions[function] = self._allocate(mesh, function)
        return self._functions[function]

    def _allocate(self, mesh: Any, function: str) -> Slots | CheckedSlots:
        top = Field(json.loads(self._plan.read_text(encoding="utf-8")), "").get("arena", dict)
        if self._block is None:
            size = top.get("bytes", int)
            if size.value < 0:
                raise size.fail(f"expected at least 0, got {size.value}")
            self._block = torch.empty(size.value, dtype=torch.uint8, device=mesh.device)
        field = top.get("functions", dict).get(function, dict)
        values: dict[str, dict[str, ArenaSlot]] = {}
        for name in field.value:
            value, _, part = name.partition(".")
            values.setdefault(value, {})[part] = ArenaSlot(self._block, field.get(name, dict))
        checks = top.get("check", bool, default=False).value
        return CheckedSlots(values) if checks else Slots(values, field)
