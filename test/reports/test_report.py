"""Reports in a headless Chromium: numbers against those of other tools and of formulas, faults of
accessibility, keys, names with markup, and tasks of users.

SHARDIR_SCREENSHOTS=FOLDER keeps pictures of the pages.
"""

import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import chdir
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import pytest
from support.browser import started_browser
from support.extent import long_form
from support.runlines import run_tool

import shardir
from shardir.diagnostics import ShardirError
from shardir.reports.measured import read_trace

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Page

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"

PLAN = "megatron(tp) * fsdp(dp)"
LAYERS = 6
SIZES = MappingProxyType(
    {"layers": LAYERS, "width": 64, "heads": 4, "seq": 16, "vocab": 64, "batch": 16}
)
"""A PanGu whose gathers run beside products on the links of h200."""

UNITS = {"s": 1.0, "ms": 1e-3, "µs": 1e-6, "us": 1e-6}


def tool(*words: str | Path) -> str:
    """Run a tool that has to succeed; return its output."""
    code, out, errors = run_tool([str(w) for w in words], b"")
    assert code == 0, errors
    return out


def kind_of(record: dict[str, Any], op: int) -> str:
    """The name of an op in the IR."""
    return record["strings"]["kinds"][record["ops"]["kinds"][op]]


def seconds(text: str) -> float:
    """The seconds of a time such as `2.47 ms`."""
    number, unit = text.split()[:2]
    return float(number.replace(",", "")) * UNITS[unit.strip(",")]


