"""The GPT of the ZeRO benchmark in torch, and its steps: FSDP2, DDP, ZeRO-1, and ZeRO-3 by hand."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

HEADS, LR = 8, 1e-3

# torch 2.13 has a new name for it; 2.11 has only the old one.
gather_into: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

Tensors = dict[str, torch.Tensor]
Step = Callable[[], torch.Tensor]


class Layer(nn.Module):
    def __init__(self, w: Tensors):
        super().__init__()
        self.w = nn.ParameterDict({name: nn.Parameter(v.clone()) for name, v in w.items()})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        w, hidden, seq = self.w, x.shape[-1], x.shape[-2]
        n = F.layer_norm(x, (hidden,), w["ln1_w"])
        q, k, v = ((n @ w[f"w{c}"]).view(*n.shape[:2], HEADS, -1).transpose(1, 2) for c in "qkv")
        causal = torch.ones(seq, seq, dtype=torch.bool).tril()
        s = (q @ k.mT * (hidden // HEADS) ** -0.5).masked_fill(~causal, -1e9)
        x = x + (s.softmax(-1) @ v).transpose(1, 2).flatten(2) @ w["wo"]
        n = F.layer_norm(x, (hidden,), w["ln2_w"])
        h = F.gelu(n @ w["fc1"] + w["b1"], approximate="tanh")
        return x + (h @ w["fc2"] + w["b2"])


class Gpt(nn.Module):
    """Parameters are copies of those of the emitted program, by their names."""

    def __init__(self, w: Tensors):
        super().__init__()
        count = sum(name.endswith("_ln1_w") for name in w)
        self.wte = nn.Parameter(w["wte"].clone())
        self.wpe = nn.Parameter(w["wpe"].clone())
        self.lnf_w = nn.Parameter(w["lnf_w"].clone())
        self.layers = nn.ModuleList(
            Layer({n[3:]: v for n, v in w.items() if n.startswith(f"l{i}_")}) for i in range(count)
        )

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = F.embedding(tokens, self.wte) + self.wpe
        for layer in self.layers:
            x = layer(x)
        x = F.layer_norm(x, x.shape[-1:], self.lnf_w)
        return F.cross_entropy((x @ self.wte.mT).flatten(0, 1), targets.flatten())


def _step(model: nn.Module, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> Step:
    def step() -> torch.Tensor:
        loss = model(x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def _adamw(parameters: Any) -> Any:
    return torch.optim.AdamW(parameters, lr=LR, fused=True)


def single(w: Tensors, x: torch.Tensor, y: torch.Tensor) -> Step:
    """The global batch in one process: the reference of every loss."""
    model = Gpt(w)
    return _step(model, _adamw(model.parameters()), x, y)


def fsdp2(w: Tensors, x: torch.Tensor, y: torch.Tensor, mesh: Any) -> Step:
    model = Gpt(w)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh, reshard_after_forward=True)
    return _step(model, _adamw(model.parameters()), x, y)


def ddp(w: Tensors, x: torch.Tensor, y: torch.Tensor, mesh: Any) -> Step:
    model = DistributedDataParallel(Gpt(w), gradient_as_bucket_view=True)
    return _step(model, _adamw(model.parameters()), x, y)


def zero1(w: Tensors, x: torch.Tensor, y: torch.Tensor, mesh: Any) -> Step:
    model = DistributedDataParallel(Gpt(w), gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), optimizer_class=torch.optim.AdamW, parameters_as_bucket_view=True,
        lr=LR, fused=True,
    )  # fmt: skip
    return _step(model, optimizer, x, y)


class Flat:
    """Parameters of a module in one buffer, of which a rank keeps its part; the gathered buffer has
    memory from `gather` to `free` only."""

    def __init__(self, parameters: list[nn.Parameter]):
        self.world, rank = dist.get_world_size(), dist.get_rank()
        size = sum(p.numel() for p in parameters)
        self.gathered = torch.zeros(-(-size // self.world) * self.world)
        self.gradient = torch.zeros_like(self.gathered)
        self.bytes = self.gathered.untyped_storage().nbytes()
        self.parameters, at = parameters, 0
        with torch.no_grad():
            for p in parameters:
                part = slice(at, at + p.numel())
                self.gathered[part].copy_(p.flatten())
                p.data, p.grad = self.gathered[part].view(p.shape), None
                at += p.numel()
        self.views = self.gradient[:size].split([p.numel() for p in parameters])
        self.shard = nn.Parameter(self.gathered.chunk(self.world)[rank].clone())
        self.shard.grad = torch.zeros_like(self.shard)
        self.free()
        self.gradient.untyped_storage().resize_(0)

    def gather(self) -> None:
        if self.gathered.untyped_storage().nbytes() == 0:
            self.gathered.untyped_storage().resize_(self.bytes)
            with torch.no_grad():
                gather_into(self.gathered, self.shard)

    def free(self) -> None:
        self.gathered.untyped_storage().resize_(0)

    def receive(self) -> None:
        """Make the gradients views of one buffer."""
        self.gradient.untyped_storage().resize_(self.bytes)
        self.gradient.zero_()
        for p, view in zip(self.parameters, self.views, strict=True):
            p.grad = view.view(p.shape)

    def reduce(self) -> None:
        """Reduce the gradients to this rank's part, and free the buffers. An all-to-all and a sum
        take less time on Gloo than its reduce-scatter."""
        received = torch.empty_like(self.gradient)
        dist.all_to_all_single(received, self.gradient)
        torch.mean(received.view(self.world, -1), 0, out=self.shard.grad)
        self.gradient.untyped_storage().resize_(0)
        self.free()


def hand(w: Tensors, x: torch.Tensor, y: torch.Tensor, mesh: Any) -> Step:
    """A buffer for each layer, gathered for its forward part and again for its backward part; one
    for the rest, gathered once."""
    model = Gpt(w)
    rest = Flat([model.wte, model.wpe, model.lnf_w])
    layers = [Flat([*layer.parameters()]) for layer in model.layers.children()]
    optimizer = _adamw([flat.shard for flat in (rest, *layers)])

    def hook(layer: nn.Module, flat: Flat) -> None:
        def before_backward(*_: Any) -> None:
            flat.gather()
            flat.receive()

        def after_forward(module: Any, args: Any, out: torch.Tensor) -> None:
            flat.free()
            out.register_hook(before_backward)

        layer.register_forward_pre_hook(lambda *_: flat.gather())
        layer.register_forward_hook(after_forward)
        layer.register_full_backward_hook(lambda *_: flat.reduce())

    for layer, flat in zip(model.layers, layers, strict=True):
        hook(layer, flat)

    def step() -> torch.Tensor:
        rest.gather()
        rest.receive()
        loss = model(x, y)
        loss.backward()
        rest.reduce()
        optimizer.step()
        return loss.detach()

    return step


VARIANTS: dict[str, Callable[..., Step]] = {
    "fsdp2": fsdp2, "torch ddp": ddp, "torch zero1": zero1, "hand": hand
}  # fmt: skip
