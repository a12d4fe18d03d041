"""One rank of the step benchmark: `step_rank.py PROGRAM OUT DP TP HIDDEN ROUNDS`, as step.py starts
it."""

import json
import logging
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from shardir.backend.torch.shardir_runtime import runtime as rt
from shardir.backend.torch.shardir_runtime.compat import TorchDispatchMode
from shardir.backend.torch.shardir_runtime.plan.program import load_plan
from shardir.backend.torch.shardir_runtime.run.events import Events
from shardir.backend.torch.shardir_runtime.run.main import Runner
from shardir.backend.torch.shardir_runtime.run.program_module import program_module

BATCH, SEQ, HEADS, LAYERS, LR = 8, 64, 8, 2, 0.1
STEPS = 5
GATHERING = {"all_gather_into_tensor", "_allgather_base_", "allgather_"}
COLLECTIVES = GATHERING | {
    "all_reduce", "allreduce_", "reduce_scatter_tensor", "_reduce_scatter_base_",
    "reduce_scatter_", "all_to_all_single", "alltoall_base_", "alltoall_", "broadcast_",
    "send", "recv_",
}  # fmt: skip

Tensors = dict[str, torch.Tensor]
Variant = tuple[Callable[[], torch.Tensor], Callable[[torch.Tensor], float]]
"""A step that returns its loss, and the conversion of that to a float."""


class Count(TorchDispatchMode):
    """Counts collectives, and the bytes of the larger side of each."""

    def __init__(self) -> None:
        super().__init__()
        self.collectives = self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        from torch.distributed.tensor import DTensor

        if any(t is DTensor for t in types):
            return NotImplemented  # it is dispatched again, as ops on tensors
        name = func._schema.name.split("::")[1]
        if func.namespace in ("c10d", "_c10d_functional") and name in COLLECTIVES:
            out = func(*args, **(kwargs or {}))
            if name in ("send", "recv_"):
                self.collectives += name == "send"
            else:
                self.collectives += 1
            self.bytes += max(_bytes(args), _bytes(out) if name in GATHERING else 0)
            return out
        return func(*args, **(kwargs or {}))


def _bytes(x: Any) -> int:
    if isinstance(x, torch.Tensor):
        return x.numel() * x.element_size()
    if isinstance(x, list | tuple):
        return max((_bytes(v) for v in x), default=0)
    return 0


# ---- the program in PyTorch, for one device and for the hand-written ranks ----