@pytest.fixture(scope="module")
def browser() -> Iterator["Browser"]:
    with started_browser() as found:
        yield found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small PanGu, its emitted program, and its report."""
    folder = tmp_path_factory.mktemp("report")
    pangu = import_module("make_pangu").pangu
    text = pangu(**SIZES, mesh={"dp": 2, "tp": 4}, cluster="h200")
    (folder / "pangu.ir").write_text(text)
    with chdir(folder):
        tool("shard-report", "pangu.ir", "--plan", PLAN, "-o", "pangu.html")
    return folder


@pytest.fixture(scope="module")
def record(folder: Path) -> dict[str, Any]:
    """The record of that report, out of its page."""
    page = (folder / "pangu.html").read_text()
    (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)
    found = json.loads(text)
    with chdir(folder):
        assert found == json.loads(tool("shard-report", "pangu.ir", "--plan", PLAN, "--json"))
    return found["programs"][0]


class Opened:
    """A page in the browser; it makes no request and has no error."""

    def __init__(self, page: "Page", path: Path):
        self.page, self.faults = page, list[str]()
        page.on("pageerror", lambda error: self.faults.append(str(error)))
        page.on("console", lambda message: self.faults.append(message.text))
        page.on("request", lambda request: self.faults.append(request.url))
        page.goto(path.as_uri())
        page.wait_for_selector("html[data-ready]")
        page.wait_for_selector("#timeline .chart canvas")

    def check(self, path: Path) -> None:
        assert self.faults == [path.as_uri()]


@pytest.fixture
def opened(browser: "Browser") -> Iterator[Callable[..., Opened]]:
    """Returns a function that opens a page, in a context of its own."""
    contexts = list[tuple["BrowserContext", Path, Opened]]()

    def open_page(path: Path, scheme: Any = "light", width: int = 1360) -> Opened:
        size: Any = {"width": width, "height": 900}
        context = browser.new_context(color_scheme=scheme, viewport=size)
        page = Opened(context.new_page(), path)
        contexts.append((context, path, page))
        return page

    yield open_page
    for context, path, page in contexts:
        page.check(path)
        context.close()


def keep(page: "Page", name: str) -> None:
    """Keep a picture of a page, where the environment asks for it."""
    if folder := os.environ.get("SHARDIR_SCREENSHOTS"):
        Path(folder).mkdir(parents=True, exist_ok=True)
        page.screenshot(path=Path(folder) / f"{name}.png", full_page=True)


def check_accessible(page: "Page") -> None:
    """Check that axe finds no serious fault."""
    from axe_playwright_python.sync_playwright import Axe

    options = {"runOnly": ["wcag2a", "wcag2aa"], "resultTypes": ["violations"]}
    found = Axe().run(page, options=options).response["violations"]
    serious = [v for v in found if v["impact"] in ("serious", "critical")]
    assert not [(v["id"], [n["target"] for n in v["nodes"]][:3]) for v in serious]


# ---- the record ----


def test_times_are_those_of_the_cost_model(folder: Path, record: dict[str, Any]) -> None:
    """The parts add up to the step, and they are those that `--cost` prints."""
    with chdir(folder):
        out = tool(
            "shard-opt", "pangu.ir", "-p", "train", "--plan", PLAN, "--cost", "--format=json"
        )
    (cost,) = [c for c in json.loads(out) if c["function"] == "step"]
    split = record["split"]
    parts = [split[name] for name in ("computation", "exposed", "late", "bubble")]
    assert sum(parts) == pytest.approx(cost["seconds"], rel=1e-5)
    assert split["exposed"] == pytest.approx(cost["exposed"], rel=1e-5)
    assert split["computation"] == pytest.approx(cost["computation"], rel=1e-5)
    exposed = sum(record["ops"]["exposed"])
    assert exposed == pytest.approx(split["exposed"], rel=1e-5)
    moved = sum(c["seconds"] for c in cost["communication"])
    assert split["hidden"] == pytest.approx(moved - cost["exposed"], rel=1e-5)
    assert split["hidden"] > 0
    # The events of a row follow each other, and those of computation fill the step.
    (rank,) = record["ranks"]
    row = rank["rows"]["compute"]
    assert row["begin"][0] == 0 and row["end"][-1] == pytest.approx(cost["seconds"], rel=1e-6)
    assert row["begin"][1:] == pytest.approx(row["end"][:-1], rel=1e-5)


MESSAGE = re.compile(r"# (all-gather|all-reduce|reduce-scatter)(?:[^#]|\n\s+#)*?\((\d+) ranks\), "
                     r"([\d.]+) (B|KiB|MiB)")  # fmt: skip


def test_bytes_are_those_of_the_emitted_program(tmp_path: Path) -> None:
    """By kind: rings receive (n - 1) / n of a message, twice for an all-reduce. Two equal layers
    are no loop, so that each collective has a comment of its own."""
    path = tmp_path / "two.ir"
    sizes = {**SIZES, "layers": 3}
    path.write_text(import_module("make_pangu").pangu(**sizes, mesh={"dp": 2, "tp": 4}))
    text = tool("shard-opt", path, "-p", "train", "--plan", PLAN, "-t", "torch")
    (found,) = json.loads(tool("shard-report", path, "--plan", PLAN, "--json"))["programs"]
    scale = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20}
    expected, counted = dict[str, float](), dict[str, int]()
    for c in found["collectives"]:
        kind = kind_of(found, c["op"]).removeprefix("dist.").replace("_", "-")
        counted[kind] = counted.get(kind, 0) + found["ops"]["bytes"][c["op"]]
    for kind, ranks, size, unit in MESSAGE.findall(text):
        n, message = int(ranks), float(size) * scale[unit]
        times = 2 if kind == "all-reduce" else 1
        expected[kind] = expected.get(kind, 0.0) + times * (n - 1) / n * message
    assert expected.keys() == counted.keys() == {"all-gather", "all-reduce", "reduce-scatter"}
    for kind, received in expected.items():  # sizes in comments have one decimal
        assert counted[kind] == pytest.approx(received, rel=0.02), kind


def test_layers_are_folded(record: dict[str, Any]) -> None:
    """The last of the layers is the query layer, with other names."""
    layer = next(x for x in record["layers"] if x["name"] == "l*")
    assert layer["count"] == len(layer["each"]) == LAYERS - 1
    total = sum(x["computation"] + x["communication"] for x in record["layers"])
    assert total == pytest.approx(sum(record["ops"]["seconds"]), rel=1e-5)


def test_memory_and_layouts(record: dict[str, Any]) -> None:
    use = record["memory"]
    assert (
        sum(use["parts"].values()) == use["peak"] == max(n for _, n in record["ranks"][0]["memory"])
    )
    assert sum(n for _, n, *_ in use["storages"]) + use["others"] == use["peak"]
    w = next(a for a in record["arguments"] if a["name"] == "l0.up.weight")
    assert (w["shape"], w["local"], w["bytes"]) == ([64, 256], [32, 64], 32 * 64 * 4)
    layout = record["layouts"][w["layout"]]
    # Rank r has the coordinates r // 4 along dp and r % 4 along tp.
    assert layout["ranks"] == [[r // 4, r % 4] for r in range(8)]
    assert record["sentences"][0].startswith("dp (2 ranks) splits inputs, ")


def test_pipeline_has_a_timeline_for_each_rank(tmp_path: Path) -> None:
    found = json.loads(tool("shard-report", EXAMPLES / "towers.ir", "--json"))["programs"][0]
    assert len(found["ranks"]) > 1
    for rank in found["ranks"]:
        split = rank["split"]
        assert sum(split[n] for n in ("computation", "exposed", "late", "bubble")) == pytest.approx(
            found["seconds"], rel=1e-5
        )
        assert all(name in found["functions"] for *_, name in rank["runs"])
        assert max(end for _, end, *_ in rank["runs"]) <= found["seconds"] * (1 + 1e-6)


def test_search_is_reported(tmp_path: Path) -> None:
    found = json.loads(
        tool("shard-report", EXAMPLES / "modes.ir", "--mode", "auto", "--json")
    )["programs"][0]  # fmt: skip
    assert found["search"]["bound"] <= found["search"]["objective"]
    assert found["plan"].startswith("searched: ")


# ---- the page ----


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_page_is_accessible(opened: Callable[..., Opened], folder: Path, scheme: str) -> None:
    page = opened(folder / "pangu.html", scheme).page
    page.locator("#communication .open").first.click()
    keep(page, scheme)
    check_accessible(page)
    assert page.evaluate("document.documentElement.dataset.theme") == scheme


def test_page_is_narrow(opened: Callable[..., Opened], folder: Path) -> None:
    page = opened(folder / "pangu.html", "light", 400).page
    keep(page, "narrow")
    assert page.evaluate("document.documentElement.scrollWidth") == 400


def test_tables_by_keys(
    opened: Callable[..., Opened], folder: Path, record: dict[str, Any]
) -> None:
    """Numbers on the page are those of the record; heads sort, words search, keys open rows."""
    page = opened(folder / "pangu.html").page
    value = page.locator(".tile .value").first.inner_text()
    assert seconds(value) == pytest.approx(record["seconds"], rel=0.005)
    section = page.locator("#communication")
    page.get_by_label("Fold equal layers").first.uncheck()
    more = section.locator("button.more")
    more.focus()
    page.keyboard.press("Enter")
    rows = section.locator("tbody > tr")
    assert rows.count() == len(record["collectives"])
    head = section.get_by_role("button", name="exposed", exact=True)
    head.focus()
    page.keyboard.press("Enter")
    shown = [
        seconds(t.split("\n")[0]) for t in section.locator("td:nth-child(7)").all_inner_texts()
    ]
    assert shown == sorted(shown, reverse=True)
    assert sum(shown) == pytest.approx(record["split"]["exposed"], rel=0.01)
    page.keyboard.press("Enter")
    assert section.locator("th[aria-sort=ascending]").inner_text().startswith("exposed")
    section.get_by_label("Search collectives").press_sequentially("all-gather l0_wo")
    assert 1 <= rows.count() < 4
    section.locator(".open").first.press("Enter")
    detail = section.locator("tr.detail").inner_text()
    assert "cause" in detail and "l0_attended" in detail and "annotated at pangu.ir:4" in detail
    section.locator(".open").first.press("Enter")
    assert section.locator("tr.detail").count() == 0


def test_timeline_zooms_by_keys(opened: Callable[..., Opened], folder: Path) -> None:
    page = opened(folder / "pangu.html").page
    chart = page.locator("#timeline .chart").first
    scale = "c => [c.plot.scales.x.min, c.plot.scales.x.max]"
    begin, whole = chart.evaluate(scale)
    chart.focus()
    for key, low, high in (("+", 0.25, 0.75), ("ArrowRight", 0.375, 0.875), ("0", 0.0, 1.0)):
        page.keyboard.press(key)
        assert chart.evaluate(scale) == pytest.approx([low * whole, high * whole])
    assert begin == 0
    page.locator("#theme").click()
    page.locator("#theme").click()
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"


def test_page_is_printed(opened: Callable[..., Opened], folder: Path) -> None:
    page = opened(folder / "pangu.html", "dark").page
    page.emulate_media(media="print")
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.evaluate("document.documentElement.dataset.theme") == "light"
    assert not page.locator("header").is_visible()
    assert page.locator("#overview h1").is_visible()
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"


def test_names_are_text(opened: Callable[..., Opened], tmp_path: Path) -> None:
    """Names with markup, of a parameter and a file, are shown, and never run."""
    markup = "</script><img src=x onerror=alert(1)>"
    text = (EXAMPLES / "digits.ir").read_text()
    text = text.replace('train.parameter = "w1"', f'train.parameter = "{markup}"')
    path = tmp_path / "<img onerror=alert(2)> & <!--.ir"
    path.write_text(text)
    page = tmp_path / "page.html"
    tool("shard-report", path, "--title", markup, "-o", page)
    shown = opened(page).page
    assert shown.locator("img").count() == 0
    assert shown.locator("#title").inner_text().endswith("script><img src=x onerror=alert(1)>")
    assert shown.locator("#overview h1").inner_text() == path.name
    assert markup in shown.locator("#layouts").inner_text()


# ---- tasks ----


def test_task_which_plan(opened: Callable[..., Opened], folder: Path) -> None:
    """Which plan for my model on 2 nodes of 8 devices? One command, and one page."""
    with chdir(folder):
        out = tool(
            "shard-opt", "pangu.ir", "--compare", f"fsdp(dp); {PLAN}", "--meshes",
            "dp = 16; dp = 2, tp = 8", "--cost=h200", "--report", "plans.html",
        )  # fmt: skip
    best = next(line for line in out.splitlines() if line.startswith("*"))
    page = opened(folder / "plans.html").page
    keep(page, "plans")
    check_accessible(page)
    row = page.locator("#plans tr.best")
    cells = row.locator("td").all_inner_texts()
    plan, mesh, step = cells[0].removesuffix(" best"), cells[1], cells[2]
    assert best.removeprefix("* ").startswith(plan) and mesh in best
    assert seconds(step) == pytest.approx(seconds(re.split(r"  +", best)[2]), rel=0.01)
    names = page.locator("#program option").all_inner_texts()
    assert names[0] == f"{plan} on {mesh}" and len(names) == len(out.splitlines()) - 2
    page.select_option("#program", "1")
    assert page.locator("#overview h1").inner_text() == names[1]


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Digits, trained on 4 ranks, evaluated, and recorded."""
    folder = tmp_path_factory.mktemp("traced")
    program = shardir.compile_file(EXAMPLES / "digits.ir")
    found = program.run(steps=40, trace=folder / "run.json", verbose=False)
    assert found.results[-1]["value"] > 0.3
    program.report(folder / "digits.html", trace=folder / "run.json")
    (folder / "measured.txt").write_text(str(found.differences["step"].measured))
    return folder


