"""plan.json is checked when it is read."""

import json
from pathlib import Path

import pytest

import shardir
from shardir.backend.torch.shardir_runtime.plan.program import PlanError, load_plan


def test_explicit_sizes_in_a_plan_sum_to_the_dimension(tmp_path: Path) -> None:
    text = """
    dist.mesh @m <a = 2>
    func.func @f(%x: tensor<5xf32, #dist.layout<@m, [{a} sizes [1, 4]]>>) -> tensor<f32> {
      %s = nn.reduce <sum> %x dims <0> : (tensor<5xf32, #dist.layout<@m, [{a} sizes [1, 4]]>>) -> tensor<f32>
      func.return %s : tensor<f32>
    }"""  # noqa: E501 - the text of a program
    directory = shardir.compile(text).save(tmp_path / "p")
    path = directory / "plan.json"
    plan = json.loads(path.read_text())
    load_plan(directory)
    for sizes in ([1, 3], [1, 4, 0]):
        plan["functions"]["f"]["args"][0]["dims"][0]["sizes"] = sizes
        path.write_text(json.dumps(plan))
        with pytest.raises(PlanError, match=r"dimension 0: .* are not the shards of 5 elements"):
            load_plan(directory)