class Forward:
    """The transformer on given parameters; `enter` and `leave` surround what tp splits."""

    def __init__(self, w: Tensors, enter: Callable[..., Any], leave: Callable[..., Any]):
        self.w, self.enter, self.leave = w, enter, leave

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        w, hidden = self.w, x.shape[-1]
        causal = torch.ones(SEQ, SEQ, dtype=torch.bool).tril()
        for i in range(LAYERS):
            p = partial("l{}_{}".format, i)
            n = self.enter(F.layer_norm(x, (hidden,), w[p("ln1_w")], w[p("ln1_b")]))
            q, k, v = (
                (n @ w[p(f"w{c}")]).view(*n.shape[:2], -1, hidden // HEADS).transpose(1, 2)
                for c in "qkv"
            )
            s = (q @ k.mT * (hidden // HEADS) ** -0.5).masked_fill(~causal, -1e9)
            a = (s.softmax(-1) @ v).transpose(1, 2).flatten(2)
            x = x + self.leave(a @ w[p("wo")])
            n = self.enter(F.layer_norm(x, (hidden,), w[p("ln2_w")], w[p("ln2_b")]))
            h = F.gelu(n @ w[p("fc1")] + w[p("b1")], approximate="tanh")
            x = x + self.leave(h @ w[p("fc2")]) + w[p("b2")]
        return F.layer_norm(x, (hidden,), w["lnf_w"], w["lnf_b"])


def _same(x: Any) -> Any:
    return x


class _Enter(torch.autograd.Function):
    """Megatron's f: the identity, and an all-reduce of the cotangent."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        d = grads[0].contiguous()
        dist.all_reduce(d, group=ctx.group)
        return d, None


class _Leave(torch.autograd.Function):
    """Megatron's g: an all-reduce, and the identity for the cotangent."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[0], None


def _update(parameters: list[torch.Tensor], gradients: list[torch.Tensor]) -> None:
    with torch.no_grad():
        for w, g in zip(parameters, gradients, strict=True):
            w.sub_(g, alpha=LR)


def single(w: Tensors, x: torch.Tensor, y: torch.Tensor) -> Variant:
    """The global batch in one process: the reference of every loss."""
    parameters = [p.requires_grad_() for p in w.values()]
    forward = Forward(w, _same, _same)

    def step() -> torch.Tensor:
        loss = ((forward(x) - y) ** 2).mean()
        _update(parameters, list(torch.autograd.grad(loss, parameters)))
        return loss.detach()

    return step, torch.Tensor.item


def hand(w: Tensors, x: torch.Tensor, y: torch.Tensor, mesh: Any) -> Variant:
    """Megatron by hand: two all-reduces per layer forward and backward, one of all gradients."""
    dp, tp = mesh.get_group("dp"), mesh.get_group("tp")
    parameters = [p.requires_grad_() for p in w.values()]
    split = tp.size() > 1
    enter = (lambda v: _Enter.apply(v, tp)) if split else _same
    leave = (lambda v: _Leave.apply(v, tp)) if split else _same
    forward = Forward(w, enter, leave)
    count = x.numel() * dp.size()

    def step() -> torch.Tensor:
        loss = ((forward(x) - y) ** 2).sum() / count
        gradients = list(torch.autograd.grad(loss, parameters))
        if dp.size() > 1:
            flat = torch.cat([g.flatten() for g in gradients])
            dist.all_reduce(flat, group=dp)
            parts = flat.split([g.numel() for g in gradients])
            gradients = [p.view_as(g) for p, g in zip(parts, gradients, strict=True)]
        _update(parameters, gradients)
        return loss.detach()

    def number(loss: torch.Tensor) -> float:
        total = loss.clone()
        dist.all_reduce(total, group=dp)
        return total.item()

    return step, number


def dtensor(w: Tensors, x: torch.Tensor, y: torch.Tensor, mesh: Any, plan: Any) -> Variant:
    """Every parameter and input is a DTensor, placed as annotated in the program; eager."""
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    def spread(t: torch.Tensor, dims: list[Any]) -> torch.Tensor:
        placements: list[Any] = [Replicate(), Replicate()]
        for d, axes in enumerate(dims):
            for axis in axes:
                name = axis if isinstance(axis, str) else axis[0]
                placements[("dp", "tp").index(name)] = Shard(d)
        return distribute_tensor(t, mesh, placements, src_data_rank=None)

    args = {a["key"] if a["role"] != "input" else a["name"]: a for a in plan}
    weights = {k: spread(v, args[k]["dims"]).detach().requires_grad_() for k, v in w.items()}
    xs, ys = spread(x, args["x"]["dims"]), spread(y, args["target"]["dims"])
    parameters: list[Any] = list(weights.values())
    everywhere: list[Any] = [Replicate(), Replicate()]
    mask = torch.ones(SEQ, SEQ, dtype=torch.bool).triu(1)
    low = DTensor.from_local(
        torch.zeros(mask.shape).masked_fill(mask, -1e9), mesh, everywhere, run_check=False
    )

    def forward(x: Any) -> Any:
        hidden = x.shape[-1]
        for i in range(LAYERS):
            p = partial("l{}_{}".format, i)
            n = F.layer_norm(x, (hidden,), weights[p("ln1_w")], weights[p("ln1_b")])
            q, k, v = (
                (n @ weights[p(f"w{c}")]).view(BATCH, SEQ, HEADS, -1).transpose(1, 2) for c in "qkv"
            )
            s = q @ k.transpose(-1, -2) * (hidden // HEADS) ** -0.5 + low
            a = (s.softmax(-1) @ v).transpose(1, 2).flatten(2)
            x = x + a @ weights[p("wo")]
            n = F.layer_norm(x, (hidden,), weights[p("ln2_w")], weights[p("ln2_b")])
            h = F.gelu(n @ weights[p("fc1")] + weights[p("b1")], approximate="tanh")
            x = x + h @ weights[p("fc2")] + weights[p("b2")]
        return F.layer_norm(x, (hidden,), weights["lnf_w"], weights["lnf_b"])

    def step() -> torch.Tensor:
        loss = ((forward(xs) - ys) ** 2).mean()
        gradients: Any = torch.autograd.grad(loss, parameters)
        with torch.no_grad():  # a partial gradient would otherwise be reduced inside the update
            reduced: list[Any] = [
                g.redistribute(placements=p.placements)
                for g, p in zip(gradients, parameters, strict=True)
            ]
        _update(parameters, reduced)
        return loss.detach()

    def number(loss: Any) -> float:
        return loss.full_tensor().item()

    return step, number


# ---- the emitted program ----


class Emitted:
    """The emitted program."""

    def __init__(self, program: Path):
        emitted, plan = program_module(program), load_plan(program)
        self.rt, self.rank = rt, dist.get_rank()
        self.mesh = rt.Mesh(plan.axes, self.rank, "cpu")
        for axes in plan.groups:
            self.mesh.group(axes)
        events = Events(self.rank)
        functions = {f.name: getattr(emitted, f.name) for f in plan.functions}
        self.runner = Runner(plan, self.mesh, functions, 0, events)
        self.function = plan.functions[0]

    def copies(self) -> tuple[Tensors, Tensors, Tensors]:
        """Return copies of global parameters, of this rank's parameters and of its inputs."""
        kept = self.runner.states
        states = {k: v.clone() for k, v in kept.values.items()}
        everywhere = {k: kept.state(k) for k in states}
        names = [arg.name for arg in self.function.args if arg.role == "input"]
        made = [x.clone() for x in self.runner.inputs[self.function.name].at(0)]
        inputs = dict(zip(names, made, strict=True))
        return everywhere, states, inputs

    def variant(self) -> Variant:
        def step() -> torch.Tensor:
            with torch.no_grad():
                return self.runner.at_step(self.function, 0)[0]

        return step, torch.Tensor.item


def main() -> None:
    program, out, dp, tp, hidden, rounds = sys.argv[1:]
    logging.getLogger("torch").setLevel(logging.ERROR)  # DTensor warns of its fallbacks
    torch.set_num_threads(1)
    if hasattr(os, "SCHED_BATCH"):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    dist.init_process_group("gloo")
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (int(dp), int(tp)), mesh_dim_names=("dp", "tp"))
    emitted = Emitted(Path(program))
    weights, mine, inputs = emitted.copies()
    plan = json.loads((Path(program) / "plan.json").read_text())
    args = plan["functions"]["step"]["args"]
    full = {
        a["name"]: emitted.rt.gather_global(
            emitted.mesh, inputs[a["name"]], emitted.function.args[i].dims, None, a["shape"]
        )
        for i, a in enumerate(args)
        if a["role"] == "input"
    }

    def copies(tensors: Tensors) -> Tensors:
        return {k: v.clone() for k, v in tensors.items()}

    assert all(v.shape[-1] == int(hidden) for v in full.values())
    x, y = full["x"], full["target"]
    reference, number = single(copies(weights), x, y)
    expected = [number(reference()) for _ in range(3)]
    variants: dict[str, Variant] = {
        "hand": hand(copies(mine), inputs["x"], inputs["target"], mesh),
        "shardir": emitted.variant(),
        "dtensor": dtensor(copies(weights), x, y, mesh, args),
    }
    found: dict[str, Any] = {}
    for name, (step, number) in variants.items():
        losses = [number(step()) for _ in expected]
        error = max(abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True))
        with Count() as count:
            step()
        found[name] = {
            "ms": [], "collectives": count.collectives, "bytes": count.bytes, "loss_error": error
        }  # fmt: skip
    for _ in range(int(rounds)):
        for name, (step, _number) in variants.items():
            for _ in range(STEPS):
                dist.barrier()
                start = time.perf_counter()
                step()
                slowest = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
                dist.all_reduce(slowest, dist.ReduceOp.MAX)
                found[name]["ms"].append(slowest.item() * 1e3)
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
