"""`--explain-redistributions` of examples, against MindSpore's descriptions of them."""

from pathlib import Path

from xdsl.dialects.builtin import ModuleOp

import shardir
from shardir.reports.redistributions import explain

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
PLACED = "propagate-strategies,insert-redistributions"


def placed(name: str, passes: str = PLACED) -> ModuleOp:
    return shardir.compile_file(EXAMPLES / name, passes).module


def test_rows_then_columns() -> None:
    """Between the products Y [8, 8] f32 is split by rows and needed replicated: one all-gather,
    in which a device with 2 rows receives the other 6, of 32 B each. As a small one it sends a
    buffer of 4 copies, so that 64 + 256 + 256 B are live. Backward one reduce-scatter of 4, and the
    all-reduce of W's gradient [6, 8]: by rings 2 * 3 / 4 of its 192 B."""
    path = EXAMPLES / "matmul_rows_then_columns.ir"
    source = path.read_text().splitlines()
    y, z = (next(i for i, l in enumerate(source, 1) if l.startswith(f"  %{n} = nn")) for n in "yz")
    paragraphs = explain(placed(path.name, f"{PLACED},distributed-autodiff"))
    assert paragraphs[0].splitlines() == [
        f"@net at {path.name}:{y}: %y, tensor<8x8xf32>",
        f"  from %y = nn.matmul at {path.name}:{y}",
        f"  for %z = nn.matmul at {path.name}:{z}, operand 0",
        "  device matrix [4], tensor map [0, -1] -> device matrix [4], tensor map [-1, -1]",
        "  [@m, [{d}, {}]] -> [@m, [{}, {}]]",
        "    all_gather dim 0 over {d} -> [@m, [{}, {}]]",
        "    receives 192 B (at least 192 B), peak 320 B, 0.00045 s",
    ]
    assert paragraphs[1] == "@net: 1 redistribution, receives 192 B (at least 192 B)"
    gathered, scattered, reduced, total = paragraphs[2:]
    assert "all_gather dim 0 over {d}" in gathered
    assert scattered.startswith(f"@gradient (backward) at {path.name}:{y}: %d_y, tensor<8x8xf32>\n")
    assert "reduce_scatter dim 0 over {d}" in scattered and "receives 192 B" in scattered
    assert reduced.startswith(f"@gradient (backward) at {path.name}:{y}: %d_w, tensor<6x8xf32>\n")
    assert "for func.return" in reduced and "all_reduce over {d}" in reduced
    assert "receives 288 B" in reduced
    assert total.startswith(f"@gradient: 3 redistributions, receives {192 + 192 + 288} B")


def test_in_groups() -> None:
    """X by rows, A by columns, B by rows on 2 x 2: one all-reduce, in {0, 1} and {2, 3}."""
    paragraphs = explain(placed("matmul_partial_groups.ir"))
    [only] = [p for p in paragraphs if p.startswith("@net at ")]
    assert "all_reduce over {tp}" in only
    assert "device matrix [2, 2], tensor map [1, -1]" in only


def test_the_local_view_has_no_redistributions() -> None:
    assert explain(placed("matmul_rows_then_columns.ir", "train")) == []
    assert explain(placed("matmul_rows_then_columns.ir", "single-device")) == []
