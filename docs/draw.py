"""Pictures of whole models and runs: `python docs/draw.py NAME` writes docs/pictures/NAME.svg.

Each stands on a light card of its own, so that it is read on light and dark pages.
"""

import copy
import sys
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any

import torch
from torch import nn

import shardir
from shardir.cost.simulator import simulate

FOLDER = Path(__file__).parent / "pictures"
INK, SOFT, RULE, CARD = "#1f2937", "#6b7280", "#d1d5db", "#ffffff"
BLUE, ORANGE, GREEN, PALE = "#3f51b5", "#d97706", "#2f855a", "#eef0fb"
PLAN = "megatron(tp) * fsdp(dp)"
PLANS = ("ddp(dp)", "zero1(dp)", "fsdp(dp)", "megatron(tp) * fsdp(dp)", "fsdp(dp) recompute=full")


def card(width: int, height: int, title: str, parts: Iterable[str]) -> str:
    """Return a picture of parts, with a title for readers that do not see it."""
    body = "\n".join(parts)
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img" font-family="system-ui, sans-serif" font-size="14" fill="{INK}">
<title>{escape(title)}</title>
<rect x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="8" fill="{CARD}" stroke="{RULE}"/>
{body}
</svg>
"""


def text(x: float, y: float, words: str, **style: Any) -> str:
    attributes = "".join(f' {k.replace("_", "-")}="{v}"' for k, v in style.items())
    return f'<text x="{x:g}" y="{y:g}"{attributes}>{escape(words)}</text>'


def box(x: float, y: float, width: float, height: float, **style: Any) -> str:
    attributes = "".join(f' {k.replace("_", "-")}="{v}"' for k, v in style.items())
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"{attributes}/>'


def code(x: float, y: float, lines: Sequence[str], marked: str = "") -> Iterator[str]:
    """Yield lines of a program, those with a word in colour."""
    for i, line in enumerate(lines):
        fill = BLUE if marked and marked in line else INK
        weight = 600 if marked and marked in line else 400
        yield (
            f'<text x="{x:g}" y="{y + 18 * i:g}" font-family="ui-monospace, monospace" '
            f'font-size="12.5" xml:space="preserve" fill="{fill}" font-weight="{weight}">'
            f"{escape(line)}</text>"
        )


# ---- programs ----


def perceptron(plan: str, mesh: str = "dp = 2, tp = 2") -> Any:
    """Return the program of two linear layers by a plan."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 10))
    x, labels = torch.randn(128, 64), torch.randint(10, (128,))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, x, labels, shardir.compile(
        model, x, labels=labels, loss=nn.functional.cross_entropy, optimizer=optimizer, mesh=mesh,
        plan=plan,
    )  # fmt: skip


class Layer(nn.Module):
    """A layer of a transformer."""

    def __init__(self, width: int):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, width // 128, 128).unbind(2)
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, width))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class Gpt(nn.Module):
    """A GPT that returns its loss."""

    def __init__(self, layers: int, width: int, vocabulary: int):
        super().__init__()
        self.table = nn.Embedding(vocabulary, width)
        self.layers = nn.Sequential(*[Layer(width) for _ in range(layers)])
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.layers(self.table(tokens)))
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def gpt() -> tuple[Any, Any]:
    """Return a GPT of 1.3 billion parameters on the meta device, and its inputs."""
    with torch.device("meta"):
        model = Gpt(24, 2048, 50304)
        tokens = torch.zeros(32, 2048, dtype=torch.int64)
    return model, (tokens, tokens)


# ---- pictures ----


def program_picture() -> str:
    """A module, its plan, and the beginning of the program that every rank runs."""
    *_, program = perceptron(PLAN)
    module = [
        "model = nn.Sequential(", "    nn.Linear(64, 256),", "    nn.GELU(),",
        "    nn.Linear(256, 10),", ")",
    ]  # fmt: skip
    plan = str(program.plan).strip().splitlines()
    kept = []
    for line in (
        program.program.replace("draw.py", "model.py").partition("labels: i64")[2].splitlines()
    ):
        line = line.removeprefix("    ")
        if line.startswith(("del ", "#   ")):  # `#   `: the rest of a comment
            continue
        kept.append(line.partition(": nn.")[0])
        if "rt.all_reduce" in line:
            break
    start = next(i for i, x in enumerate(kept) if x.startswith("# all-gather"))
    kept = kept[start:]
    height = 240 + 18 * len(kept)
    parts = [
        text(24, 34, "your module, for one device", font_weight=600),
        *code(24, 62, module),
        text(272, 34, "the plan, as it stands for this module", font_weight=600),
        *code(272, 62, plan),
        box(24, 164, 692, 1, fill=RULE),
        text(
            24,
            194,
            "the program of every rank: its beginning, with shorter comments",
            font_weight=600,
        ),
        *code(24, 222, kept, marked="rt."),
    ]
    return card(
        708, height, "A module, its plan and its program, with collectives in colour", parts
    )


