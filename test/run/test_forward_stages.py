"""Forward parts alone in stages on real ranks: as one device, by torch."""

import json
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.extent import extent
from support.forked import server
from support.ranks.example_runs import EXAMPLES
from torch import nn

import shardir
from shardir.backend.runs import Options
from shardir.backend.torch.launch.forks import share_forks
from shardir.backend.torch.launch.report import Progress, run_and_check
from shardir.backend.torch.launch.start import read_plan

WIDTH, BATCH, MICROBATCHES = 8, 4, 3


class Net(nn.Module):
    """Residual layers; the first value is added to what the head reads."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> Any:
        first = x
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        y = self.head(x + first)
        return y, y.square().mean(), y.argmax(-1), y > 0


def _loss(outputs: Any, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs[0], labels)


def _batches() -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(1)
    shape = (BATCH, WIDTH)
    return [torch.randn(shape, generator=random, dtype=torch.float64) for _ in range(MICROBATCHES)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    """A checkpoint of a training in three stages, and the weights in it."""
    folder = tmp_path_factory.mktemp("trained") / "checkpoints"
    x, labels = _batches()[0], torch.zeros(BATCH, dtype=torch.long)
    program = shardir.compile(
        Net().double(), x, labels=labels, loss=_loss, optimizer="sgd, lr = 0.5",
        stages="1f1b, ranks = 3",
    )  # fmt: skip
    with share_forks(server()):
        program.run([(x, labels)], steps=2, checkpoints=folder, timeout=60)
    return folder, program.state_dict()


CASES: list[tuple[int, dict[str, Any]]] = [
    (MICROBATCHES, {"stages": "interleaved, ranks = 2, chunks = 2"}),
    (1, {"stages": "gpipe, ranks = 2", "mesh": "dp = 2", "plan": "fsdp"}),
    (MICROBATCHES, {"stages": "search, ranks = 2, chunks = 2", "mesh": "tp = 2"}),
    (MICROBATCHES, {"stages": "zbv, ranks = 2, chunks = 2", "mesh": "dp = 2", "plan": "zero1"}),
    (MICROBATCHES, {"mesh": "dp = 2"}),
]
"""The last one is in microbatches without stages."""


@pytest.mark.parametrize(("microbatches", "options"), extent(CASES[1:2], CASES))
def test_inference_in_stages_is_that_of_one_device(
    microbatches: int, options: dict[str, Any], tmp_path: Path,
    trained: tuple[Path, dict[str, torch.Tensor]],
) -> None:  # fmt: skip
    """Results have the rows of all microbatches in order, a scalar is their mean; the weights are
    those of a checkpoint of a training in other stages, of which a rank holds those of its own."""
    model, batches = Net().double(), _batches()
    accumulate = f"mean, microbatches = {microbatches}"
    program = shardir.compile(model, batches[0], train=False, accumulate=accumulate, **options)
    with torch.no_grad():
        own = model(torch.cat(batches[:microbatches]))[0]
    torch.testing.assert_close(program(torch.cat(batches[:microbatches]))[0], own)
    out = program.save(tmp_path / "out", batches[:microbatches])
    dump = tmp_path / "dump.npz"
    report = shardir.run(out, weights=trained[0], dump=dump, timeout=60)

    model.load_state_dict(trained[1])
    with torch.no_grad():
        each = list(zip(*(model(x) for x in batches[:microbatches]), strict=True))
    scores = torch.stack(each[1]).mean()
    expected = [torch.cat(each[0]), scores, torch.cat(each[2]), torch.cat(each[3])]
    with np.load(dump) as found:
        for i, (y, reported) in enumerate(zip(expected, report.results, strict=True)):
            got = found[f"results/forward/{i}"]
            assert got.shape == y.shape == tuple(reported["shape"])
            np.testing.assert_allclose(got, y, rtol=1e-12, atol=1e-12)
    if "stages" in options:
        plan = json.loads((out / "plan.json").read_text())
        places = [a["at"] for a in plan["functions"]["forward"]["args"] if a["role"] != "input"]
        assert {len(at) for at in places} == {1} and {at[0] for at in places} == {0, 1}


def _towers() -> tuple[str, str]:
    """Return the program of the example, and the function that it is of, without comments."""
    lines = (EXAMPLES / "towers.ir").read_text().splitlines()
    text = "\n".join(line for line in lines if not line.startswith("//")) + "\n"
    return text, text[text.index("func.func") : text.index("train.forward")]


def test_towers_on_ranks_of_their_own_are_one_device(tmp_path: Path) -> None:
    """Two encoders and what compares them, which are trained in the same stages."""
    text, body = _towers()
    for old, new in (
        ("@compared", "@loss"), ("(tensor<4x4xf32>, tensor<f32>) {\n", "tensor<f32> {\n"),
        ("%g, %score : tensor<4x4xf32>, tensor<f32>", "%score : tensor<f32>"),
    ):  # fmt: skip
        assert old in body
        body = body.replace(old, new)
    several = "accumulate <mean, microbatches = 4> pipeline <1f1b, ranks = 3>"
    text += f"{body}train.step @step of @loss <sgd, lr = 0.5> {several}\n"
    out = shardir.compile(text).save(tmp_path / "out")
    plan = read_plan(out)
    progress = Progress("", 2, 2, StringIO())
    report, differences = run_and_check(plan, Options(steps=2, timeout=60), progress)
    assert [d.agrees for d in differences] == [True] * 3
    assert tuple(report.results[0]["shape"]) == (16, 4)
    assert report.losses["step"][1] < report.losses["step"][0]
    edges = {(source, target) for _, source, target in plan.channels}
    assert edges == {(0, 2), (1, 2), (2, 0), (2, 1)}


@pytest.mark.parametrize(
    ("pipeline", "message"),
    [
        ("gpipe, ranks = 3", r"expected 'image.1' on ranks \[0\] of the stages, as in @similarity, "
         r"got \[1\]; mark the same stages"),
        ("looped-bfs, ranks = 1, chunks = 3", "expected stages on 3 ranks, as of another function, "
         "got 1; use as many"),
    ],
)  # fmt: skip
def test_stages_of_several_functions_are_on_the_same_ranks(
    pipeline: str, message: str, tmp_path: Path
) -> None:
    text, body = _towers()
    body = body.replace("@compared", "@other").replace("train.stage = 1", "train.stage = 0")
    body = body.replace("%image, %u1 :", "%image, %u1 {train.stage = 1 : i64} :")
    with pytest.raises(shardir.ShardirError, match=message):
        text = f"{text}{body}train.forward @f of @other pipeline <{pipeline}>\n"
        shardir.compile(text).save(tmp_path / "out")
