"""Presets of modules of torch: bytes against formulas, where a module merges what is split; and
that parameters are split, or named in the plan."""

import re
from fnmatch import fnmatchcase
from math import prod
from random import Random

import pytest
import torch
from support.attention_blocks import FEATURES, Block, Case, random_case
from support.extent import extent, sampled
from torch import nn

import shardir
from shardir.algebra.notation import mesh_of
from shardir.algebra.plan import NameKind, PlanEntry, PlanLine
from shardir.algebra.plan_notation import read
from shardir.cost import report

BATCH, ROWS, WIDTH, HEADS = 8, 64, 16, 4


class Fused(nn.Module):
    """An attention whose queries, keys and values are one product, as GPT-2 has it."""

    def __init__(self, values: int):
        super().__init__()
        self.sizes = [WIDTH, values, values]
        self.qkv, self.out = nn.Linear(WIDTH, sum(self.sizes)), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        given = self.qkv(x.view(-1, WIDTH)).view(*x.shape[:-1], -1).split(self.sizes, dim=-1)
        q, k, v = (y.view(*x.shape[:-1], -1, WIDTH // HEADS).transpose(1, 2) for y in given)
        y = nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        return x + self.out(y.transpose(1, 2).reshape(x.shape))


def packed() -> nn.Module:
    """torch's own, which merges samples and heads into one batch of the attention."""
    return nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True)


def received(model: nn.Module, plan: str, devices: int) -> int:
    """The bytes that a device receives in a step."""
    made = shardir.compile(
        model, torch.zeros(BATCH, ROWS, WIDTH), loss=lambda y: y.square().mean(),
        optimizer="sgd, lr = 0.1", mesh={"a": devices}, plan=plan,
    )  # fmt: skip
    (cost,) = report(made.module)
    return sum(bytes for bytes, _ in cost.communication.values())


def test_samples_stay_split_where_a_module_merges_them() -> None:
    """Gradients and the loss alone are communicated: 2 (n - 1) / n of their bytes."""
    model = packed()
    numbers = 1 + sum(p.numel() for p in model.parameters())
    assert received(model, "ddp", 2) == 4 * numbers


@pytest.mark.parametrize(
    ("model", "cut", "reductions"),
    [
        (packed(), 3 * WIDTH, 3),  # the inputs need no gradient
        (Fused(WIDTH), 3 * WIDTH, 1),
        (Fused(WIDTH // 2), 2 * WIDTH, 1),
    ],
    ids=["packed", "queries, keys and values", "shared keys and values"],
)
def test_heads_stay_split_where_one_product_makes_them(
    model: nn.Module, cut: int, reductions: int
) -> None:
    """Megatron's all-reduces, of an activation each, of 2 (n - 1) / n of its bytes. In addition
    parts of the weight and of its gradient, of (n - 1) / n^2 of their bytes, and of the gradient of
    the bias, of (n - 1) / n."""
    n = 2
    activation = 4 * prod((BATCH, ROWS, WIDTH))
    weights = 2 * 4 * cut * WIDTH * (n - 1) // n**2 + 4 * cut * (n - 1) // n
    found = received(model, "megatron", n)
    assert found == reductions * 2 * activation * (n - 1) // n + weights


# ---- parameters that are split, or named ----

OF_BOTH = "megatron(tp) * fsdp(dp)"


def planned(model: nn.Module, x: torch.Tensor, mesh: str, plan: str) -> str:
    program = shardir.compile(
        model, x, labels=x, loss=nn.functional.mse_loss, optimizer="sgd, lr = 0.1", mesh=mesh,
        plan=plan,
    )  # fmt: skip
    return program.plan


def entry_of(name: str, plan: str) -> PlanEntry:
    """The first entry of a plan for a parameter."""
    found, errors = read(plan)
    assert not errors
    lines = (line for line in found.lines if isinstance(line, PlanLine))
    said = (line.says("", NameKind.PARAMETER, name) for line in lines)
    return next(entry for entry in said if entry is not None)


def shards(name: str, plan: str, mesh: str) -> int:
    """In how many shards a plan has a parameter."""
    layout = entry_of(name, plan).layout
    assert layout is not None
    return mesh_of("m", mesh).extent(tuple([a for axes in layout.dims for a in axes]))


def named_unsharded(plan: str) -> list[str]:
    return re.findall(r"^# whole: (\S+) \([\d.]+ [KMG]?i?B\): .", plan, re.MULTILINE)


@pytest.mark.filterwarnings("ignore:.*presets leave")
@pytest.mark.parametrize("seed", range(extent(2, 100)))
def test_a_large_parameter_is_split_over_all_axes_or_named(seed: int) -> None:
    random = Random(seed)
    case = random_case(random)
    mesh, preset = random.choice([
        ("tp = 2", "megatron"), ("tp = 4", "megatron"), ("tp = 6", "megatron+sequence"),
        ("dp = 3, tp = 4", OF_BOTH), ("dp = 5", "fsdp"), ("a = 2, b = 3", "fsdp"),
    ])  # fmt: skip
    model = Block(case)
    plan = planned(model, torch.zeros(30, 6, case.heads * FEATURES), mesh, preset)
    devices, named = mesh_of("m", mesh).size, named_unsharded(plan)
    for name, p in model.named_parameters():
        if p.ndim > 1 and p.numel() > 256:
            is_named = any(fnmatchcase(name, pattern) for pattern in named)
            assert (shards(name, plan, mesh) < devices) == is_named, (case, mesh, name, plan)


@pytest.mark.parametrize("form", sampled(["apart", "repeated", "expanded", "grouped"], 2))
def test_fewer_heads_of_keys_than_devices_are_split_over_a_sub_axis(form: str) -> None:
    plan = planned(Block(Case(form, 8, 2)), torch.zeros(2, 6, 8 * FEATURES), "tp = 4", "megatron")
    for name, text in {
        "q.weight": "[{tp}]", "q.bias": "[{tp}]", "k.weight": "[{tp:(1)2}]",
        "v.weight": "[{tp:(1)2}]", "out.weight": "[{}, {tp}]",
    }.items():  # fmt: skip
        assert str(entry_of(name, plan)) == text, name


def test_a_part_has_a_layout_of_its_own() -> None:
    """Queries have 8 heads, keys and values 2, of one product."""
    plan = planned(
        Block(Case("split", 8, 2)), torch.zeros(2, 6, 8 * FEATURES), "tp = 4", "megatron"
    )
    parts = "parts [{tp}] [{tp:(1)2}] [{tp:(1)2}]"
    assert str(entry_of("qkv.weight", plan)) == f"[{{}}, {{tp}}], {parts}"


@pytest.mark.parametrize(("heads", "keys", "devices", "of"), [(6, 3, 2, 1), (12, 6, 4, 2)])
def test_heads_that_devices_do_not_divide_are_warned_of(
    heads: int, keys: int, devices: int, of: int
) -> None:
    """They are in as many shards as divide both."""
    model, mesh = Block(Case("apart", heads, keys)), f"tp = {devices}"
    with pytest.warns(
        UserWarning, match=r"presets leave .* of large parameters unsharded: q.weight"
    ):
        plan = planned(model, torch.zeros(2, 6, heads * FEATURES), mesh, "megatron")
    assert [shards(f"{n}.weight", plan, mesh) for n in ("q", "k", "v", "out")] == [of] * 4
    assert named_unsharded(plan) == ["q.weight", "k.weight", "v.weight", "out.weight"]


@pytest.mark.parametrize("devices", sampled([24, 48], 1))
def test_fsdp_splits_where_no_dimension_divides(devices: int) -> None:
    """Memory for parameters, their gradients and states is near that of 16 devices, by shares."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 64))
    of = {}
    for n in (16, devices):
        x = torch.zeros(n, 64)
        program = shardir.compile(
            model, x, labels=x, loss=nn.functional.mse_loss, optimizer="adamw, lr = 0.001",
            mesh=f"dp = {n}", plan="fsdp",
        )  # fmt: skip
        of[n] = program.cost().memory.parts
    assert not named_unsharded(program.plan)
    for part in ("parameters", "states"):
        assert of[devices][part] <= 1.1 * of[16][part] * 16 / devices
