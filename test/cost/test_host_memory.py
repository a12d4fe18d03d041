"""Memory of devices and of hosts: the model against what lives while torch runs the emitted
program, with device tensors on torch's `meta` device; and by how much the peak of a device falls.
"""

import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.emitted import functions_of
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from xdsl.dialects.builtin import ModuleOp, TensorType

import shardir
from shardir.backend.torch.emit.program import program_text
from shardir.backend.torch.shardir_runtime import runtime as rt
from shardir.cost import memory_of, report
from shardir.cost.functions import functions
from shardir.dialects.dist import layout_of

STEP = """dist.mesh @m <d = 1>
func.func private @loss(
    %x: tensor<8x16xf32> {{train.input = #train.init<normal>}},
    %w: tensor<16x{n}xf32> {{train.parameter = "w", train.init = #train.init<normal>}},
    %v: tensor<{n}x16xf32> {{train.parameter = "v", train.init = #train.init<normal>}}
) -> tensor<f32> {{
  %y = nn.matmul %x, %w : (tensor<8x16xf32>, tensor<16x{n}xf32>) -> tensor<8x{n}xf32>
  %t = nn.tanh %y : (tensor<8x{n}xf32>) -> tensor<8x{n}xf32>
  %z = nn.matmul %t, %v : (tensor<8x{n}xf32>, tensor<{n}x16xf32>) -> tensor<8x16xf32>
  %s = nn.reduce <sum> %z dims <0, 1> : (tensor<8x16xf32>) -> tensor<f32>
  func.return %s : tensor<f32>
}}
train.step @step of @loss <{optimizer}>
"""
MOMENTUM, SGD = "momentum, lr = 0.1, momentum = 0.9", "sgd, lr = 0.1"
LITERAL = 8
"""The bytes of the learning rate, which is a literal in the program."""
DEVICE = '"*" : []'


def compiled(plan: str, n: int, optimizer: str = MOMENTUM) -> ModuleOp:
    return shardir.compile(STEP.format(n=n, optimizer=optimizer), "train", plan=plan).module


class Alive(TorchDispatchMode):
    """The maximum bytes in storages of living tensors, by device; every op is on one of them."""

    def __init__(self, tensors: list[torch.Tensor]):
        super().__init__()
        self.alive = [weakref.ref(t) for t in tensors]
        self.peaks = {"cpu": 0, "meta": 0}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        assert len({t.device.type for t in given}) <= 1 or "copy" in str(func), func
        out = func(*args, **(kwargs or {}))
        self.note([t for t in tree_leaves(out) if isinstance(t, torch.Tensor)])
        return out

    def note(self, new: list[torch.Tensor]) -> None:
        self.alive = [r for r in (*self.alive, *map(weakref.ref, new)) if r() is not None]
        storages = {}
        for t in (r() for r in self.alive):
            if t is not None:
                storage = t.untyped_storage()
                storages[storage._cdata] = t.device.type, storage.nbytes()
        for device in self.peaks:
            now = sum(size for at, size in storages.values() if at == device)
            self.peaks[device] = max(self.peaks[device], now)


class Copying:
    """A copy in progress, which holds its source."""

    def __init__(self, x: torch.Tensor, out: torch.Tensor):
        self.held = x, out

    def wait(self) -> torch.Tensor:
        _, out = self.held
        del self.held
        return out


def copied(mesh: Any, x: Any, to: str, into: Any = None, wait: bool = True) -> Any:
    """rt.copy where the device is `meta`, from which torch copies nothing."""
    device = "cpu" if to == "host" else "meta"
    out = torch.empty(x.shape, dtype=x.dtype, device=device) if into is None else into
    assert out.device.type == device
    return out if wait else Copying(x, out)


def measured(module: ModuleOp, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """The peaks of one call of the step, its arguments included."""
    monkeypatch.setattr(rt, "copy", copied)
    space = functions_of(program_text(module))
    f, _ = next(functions(module))
    given = []
    for a in f.body.block.args:
        layout = layout_of(a)
        assert isinstance(a.type, TensorType) and layout is not None
        device = "cpu" if layout.host else "meta"
        given.append(torch.zeros(a.type.get_shape(), device=device))
    mode = Alive(given)
    with mode:
        assert space["step"](SimpleNamespace(device="meta"), *given) is not None
    return mode.peaks


PLANS = ['"*" : [], states [] on host', '"*" : [] on host', '"w" : [] on host\n"v" : []']


@pytest.mark.parametrize("n", [1, 200])
@pytest.mark.parametrize("plan", [DEVICE, *PLANS])
@pytest.mark.parametrize("optimizer", [MOMENTUM, SGD])
def test_both_memories_are_what_torch_needs(
    optimizer: str, plan: str, n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = compiled(plan, n, optimizer)
    use = memory_of(*next(functions(module)))
    peaks = measured(module, monkeypatch)
    assert use.peak == peaks["meta"]
    assert use.host - peaks["cpu"] in (0, LITERAL)
    assert sum(use.parts.values()) == use.peak


def test_the_peak_of_a_device_falls_by_what_is_on_the_host() -> None:
    """P bytes of parameters and S of states: S less with states on the host, and with parameters
    there too all but the copies in use. The report has both memories."""
    n = 4000
    p = s = 2 * 4 * 16 * n
    assert "into=w" in program_text(compiled(PLANS[0], n))  # not a second parameter
    peaks = [memory_of(*next(functions(compiled(plan, n)))).peak for plan in (DEVICE, *PLANS[:2])]
    assert peaks[0] - peaks[1] == s
    assert peaks[0] - peaks[2] >= s + p // 2
    (cost,) = report(compiled(PLANS[0], n))
    assert "copies from and to hosts" in cost.table() and cost.memory.host >= s
    assert f"in the memory of its host: at most {cost.memory.host} B" in cost.table()
