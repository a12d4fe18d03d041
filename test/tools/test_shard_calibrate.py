"""shard-calibrate: its probes, the errors that it reports, and its command line."""

from math import log

import pytest

import shardir
from shardir.cost import Coefficients, report
from shardir.tools import calibrate
from shardir.tools.probes import groups, module, probes, sizes


def test_groups_and_sizes() -> None:
    assert groups(12) == [2, 3, 4, 6, 12]
    assert sizes(1 << 16) == [1 << 12, 1 << 14, 1 << 16]
    assert sizes(1) == [1 << 12]


@pytest.mark.parametrize("ranks", [2, 3, 6])
def test_probes_are_programs_on_any_number_of_ranks(ranks: int) -> None:
    given = probes(ranks, 1 << 14)
    found = report(shardir.compile(module(given, ranks), "").module)
    assert [f.name for f in found] == [p.name for p in given]
    extents = {f.mesh.extent(c.axes) for f in found for c in f.ops if c.communicates}
    assert extents == set(groups(ranks))


def test_errors_are_of_the_ratio_either_way() -> None:
    a, b = probes(4, 1 << 14)[:2]
    assert a.about == b.about == "f64"
    on, ones = calibrate.unmeasured(4, 10**9), Coefficients(1, 1, 1, 1)
    found = calibrate.Calibration(on, ones, {a: 0.5, b: 4.0})
    assert found.errors() == {"f64": [pytest.approx(1.0), pytest.approx(3.0)]}
    assert log(2) == pytest.approx(-log(0.5))


WRONG = [
    (["--ranks", "1"], "expected 2 ranks or more, got 1"),
    (["--ranks", "x"], "argument --ranks: invalid"),
    (["--most", "100"], "argument --most: expected 4096 or more, got 100"),
    (["--rounds", "0"], "argument --rounds: expected 1 or more, got 0"),
    (["--turn", "0"], "argument --turn: expected more than 0, got 0"),
    (["--name", "a b"], "argument --name: expected a name, got 'a b'"),
    (["--backend", "mpi"], "argument --backend: invalid choice"),
    (
        ["-o", "no/such/folder/x.ir"],
        "expected a file in a writable folder, got no/such/folder/x.ir",
    ),
    (["x.ir"], "unrecognized arguments: x.ir"),
]


@pytest.mark.parametrize(("flags", "message"), WRONG, ids=[f[0][0] for f in WRONG])
def test_wrong_flags(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        calibrate.main(flags)
    assert end.value.code == 2
    errors = [l for l in capsys.readouterr().err.splitlines() if "error:" in l]
    assert len(errors) == 1 and message in errors[0]
