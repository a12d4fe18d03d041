"""The pages as a site: what readers ask is found, blocks of Python run or say why not, and first
pages are whole in a browser. `make site` reports dead links and anchors, and pages that the
navigation lacks."""

import os
import re
import subprocess
import sys
from contextlib import chdir
from functools import cache
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
from markdown_it import MarkdownIt
from support.browser import started_browser
from support.extent import LONG, long_form
from support.pages import BLOCK, DOCS, MADE, PAGES, ROOT
from support.runlines import run_tool

import shardir

PYTHON = re.compile(r"^ *```python\n(.*?)^ *```$", re.M | re.S)
LINK = re.compile(r"\]\((?!\w+:)([^)#\s]*)(?:#[^)\s]+)?\)")
RUN_BY = re.compile(r"<!-- (runs|file: .*|edit: .*|checks: .*|from: .*) -->")
EXCERPT = re.compile(r"<!-- excerpt: (\S+) -->")
REASONS = {
    "lines of several programs",
    "on ranks of torchrun",
    "a call of the recipe above, which test/run/test_frameworks.py runs",
    "test/project/test_site.py runs it with a model and batches",
}
"""Why a block is not run, as `<!-- not run: REASON -->`."""


# ---- twelve questions ----

QUESTIONS = {
    "my DataLoader": ("guides/data.md", "## Loaders"),
    "TensorBoard and wandb": ("guides/frameworks.md", "## Weights & Biases and TensorBoard"),
    "accumulation": ("guides/accumulation.md", "microbatches"),
    "mixed precision": ("guides/mixed-precision.md", "precision="),
    "two nodes with Slurm": ("guides/machines.md", "## Slurm"),
    "which ops are missing": ("reference/aten.md", "by torch's decomposition"),
    "fine-tune from safetensors": ("guides/fine-tuning.md", ".safetensors"),
    "long context": ("guides/long-context.md", "{sp}"),
    "experts": ("guides/experts.md", "{ep}"),
    "profile": ("guides/profiling.md", "--trace"),
    "wrong loss": ("guides/wrong-loss.md", "program.check("),
    "Lightning or accelerate beside it": ("guides/frameworks.md", "## Lightning"),
}
"""Each question with the page that answers it, and a part of the answer."""


def linked(page: Path) -> set[Path]:
    text = BLOCK.sub("", page.read_text())
    return {(page.parent / path).resolve() for path in LINK.findall(text) if path.endswith(".md")}


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_question_is_answered_within_two_clicks(question: str) -> None:
    name, answer = QUESTIONS[question]
    once = linked(DOCS / "index.md")
    twice = once | {target for page in once if page.exists() for target in linked(page)}
    page = DOCS / name
    assert page in twice
    assert answer in page.read_text()


# ---- blocks of Python ----


def test_python_runs_or_says_why_not() -> None:
    for page in PAGES:
        text = page.read_text()
        made = [m.span() for m in MADE.finditer(text)]
        for block in PYTHON.finditer(text):
            if any(a <= block.start() < b for a, b in made):
                continue
            mark = text[: block.start()].rstrip().rpartition("\n")[2]
            place = f"{page.name}:{text.count(chr(10), 0, block.start()) + 1}"
            if excerpt := EXCERPT.fullmatch(mark):
                assert dedent(block[1]) in dedent_all(ROOT / excerpt[1]), place
            elif not RUN_BY.fullmatch(mark):
                assert mark.removeprefix("<!-- not run: ").removesuffix(" -->") in REASONS, place


@cache
def dedent_all(path: Path) -> str:
    """The text of a script, and each of its blocks without indentation."""
    text = path.read_text()
    return text + "".join(
        dedent(m[0]) for m in re.finditer(r"(?:^    .*\n|^\n)+", text, re.M)
    )  # fmt: skip


# ---- the README ----

BESIDE_TORCH = """
import torch as _torch
reference.load_state_dict(initial)
optimizer = _torch.optim.AdamW(reference.parameters(), lr=1e-2)
for ours in report.losses["step"]:
    loss = nn.functional.cross_entropy(reference(x), labels)
    assert abs(loss.item() - ours) < 1e-5, (loss.item(), ours)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
for name, value in reference.state_dict().items():
    _torch.testing.assert_close(model.state_dict()[name], value, atol=1e-4, rtol=1e-4)
"""
MODEL = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 4)
    def forward(self, x, labels):
        return nn.functional.cross_entropy(self.layer(x), labels)
model, batch = Model(), {"x": torch.randn(8, 8), "labels": torch.arange(8) % 4}
optimizer, loader = torch.optim.AdamW(model.parameters()), [batch] * 3
"""
AFTER = "\nassert len(losses) == 3 and losses[2] < losses[0]\n"
COPY = """
import copy
reference, initial = copy.deepcopy(model), copy.deepcopy(model.state_dict())
"""


def test_the_readme_trains_as_torch_does(tmp_path: Path) -> None:
    """Its first block, with the losses and parameters of torch on one device beside it; in the
    long form the block for a model of one's own too."""
    first, own = (m[1] for m in PYTHON.finditer((ROOT / "README.md").read_text()))
    assert len(first.strip().splitlines()) - first.count("\n\n") <= 12
    before, compile_on, after = first.partition("program = shardir.compile(")
    parts = [before, COPY, compile_on, after, BESIDE_TORCH]
    if LONG:
        parts += [MODEL, own, AFTER]
    script = tmp_path / "readme.py"
    script.write_text("".join(parts))
    with chdir(tmp_path):
        code, out, err = run_tool(["python", "readme.py"], b"")
    assert code == 0, out + err


# ---- the site ----


@long_form
def test_the_site_is_built_without_warnings(tmp_path: Path) -> None:
    """As `make site`; its first page and the reference of Python are there."""
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "-d", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=300)
    assert "guides/which-plan/" in (tmp_path / "index.html").read_text()
    names = set(
        re.findall(
            r'id="shardir\.[\w.]*?(\w+)"', (tmp_path / "reference/python/index.html").read_text()
        )
    )

    assert set(shardir.__all__) - {"__version__"} <= names


# ---- in a browser ----

SITE = ROOT / "build" / "site"
VIEWS: dict[str, tuple[Any, int]] = {
    "light": ("light", 1280),
    "dark": ("dark", 1280),
    "narrow": ("light", 420),
}


@pytest.mark.skipif(not SITE.exists(), reason="no site: make site")
def test_first_pages_are_seen_whole() -> None:
    """The start of the site and README: pictures are there, and nothing is wider than the
    window."""
    with started_browser() as browser:
        readme = MarkdownIt("commonmark").enable("table").render((ROOT / "README.md").read_text())
        for view, (scheme, width) in VIEWS.items():
            context = browser.new_context(
                color_scheme=scheme, viewport={"width": width, "height": 1200}
            )
            page = context.new_page()
            for name, path in (("site", SITE / "index.html"), ("readme", ROOT / "README.md")):
                page.goto(path.as_uri())
                if name == "readme":
                    page.set_content(f'<base href="{ROOT.as_uri()}/"><main>{readme}</main>')
                    page.wait_for_load_state("networkidle")
                if folder := os.environ.get("SHARDIR_SCREENSHOTS"):
                    page.screenshot(path=Path(folder) / f"{name}-{view}.png", full_page=True)
                assert page.evaluate("[...document.images].every((x) => x.naturalWidth > 0)"), name
                if name == "site":
                    assert page.evaluate(
                        "document.documentElement.scrollWidth <= window.innerWidth"
                    ), view
            context.close()
