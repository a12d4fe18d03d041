"""--mode and `mode=`: each mode is its pipeline, with the options of its passes."""

from pathlib import Path

import pytest
from support.runlines import run_tool

import shardir
from shardir.diagnostics import ShardirError
from shardir.passes import PIPELINES
from shardir.pipelines import MODES

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "modes.ir"
TEXT = EXAMPLE.read_text()
PRODUCT = """
dist.cluster @c <levels [box = 2 {bandwidth = 1e+11, latency = 1e-07}], flops {f32 = 1e+8}>
dist.mesh @m <d = 2> on @c
func.func private @loss(
    %x: tensor<64x16xf32> {train.input = #train.init<normal>},
    %w: tensor<16x8xf32> {train.parameter = "w", train.init = #train.init<normal>}
) -> tensor<f32> {
  %y = nn.matmul %x, %w : (tensor<64x16xf32>, tensor<16x8xf32>) -> tensor<64x8xf32>
  %loss = nn.reduce <mean> %y dims <0, 1> : (tensor<64x8xf32>) -> tensor<f32>
  func.return %loss : tensor<f32>
}
train.step @step of @loss <sgd, lr = 0.1>
"""
"""A program of which searches take little time."""


def opt(*options: str, of: Path = EXAMPLE) -> tuple[int, str, str]:
    return run_tool(["shard-opt", str(of), *options], b"")


@pytest.mark.parametrize("mode", [m for m in MODES if m != "manual"])
def test_a_mode_is_its_pipeline(mode: str) -> None:
    assert MODES[mode].pipeline in PIPELINES
    code, text, err = opt("--mode", mode)
    assert (code, err) == (0, "")
    assert text == opt("-p", MODES[mode].pipeline)[1]
    assert text == shardir.compile(TEXT, mode=mode).text
    # all but stand_alone end in the local view
    assert ("#dist.local" in text) == (mode != "stand_alone") and "#dist.layout" not in text


@pytest.mark.parametrize(
    ("spelling", "mode"),
    [
        ("STAND_ALONE", "stand_alone"),
        ("semi_auto_parallel", "semi_auto"),
        ("semi-auto", "semi_auto"),
        ("HYBRID_PARALLEL", "hybrid"),
        ("auto_parallel", "auto"),
    ],
)
def test_mindspores_names_are_modes(spelling: str, mode: str) -> None:
    assert opt("--mode", spelling) == opt("--mode", mode)


def test_manual_accepts_inferred_layouts() -> None:
    """A program with all inferred layouts annotated compiles to the same as without annotations."""
    annotated = shardir.compile(TEXT, "inline-calls,propagate-strategies").text
    assert "#dist.layout" in annotated
    assert shardir.compile(annotated, mode="manual").text == shardir.compile(annotated).text
    with pytest.raises(
        ShardirError, match=r"\[A4\] expected layouts of %x, %y, %up, %down in @loss, got none"
    ):
        shardir.compile(TEXT, mode="manual")


def test_a_mode_and_a_pipeline_are_two_pipelines(tmp_path: Path) -> None:
    both = "expected a mode or a pipeline, got the mode auto and 'train'; use one of them"
    code, out, err = opt("--mode=auto", "-p", "train")
    assert (code, out, err) == (2, "", f"shard-opt: error: {both}\n")
    words = ["shard-run", str(EXAMPLE), "--mode=auto", "--pass-pipeline=train"]
    code, _, err = run_tool(words, b"")
    assert (code, err) == (2, f"error: {both}\n")
    with pytest.raises(ShardirError, match=both):
        shardir.compile(TEXT, "train", mode="auto")
    compiled = shardir.compile_file(EXAMPLE).save(tmp_path / "out")
    code, _, err = run_tool(["shard-run", str(compiled), "--mode=auto"], b"")
    assert code == 2 and "is compiled already; --mode is for an .ir file" in err
    with pytest.raises(ShardirError, match="is compiled already"):
        shardir.run(compiled, mode="auto")


def test_an_unknown_mode_is_refused() -> None:
    code, _, err = opt("--mode=semiauto")
    assert (code, err) == (
        2,
        "shard-opt: error: there is no mode semiauto; did you mean semi_auto?\n",
    )
    assert "there are stand_alone, data, hybrid, semi_auto, auto, manual" in opt("--mode=best")[2]
    code, _, err = run_tool(["shard-run", str(EXAMPLE), "--mode=atuo"], b"")
    assert (code, err) == (2, "error: there is no mode atuo; did you mean auto?\n")


def test_a_mode_is_run() -> None:
    report = shardir.run(EXAMPLE, mode="stand_alone", steps=2)
    assert report.ranks == 1 and len(report.losses["step"]) == 2


def test_a_mode_has_the_options_of_its_passes(tmp_path: Path) -> None:
    path = tmp_path / "product.ir"
    path.write_text(PRODUCT)
    roomy = shardir.compile(PRODUCT, "auto{max-bytes=1024 memory=16000000000}").text
    assert opt("--mode", "auto{memory=16GB max-bytes=1KiB}", of=path) == (0, roomy, "")
    assert shardir.compile(PRODUCT, mode="AUTO_PARALLEL{memory=16GB max-bytes=1KiB}").text == roomy
    tight = "@step: expected a plan within 100 B on a device"
    code, _, err = opt("--mode", "auto{memory=100B}", of=path)
    assert code == 1 and tight in err
    code, _, err = run_tool(["shard-run", str(path), "--mode=auto{memory=100B}"], b"")
    assert code == 2 and tight in err


@pytest.mark.parametrize(
    ("mode", "message"),
    [
        ("auto{memry=1}", "pipeline auto has no option memry; did you mean memory?"),
        ("auto{x=1}", "pipeline auto has no option x; it has schedule, memory, entries, gap, "
         "recompute, offload, overlap, graph, recompute-collectives, nearest, save-schedule, "
         "max-bytes"),
        ("semi_auto{gap=0.1}", "pipeline train has no option gap; it has search, schedule, memory, "
         "recompute, recompute-collectives, offload, nearest, save-schedule, max-bytes"),
        ("hybrid{hybrid=false}", "pipeline hybrid has no option hybrid; it has search, schedule, "
         "memory, recompute, recompute-collectives, offload, nearest, save-schedule, max-bytes"),
        ("stand_alone{x=1}", "pipeline single-device has no option x; it has recompute, "
         "recompute-collectives, offload, schedule, nearest"),
        ("auto{memory=lots}", "pass assign-stages: option memory: expected a size such as "
         "16GB or 512MiB, got 'lots'"),
        ("auto{memory=1", "pass pipeline: expected a closing bracket or quote, "
    "got none in 'auto{memory=1'"),
        ("auto{memory=1}x", "pass pipeline: unexpected text after the options of "
         "'auto{memory=1}x'"),
        ("atuo{memory=1}", "there is no mode atuo; did you mean auto?"),
    ],
)  # fmt: skip
def test_options_that_a_mode_does_not_have(mode: str, message: str) -> None:
    assert opt("--mode", mode) == (2, "", f"shard-opt: error: {message}\n")
    with pytest.raises(ShardirError) as e:
        shardir.compile(TEXT, mode=mode)
    assert str(e.value) == message