def memory() -> str:
    """Memory of a device over a step of a GPT, under three plans."""
    model, batch = gpt()
    curves = {}
    for plan, mesh in (("ddp", "dp = 8"), ("fsdp", "dp = 8"), ("fsdp, recompute=full", "dp = 8")):
        preset, _, recompute = plan.partition(", recompute=")
        program = shardir.compile(
            model, batch, optimizer="adamw, lr = 1e-3", mesh=mesh, cluster="h200", plan=preset,
            precision="bf16", **({"recompute": recompute} if recompute else {}),
        )  # fmt: skip
        (simulation,) = simulate(program.module)
        curves[plan] = simulation.ranks[0].bytes
    seconds = max(x[-1][0] for x in curves.values())
    gigabytes = max(b for x in curves.values() for _, b in x) / 1e9
    left, top, width, height = 70, 60, 640, 250
    parts = [text(24, 34, "GPT of 1.3 B parameters on 8 H200, bf16: predicted memory of a device over a step, GB", font_weight=600)]  # fmt: skip
    for n in range(5):
        y = top + height - height * n / 4
        parts += [box(left, y, width, 1, fill=RULE),
                  text(left - 8, y + 5, f"{gigabytes * n / 4:.0f}", text_anchor="end", fill=SOFT)]  # fmt: skip
    for curve, colour in zip(curves.values(), (ORANGE, BLUE, GREEN), strict=True):
        highest: dict[int, float] = {}  # in each step of 2 pixels
        for s, b in curve:
            x = round(width * s / seconds / 2) * 2
            highest[x] = max(highest.get(x, 0.0), b / 1e9)
        points = [(left + x, top + height - height * y / gigabytes) for x, y in highest.items()]
        path = "M" + " L".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
    for i, (plan, colour) in enumerate(zip(curves, (ORANGE, BLUE, GREEN), strict=True)):
        parts += [box(left + 170 * i, 344, 14, 14, fill=colour),
                  text(left + 20 + 170 * i, 356, plan)]  # fmt: skip
    parts.append(text(left + width, 332, f"{seconds * 1e3:.0f} ms", text_anchor="end", fill=SOFT))
    return card(740, 376, "Memory of a device over a step under three plans", parts)


def plans() -> str:
    """Predicted step times of plans of a GPT on two nodes."""
    model, batch = gpt()
    compared = shardir.compare(
        model, batch, optimizer="adamw, lr = 1e-3",
        plans=[f"{plan} precision=bf16" for plan in PLANS],
        meshes=["dp = 16", "dp = 2, tp = 8"], cluster="h200",
    )  # fmt: skip
    return bars(compared)


def losses() -> str:
    """Losses of four ranks beside torch's on one device."""
    model, x, labels, program = perceptron(PLAN)
    reference = copy.deepcopy(model)
    ours = program.run([(x, labels)] * 40, steps=40, verbose=False).losses["step"]
    optimizer, theirs = torch.optim.AdamW(reference.parameters(), lr=1e-2), []
    for _ in range(40):
        loss = nn.functional.cross_entropy(reference(x), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        theirs.append(loss.item())
    largest = max(abs(a - b) for a, b in zip(ours, theirs, strict=True))
    left, top, width, height = 60, 60, 560, 220
    ceiling = max(theirs)

    def at(i: int, y: float) -> tuple[float, float]:
        return left + width * i / 39, top + height - height * y / ceiling

    line = "M" + " L".join(f"{x:.1f},{y:.1f}" for x, y in (at(i, y) for i, y in enumerate(theirs)))
    dots = [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{BLUE}"/>'
            for x, y in (at(i, y) for i, y in enumerate(ours))]  # fmt: skip
    parts = [
        text(24, 34, f"loss of 40 steps; largest difference {largest:.1e}", font_weight=600),
        *(box(left, top + height - height * n / 2 / ceiling, width, 1, fill=RULE) for n in range(5)),
        *(text(left - 8, top + height - height * n / 2 / ceiling + 5, f"{n / 2:g}", text_anchor="end", fill=SOFT) for n in range(5)),
        f'<path d="{line}" fill="none" stroke="{ORANGE}" stroke-width="2"/>', *dots,
        box(left + 330, 70, 14, 3, fill=ORANGE), text(left + 352, 76, "torch on one device"),
        f'<circle cx="{left + 337}" cy="96" r="4" fill="{BLUE}"/>', text(left + 352, 101, "shardir on 4 ranks"),
    ]  # fmt: skip
    return card(650, 310, "Losses of four ranks beside torch's on one device", parts)


def bars(compared: Any) -> str:
    """Return a bar for each plan, with its time and memory."""
    rows = list({r.plan: r for r in reversed(compared.rows) if r.seconds}.values())[::-1]
    rows.sort(key=lambda r: r.seconds)
    longest = max(r.seconds for r in rows)
    parts = [text(24, 34, "GPT of 1.3 B parameters on 2 x 8 H200, bf16: predicted step time and memory", font_weight=600)]  # fmt: skip
    for i, r in enumerate(rows):
        y = 56 + 34 * i
        parts += [
            text(300, y + 16, f"{r.plan.removesuffix(' precision=bf16')}, {r.mesh}", text_anchor="end", font_size=12),
            box(312, y, 300 * r.seconds / longest, 22, fill=BLUE if i == 0 else "#9aa5d8", rx=3),
            text(320 + 300 * r.seconds / longest, y + 16, f"{r.seconds * 1e3:.0f} ms, {r.memory / 1e9:.0f} GB", fill=SOFT),
        ]  # fmt: skip
    return card(740, 76 + 34 * len(rows), "Predicted step times of plans", parts)


PICTURES = {"program": program_picture, "step-memory": memory, "plans": plans, "losses": losses}


if __name__ == "__main__":
    for name in sys.argv[1:] or PICTURES:
        (FOLDER / f"{name}.svg").write_text(PICTURES[name]())