def test_task_measured_beside_predicted(opened: Callable[..., Opened], traced: Path) -> None:
    """Train, evaluate, and look at measured times beside predicted ones."""
    page = opened(traced / "digits.html").page
    keep(page, "measured")
    measured = float((traced / "measured.txt").read_text())
    tile = page.locator(".tile").first.inner_text()
    assert seconds(tile.partition("measured: ")[2]) == pytest.approx(measured, rel=0.01)
    rows = page.locator("#time .stack-row").all_inner_texts()
    assert [row.split("\n")[0] for row in rows[:2]] == ["predicted", "measured"]
    # Of each collective the measured time is the one in the trace, as a mean.
    events = read_trace(traced / "run.json")["traceEvents"]
    pids = {e["pid"] for e in events if e.get("name") == "process_name"
            and e["args"]["name"].startswith("measured @step")}  # fmt: skip
    moves = [e for e in events if e.get("cat") == "communication"]
    moves = [e for e in moves if e["pid"] in pids]
    name = next(e["name"] for e in moves if "dist.all_reduce" in e["name"])
    taken = [e["dur"] for e in moves if e["name"] == name]
    value = sum(taken) / len(taken) * 1e-6
    text = (traced / "digits.html").read_text()
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)
    found = json.loads(data)["programs"][0]
    first = found["collectives"][0]["op"]
    assert found["measured"]["ops"][first] == pytest.approx(value, rel=1e-4)
    assert page.locator("#measured-rank option").count() == 4


