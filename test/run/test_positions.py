"""Positions of ranks when a run ends with an error: the one that lags, its op, its source line."""

import re
from pathlib import Path

import pytest
from support.extent import extent, long_form
from support.ranks.nodes import Nodes

pytest.importorskip("torch")

import shardir
from shardir.backend.runs import RunError

PROGRAM = """dist.mesh @m <dp = 2, tp = 2>

func.func private @loss(
    %x: tensor<8x4xf32> {train.input = #train.init<normal, std = 0.1>},
    %t: tensor<8x3xf32> {train.input = #train.init<normal, std = 0.1>},
    %w1: tensor<4x16xf32, #dist.layout<@m, [{}, {tp}]>> {train.parameter = "w1", train.init = #train.init<normal, std = 0.1>},
    %w2: tensor<16x3xf32> {train.parameter = "w2", train.init = #train.init<normal, std = 0.1>}
) -> tensor<f32> {
  %a = nn.matmul %x, %w1 : (tensor<8x4xf32>, tensor<4x16xf32, #dist.layout<@m, [{}, {tp}]>>) -> tensor<8x16xf32>
  %y = nn.matmul %a, %w2 : (tensor<8x16xf32>, tensor<16x3xf32>) -> tensor<8x3xf32>
  %d = nn.sub %y, %t : (tensor<8x3xf32>, tensor<8x3xf32>) -> tensor<8x3xf32>
  %s = nn.square %d : (tensor<8x3xf32>) -> tensor<8x3xf32>
  %loss = nn.reduce <mean> %s dims <0, 1> : (tensor<8x3xf32>) -> tensor<f32>
  func.return %loss : tensor<f32>
}
train.step @step of @loss <sgd, lr = 0.001>
"""  # noqa: E501 - the text of a program

PRODUCT = "    # all-reduce sum over tp (2 ranks)"
GRADIENTS = "    # all-reduce sum of 3 tensors in one buffer over dp (2 ranks)"
AT_PRODUCT = r"all-reduce of y \(mlp\.ir:10\)"
AT_GRADIENTS = r"all-reduce of loss, d_w1, d_w2 \(mlp\.ir:13, mlp\.ir:9, mlp\.ir:10\)"


def program(folder: Path, before: str, lines: str) -> Path:
    """The program, which runs lines before a collective; `calls` is the number of its calls."""
    (folder / "mlp.ir").write_text(PROGRAM)
    directory = shardir.compile_file(folder / "mlp.ir").save(folder / "program")
    path = directory / "program.py"
    text = path.read_text()
    assert text.count(before) == 1
    text = text.replace(before, "".join(f"    {x}\n" for x in lines.splitlines()) + before)
    counted = "def step(mesh, x, t, w1, w2):\n    global calls\n    calls += 1\n"
    text = text.replace("def step(mesh, x, t, w1, w2):\n", f"calls = 0\n{counted}")
    path.write_text(f"import os, time\n{text}")
    return directory


def message(directory: Path, timeout: float, steps: int = 10**6, **options: str) -> list[str]:
    with pytest.raises(RunError) as caught:
        shardir.run(directory, steps=steps, timeout=timeout, **options)
    return str(caught.value).splitlines()


def matches(patterns: list[str], lines: list[str]) -> None:
    assert len(patterns) == len(lines), "\n".join(lines)
    for pattern, line in zip(patterns, lines, strict=True):
        assert re.fullmatch(pattern, line), f"{pattern}\n" + "\n".join(lines)


STOP = "if calls == 5 and mesh.rank == 3: os.kill(os.getpid(), 19)"


@pytest.mark.parametrize("backend", extent(["gloo"], ["gloo", "shm"]))
def test_a_rank_that_is_stopped(backend, tmp_path):
    """The others go on as far as they can: ranks 0 and 2 have summed the gradients."""
    first, *rest = message(program(tmp_path, GRADIENTS, STOP), 3, backend=backend)
    assert "rank 3 is stopped" in first
    place = r" \(mlp\.ir:13, mlp\.ir:9, mlp\.ir:10, program\.py:\d+\)"
    matches([
        rf"  rank 3 has not come to {AT_GRADIENTS}, the others are up to 2 collectives further",
        r"  ranks 0, 2: step 6, in all-reduce of y \(mlp\.ir:10, program\.py:\d+\)",
        rf"  rank 1: step 5, in all-reduce of loss, d_w1, d_w2{place}",
        r"  rank 3: step 5, after all-reduce of y \(mlp\.ir:10, program\.py:\d+\)",
    ], rest)  # fmt: skip


