"""The interface of backends, with a second backend."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar

import pytest
from xdsl.context import Context
from xdsl.dialects.builtin import ModuleOp

import shardir
from shardir.backend import BACKENDS, backend_of
from shardir.backend.interface import Backend, Origin
from shardir.backend.runs import Batches, LaunchError, MeasuredTimes, OnEvent, Options, Report
from shardir.backend.torch.backend import TorchBackend
from shardir.dialects.installed import installed
from shardir.dialects.nn.base import Array
from shardir.tools import opt

PROGRAM = """
dist.mesh @m <a = 2>
func.func @double(%x: tensor<4xf32, #dist.layout<@m, [{a}]>>) -> tensor<f32> {
  %y = nn.add %x, %x : (tensor<4xf32, #dist.layout<@m, [{a}]>>, tensor<4xf32, #dist.layout<@m, [{a}]>>) -> tensor<4xf32>
  %s = nn.reduce <sum> %y dims <0> : (tensor<4xf32>) -> tensor<f32>
  func.return %s : tensor<f32>
}
"""  # noqa: E501 - the text of a program


@dataclass(frozen=True)
class Listing(Backend):
    """A backend that emits the names of a program's ops, one per line; a run counts them."""

    name: ClassVar[str] = "listing"

    def text(self, module: ModuleOp) -> str:
        return "".join(f"{op.name}\n" for op in module.walk() if op.name != "builtin.module")

    def emit_directory(
        self,
        ctx: Context,
        module: ModuleOp,
        original_module: ModuleOp | None,
        out_dir: str | Path,
        base_dir: Path | None = None,
        origin: Origin | None = None,
        states: Mapping[str, Array] = MappingProxyType({}),
    ) -> None:
        Path(out_dir).mkdir(exist_ok=True)
        (Path(out_dir) / "listing.txt").write_text(self.text(module))
        if self.per_rank:
            (Path(out_dir) / "listing_rank0.txt").write_text(self.text(module))

    def run(
        self, directory: str | Path, options: Options, on_event: OnEvent | None = None,
        batches: Batches | None = None,
    ) -> Report:  # fmt: skip
        path = Path(directory) / "listing.txt"
        if not path.is_file():
            raise LaunchError(f"{directory} has no listing.txt")
        report = Report(1, options.backend)
        ops = {"event": "result", "name": "ops", "value": len(path.read_text().splitlines())}
        report.add(ops)
        if on_event is not None:
            on_event(ops)
        return report

    def measure(
        self,
        directories: Sequence[Path],
        rounds: int,
        seconds: float,
        options: Options,
        on_round: Callable[[int], object] | None = None,
    ) -> MeasuredTimes:
        return [{"run": [self._seconds(d, options) for _ in range(rounds)]} for d in directories]

    def _seconds(self, directory: Path, options: Options) -> float:
        begun = time.perf_counter()
        self.run(directory, options)
        return time.perf_counter() - begun


def test_a_program_is_emitted_saved_run_and_measured_by_any_backend(tmp_path: Path) -> None:
    compiled = shardir.compile(PROGRAM, target=Listing())
    names = compiled.program.splitlines()
    assert names[:2] == ["dist.mesh", "func.func"] and "dist.all_reduce" in names
    saved = compiled.save(tmp_path / "out", per_rank=True)
    assert {p.name for p in saved.iterdir()} == {"listing.txt", "listing_rank0.txt"}
    for report in (compiled.run(), shardir.run(compiled), compiled.backend.run(saved, Options())):
        assert report.results[0]["value"] == len(names)
    (times,) = compiled.backend.measure([saved], 3, 0.0, Options())
    assert len(times["run"]) == 3


def test_backends_have_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are xDSL's targets too."""
    assert backend_of("torch") == TorchBackend() and backend_of(Listing()) == Listing()
    with pytest.raises(shardir.ShardirError, match="expected a backend, one of torch, got 'tpu'"):
        shardir.compile(PROGRAM, target="tpu")
    monkeypatch.setitem(BACKENDS, "listing", lambda: Listing)
    assert shardir.compile(PROGRAM, target="listing").backend == Listing()


def test_shard_opt_emits_with_any_backend(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(installed().tables["targets"], "listing", lambda: Listing)
    (tmp_path / "p.ir").write_text(PROGRAM)
    assert opt.main([str(tmp_path / "p.ir"), "-p", "train", "-t", "listing"]) == 0
    text = capsys.readouterr().out
    assert "dist.all_reduce" in text.splitlines()
    command = [str(tmp_path / "p.ir"), "-p", "train", "-t", "listing{per-rank=true}"]
    assert opt.main([*command, "-o", str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "listing.txt").read_text() == text
    assert (tmp_path / "out" / "listing_rank0.txt").is_file()


def test_all_methods_are_required() -> None:
    with pytest.raises(TypeError, match="abstract"):
        type("Half", (Backend,), {"name": "half", "text": Listing.text})()