def test_trace_of_another_program_is_refused(folder: Path, traced: Path) -> None:
    with pytest.raises(ShardirError, match="got a trace of @step of another one"):
        shardir.compile_file(folder / "pangu.ir", plan=PLAN).report(
            folder / "no.html", trace=traced / "run.json"
        )
    with chdir(folder):
        code, _, errors = run_tool(
            ["shard-report", "pangu.ir", "--trace", "pangu.ir", "-o", "no.html"], b""
        )
    assert code == 2 and "expected a trace that shard-run --trace wrote" in errors
    assert not (folder / "no.html").exists()


def test_task_why_is_there_a_gather(
    opened: Callable[..., Opened], folder: Path, record: dict[str, Any]
) -> None:
    """Why is there an all-gather at line N? The report says what `--explain` says."""
    gather = next(
        c for c in record["collectives"]
        if kind_of(record, c["op"]) == "dist.all_gather" and c["why"]
    )  # fmt: skip
    place = record["strings"]["places"][record["ops"]["places"][gather["op"]]]
    value = re.findall(r"%\w+", gather["moved"]["value"])[0]
    words = "-p", "train", "--plan", PLAN, f"--explain={value}", "-o", os.devnull
    with chdir(folder):
        code, _, explained = run_tool(["shard-opt", "pangu.ir", *words], b"")
    assert code == 0
    lines = [line.strip() for line in explained.splitlines()]
    assert all(line.strip() in lines for line in gather["why"])
    source = (folder / "pangu.ir").read_text().splitlines()[int(place.split(":")[1]) - 1]
    assert value in source  # that line reads the gathered value
    page = opened(folder / "pangu.html").page
    page.get_by_label("Fold equal layers").first.uncheck()
    page.get_by_label("Search collectives").fill(f"all-gather :{place.split(':')[1]}")
    page.locator("#communication .open").first.click()
    detail = page.locator("#communication tr.detail").inner_text()
    assert gather["cause"] in detail and gather["why"][0] in detail


@long_form
def test_pangu_of_full_size(opened: Callable[..., Opened], tmp_path: Path) -> None:
    text = import_module("make_pangu").pangu(
        **import_module("make_pangu").SIZES["2.6B"], batch=64, mesh={"dp": 8, "tp": 8},
        cluster="pod2048",
    )  # fmt: skip
    (tmp_path / "pangu.ir").write_text(text)
    page = tmp_path / "pangu.html"
    tool("shard-report", tmp_path / "pangu.ir", "--plan", PLAN, "--precision", "f16", "-o", page)
    assert page.stat().st_size < 5_000_000
    opened(page)
