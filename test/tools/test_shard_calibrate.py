"""shard-calibrate: its probes, the errors that it reports, and its command line."""

import re
from itertools import product
from math import log
from pathlib import Path

import pytest

import shardir
from shardir.cost import Coefficients, report
from shardir.tools import calibrate, fitted_cluster
from shardir.tools.collective_probes import CLOSE, MIXED, groups
from shardir.tools.probe_functions import sizes
from shardir.tools.probes import OPS, module, probes


def test_groups_and_sizes() -> None:
    assert groups(12) == [2, 3, 4, 6, 12]
    assert sizes(1 << 16) == [1 << 12, 1 << 14, 1 << 16]
    assert sizes(1) == [1 << 12]


@pytest.mark.parametrize("ranks", [1, 2, 3, 6])
def test_probes_are_programs_on_any_number_of_ranks(ranks: int) -> None:
    given = probes(ranks, 1 << 14)
    found = report(shardir.compile(module(given, ranks), "").module)
    assert [f.name for f in found] == [p.name for p in given if p.text]
    ops = {v.name_hint for c in found[-1].ops for v in c.op.results}
    assert ops >= {p.name for p in given if not p.text}
    extents = {f.mesh.extent(c.axes) for f in found for c in f.ops if c.communicates}
    assert extents == set(groups(ranks))


def recorded(compiled: shardir.Compiled, name: str) -> dict[str, list[int] | int]:
    """A call of a function in which each line takes some time, and two microseconds of work, one of
    them of the thread that computes."""
    lines = compiled.program.splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith(f"def {name}("))
    last = next(i for i, line in enumerate(lines) if i > first and line.startswith("    return"))
    numbers = [i + 1 for i in range(first, last) if re.match(r"\s+(v\d|_)[\w, ]* = ", lines[i])]
    times, own = [9 * i * i for i in range(len(numbers))], [1000] * len(numbers)
    return {
        "begin": 0, "end": 10**9, "lines": numbers, "times": times, "work": [2000] * len(numbers),
        "own": own, "spans": [],
    }  # fmt: skip


def test_ops_take_their_work_and_collectives_what_a_call_takes_beyond_it() -> None:
    """Of a microsecond for each op, two for collectives, which other threads move too, a call of
    100 microseconds and one that others have let end early, of which counts what the rank is itself
    at work for."""
    long, early = "all_reduce_2_4096", "close_all_gather0_2_4096"
    given = [p for p in probes(2, 1 << 12) if p.name in (long, early, OPS) or not p.text]
    compiled = shardir.compile(module(given, 2), "")
    calls = {p.name: [recorded(compiled, p.name)] * 3 for p in given if p.text}
    seconds = {long: [1e-4], early: [1e-6], OPS: [1.0]}
    found = fitted_cluster.medians(given, compiled, seconds, [calls] * 2)
    ops = [p.name for p in given if not p.text and p.size]  # others are in loops
    assert ops and [found[name] for name in ops] == pytest.approx([1e-6] * len(ops))
    assert found[long] == pytest.approx(1e-4 - (2 * len(MIXED) + 2 + 1) * 1e-6)
    assert found[early] == pytest.approx(CLOSE * 2e-6)
    worked = fitted_cluster.working(compiled, seconds, [calls] * 2)
    assert [worked[name] for name in (long, early)] == pytest.approx([4e-6, CLOSE * 2e-6])


def test_errors_are_of_the_ratio_either_way() -> None:
    a, b = [p for p in probes(4, 1 << 14) if p.about == "f64"][:2]
    on, ones = fitted_cluster.initial_cluster(4, 10**9), Coefficients(1, 1, 1, 1)
    found = fitted_cluster.Calibration(on, ones, {a: 0.5, b: 4.0})
    assert found.errors() == {"f64": [pytest.approx(1.0), pytest.approx(3.0)]}
    assert log(2) == pytest.approx(-log(0.5))


def test_of_a_busy_machine_the_file_is_written_with_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two of the four cores run other processes, then one more."""
    file, found = tmp_path / "here.ir", fitted_cluster.initial_cluster(4, 10**9)
    for others, code in ((2.0, 0), (3.0, 3)):
        load = calibrate.other_load(others, 4 + 1 + others, ranks=4, cores=4)
        assert load == others / 4
        measured = fitted_cluster.Calibration(found, Coefficients(1, 1, 1, 1), {}), [], load
        monkeypatch.setattr(calibrate, "_measure", lambda options, all=measured: all)
        file.unlink(missing_ok=True)
        assert calibrate.main(["--ranks", "4", "-o", str(file)]) == code
        assert file.exists()
        told = capsys.readouterr().err
        assert ("got 0.8 other running processes for each core" in told) == (code == 3)


def test_load_counts_before_and_after_the_ranks() -> None:
    for before, after in product((0.0, 1.0, 3.0), repeat=2):
        load = calibrate.other_load(before, 2 + 1 + after, ranks=2, cores=2)
        assert load == max(before, after) / 2
    assert calibrate.other_load(0.0, 1.0, ranks=2, cores=2) == 0  # the ranks ran for a short time


WRONG = [
    (["--ranks", "0"], "argument --ranks: expected 1 or more, got 0"),
    (["--ranks", "1"], "expected 2 ranks or more, or --ranks 1 with --links, got one rank without"),
    (["--links", "h200"], "or --ranks 1 with --links, got 4 ranks with --links"),
    (["--ranks", "x"], "argument --ranks: invalid"),
    (["--most", "100"], "argument --most: expected 4096 or more, got 100"),
    (["--rounds", "0"], "argument --rounds: expected 1 or more, got 0"),
    (["--turn", "0"], "argument --turn: expected more than 0, got 0"),
    (["--name", "a b"], "argument --name: expected a name, got 'a b'"),
    (["--backend", "mpi"], "argument --backend: expected gloo, nccl or shm"),
    (
        ["-o", "no/such/folder/x.ir"],
        "expected a file in a writable folder, got no/such/folder/x.ir",
    ),
    (["x.ir"], "expected no further argument, got x.ir"),
]


@pytest.mark.parametrize(("flags", "message"), WRONG, ids=[" ".join(f) for f, _ in WRONG])
def test_wrong_flags(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        calibrate.main(flags)
    assert end.value.code == 2
    errors = [l for l in capsys.readouterr().err.splitlines() if "error:" in l]
    assert len(errors) == 1 and message in errors[0]