@long_form
def test_a_rank_that_is_slow(tmp_path):
    lines = "if calls == 5 and mesh.rank == 3: time.sleep(60)"
    first, *rest = message(program(tmp_path, PRODUCT, lines), 3)
    assert "rank 3" in first
    assert re.fullmatch(rf"  rank 3 has not come to {AT_PRODUCT}, .*", rest[0]), rest


def test_a_rank_that_leaves_out_a_collective(tmp_path):
    """It is one ahead then, and its collectives meet later ones of the others: only at the end is
    there none."""
    directory = program(tmp_path, PRODUCT, "pass")
    path = directory / "program.py"
    call = '    y = rt.all_reduce(mesh, y, "sum", ("tp",), donate=True)\n'
    text = path.read_text()
    assert text.count(call) == 1
    path.write_text(text.replace(call, f"    if calls != 5 or mesh.rank != 3:\n    {call}"))
    lines = message(directory, 3, steps=8)
    went = rf"  rank 3 went to {AT_GRADIENTS}, the others to {AT_PRODUCT}: .*"
    assert any(re.fullmatch(went, line) for line in lines), lines


@pytest.mark.parametrize("backend", extent(["shm"], ["gloo", "shm"]))
def test_a_rank_that_is_killed(backend, tmp_path):
    lines, before = "if calls == 5 and mesh.rank == 3: os.kill(os.getpid(), 9)", shared_files()
    found = message(program(tmp_path, GRADIENTS, lines), 60, backend=backend)
    assert found[0].startswith("rank 3 was killed by SIGKILL")
    *places, use = found[1:]
    matches([r"  rank 3: step 5, after all-reduce of y \(mlp\.ir:10, program\.py:\d+\)"], places)
    assert use.startswith("  help: smaller batches, fsdp or recompute need less memory; ")
    assert shared_files() == before


def shared_files() -> set[str]:
    """Return the names of shared memory."""
    folder = Path("/dev/shm")
    return {file.name for file in folder.iterdir()} if folder.is_dir() else set()


@long_form
def test_ranks_of_other_machines(tmp_path):
    """Node 0 tells of rank 3, which is on node 1."""
    nodes = Nodes(program(tmp_path, GRADIENTS, STOP), "--steps=1000000")
    for rank in (0, 1):
        nodes.start(rank, 2, "--timeout=8")
    nodes.agents[0][0].wait()
    nodes.kill(1)  # its agent would wait for half a minute until it kills the rank
    code, output = nodes.end()[0]
    lines = output.splitlines()
    (at,) = [i for i, line in enumerate(lines) if line.startswith("error: ")]
    assert code == 1
    matches([
        rf"  rank 3 has not come to {AT_GRADIENTS}, the others are up to 2 collectives further",
        r"  ranks 0, 2: step 6, in all-reduce of y .*",
        r"  rank 1: step 5, in all-reduce of loss, d_w1, d_w2 .*",
        r"  rank 3: step 5, after all-reduce of y .*",
    ], lines[at + 1 : at + 5])  # fmt: skip


@long_form
def test_ranks_of_stages(tmp_path):
    """Ranks 0 and 1 are the first stage. Rank 1 stops in its backward part, before it has ended its
    last forward part; rank 3 waits for what that makes."""
    page = (Path(__file__).parents[2] / "docs/guides/stages.md").read_text()
    (tmp_path / "stages.ir").write_text(page.partition("```mlir\n")[2].partition("```")[0])
    directory = shardir.compile_file(tmp_path / "stages.ir").save(tmp_path / "program")
    path, head = directory / "program.py", "def step_backward_0(mesh, a, d_a, x):\n"
    text = path.read_text()
    assert text.count(head) == 1
    assert '"0F0 0F1 0B0 0F2 ' in text
    lines = (
        "global calls",
        "calls += 1",
        # What it has sent before leaves it first: threads of Gloo do that.
        "if mesh.rank == 1 and calls == 5: time.sleep(1.5); os.kill(os.getpid(), 19)",
    )
    text = text.replace(head, head + "".join(f"    {x}\n" for x in lines))
    path.write_text(f"import os, time\ncalls = 0\n{text}")
    first, *rest = message(directory, 3)
    assert "rank 1 is stopped" in first
    place = r"in step_forward_1 \(stages\.ir:10, program\.py:\d+\)"
    matches([
        r"  rank 1 is in 0B0, the others are 3 collectives further",
        r"  rank 0: step 2, 0B2 for d_a, in step_backward_0 .*",
        r"  rank 1: step 2, 0B0, after step_backward_0 .*",
        r"  rank 2: step 2, 1F2, in all-reduce of y .*",
        rf"  rank 3: step 2, 1F2 for a, {place}",
    ], rest)  # fmt: skip
