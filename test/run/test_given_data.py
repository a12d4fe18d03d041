# ruff: noqa: E402 (torch may not be installed)
"""Runs with data of files: of the command line, of programs, and what is wrong with them."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from support.ranks import orders, sample

torch = pytest.importorskip("torch")

from support.ranks.example_runs import EXAMPLES

import shardir
from shardir.dialects.random import fill
from shardir.tools import run as tool


def test_tokens_train_a_program(ran):
    """The next byte of a text, on four ranks and in torch."""
    example, steps = ran("tokens", steps=25), 25
    text = np.fromfile(EXAMPLES / "licence.bin", "u1").astype(np.int64)
    args = example.args("step")
    table, out = (torch.nn.Parameter(args[name]) for name in ("table", "out"))
    adam, losses = torch.optim.Adam([table, out], lr=0.05), []
    for step in range(steps):
        first = np.array(orders.batch_rows((len(text) - 1) // 32, step, 16, 0))[:, None] * 32
        x, y = (torch.tensor(text[first + np.arange(32) + shift]) for shift in (0, 1))
        logits = torch.relu(table[x]) @ out
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())
        adam.zero_grad()
        loss.backward()
        adam.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 2
    np.testing.assert_allclose(example.dump["losses/step"], losses, rtol=1e-4)


TOKENS = """
func.func private @loss(
    %x: tensor<4x8xi32> {train.input = #train.init<tokens, path = "t.bin", INPUT>},
    %y: tensor<4x8xi32>
        {train.input = #train.init<tokens, path = "t.bin", type = "u16", shift = 1>},
    %w: tensor<256x256xf32> {train.parameter = "w", train.init = #train.init<normal>}
) -> tensor<f32> {
  %e = nn.gather %w, %x axis 0 : (tensor<256x256xf32>, tensor<4x8xi32>) -> tensor<4x8x256xf32>
  %l = nn.cross_entropy %e, %y : (tensor<4x8x256xf32>, tensor<4x8xi32>) -> tensor<4x8xf32>
  %loss = nn.reduce <mean> %l dims <0, 1> : (tensor<4x8xf32>) -> tensor<f32>
  func.return %loss : tensor<f32>
}
train.step @step of @loss <sgd, lr = 0.1>
"""


@pytest.mark.parametrize(
    ("given", "size", "message"),
    [
        ('type = "u16"', 101, "%x: .*t.bin cannot be read: expected tokens of 2 bytes"),
        ('type = "u16"', None, "%x: .*t.bin cannot be read: expected the file .*t.bin, got none"),
        ('type = "f16"', 100, "%x: .* expected the type of its tokens .*, got 'f16'"),
        ('type = "u16"', 16, r"%x: expected at least 1 rows of \[8\], got .*\[0, 8\]"),
        ('type = "u8"', 100, "%x is fed with 12 rows, .* %y with 6 rows"),
        ('type = "u16", shift = 2', 100, "shift"),
        ('type = "u16"', 100, ""),
    ],
)
def test_tokens_of_a_program_are_checked_where_it_is_compiled(given, size, message, tmp_path):
    if size is not None:
        (tmp_path / "t.bin").write_bytes(bytes(size))
    text = TOKENS.replace("INPUT", given)

    def compile_it():
        shardir.compile(text, mode="stand_alone", base_dir=tmp_path).save(tmp_path / "out")

    if message:
        with pytest.raises(shardir.ShardirError, match=message):
            compile_it()
    else:
        compile_it()
        plan = json.loads((tmp_path / "out/plan.json").read_text())
        inits = [a["init"] for a in plan["functions"]["step"]["args"][:2]]
        assert inits == [{"kind": "file", "file": "data/t_u16.npy", "shift": k} for k in (0, 1)]


def test_a_run_is_given_its_data(tmp_path, capsys):
    directory = sample.write(tmp_path / "dir")
    x, t = np.load(directory / "data/x.npy")[::-1], np.load(directory / "data/t.npy")[::-1]
    np.savez(tmp_path / "train.npz", x=x, t=t.astype("<f4"))
    np.save(tmp_path / "test.npy", x[20:])
    words = [f"--data=x,t={tmp_path}/train.npz", f"--data=predict.x={tmp_path}/test.npy"]
    given = tmp_path / "given.npz"
    assert tool.main([str(directory), "--check", f"--dump={given}", "--steps=9", *words]) == 0
    assert capsys.readouterr().out.count(": agree") == 4
    with np.load(given) as found:
        np.testing.assert_allclose(found["results/predict/2"], x[20:36].sum(), rtol=1e-4)
        w1, w2 = (fill("normal", sample.NORMAL, shape, None, f"0/{key}", np.float64)
                  for key, shape in (("w1", (8, 9)), ("w2", (9, 3))))  # fmt: skip
        h = x[orders.batch_rows(40, 0, 15, 0)].astype(float) @ w1
        want = ((np.maximum(h, 0) @ w2 - t[orders.batch_rows(40, 0, 15, 0)]) ** 2).sum() / 45
        np.testing.assert_allclose(found["losses/step"][0], want, rtol=1e-4)


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("x=none.npy", "expected the file .*none.npy, got none"),
        ("z=x.npy", "expected an input of x, t, scale, predict.x, got 'z'"),
        ("x=wide.npy", r"shape \[40, 9\] does not fit the shape \[15, 8\]"),
        ("predict.x=short.npy", r"shape \[14, 8\] does not fit the shape \[16, 8\]"),
        ("x=short.npy", "expected at least the 15 rows of a batch, got 14 of x|expected equally"),
        ("x=more.npy", "expected equally many rows.*40 of t|expected equally many rows.* 41 of x"),
        ("x,x=x.npy", "the data of x is given twice"),
        ("x=cut.bin:u16", "the file is cut off, or has another type"),
        ("x=cut.bin", "expected the type of its tokens"),
        ("x,t=few.bin:u8", "expected more than the 8 tokens of a sequence, got 8"),
    ],
)
def test_wrong_data_is_an_error_before_a_rank_starts(word, message, tmp_path, capsys, monkeypatch):
    directory = sample.write(tmp_path / "dir")
    monkeypatch.chdir(tmp_path)
    for name, shape in {"x": (40, 8), "wide": (40, 9), "short": (14, 8), "more": (41, 8)}.items():
        np.save(f"{name}.npy", np.zeros(shape, "<f4"))
    Path("cut.bin").write_bytes(b"123")
    Path("few.bin").write_bytes(b"12345678")
    monkeypatch.setattr("shardir.backend.torch.launch.start.Ranks", None)
    assert tool.main([str(directory), "--data", word]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert re.search(f"error: .*({message})", error), error


def test_data_are_names_and_files(tmp_path, capsys):
    directory = sample.write(tmp_path / "dir")
    for word in ("x", "x=", "x=a.txt", "x=a.npy:"):
        with pytest.raises(SystemExit) as end:
            tool.main([str(directory), "--data", word])
        assert end.value.code == 2
        assert "expected NAMES=FILE, such as" in capsys.readouterr().err
