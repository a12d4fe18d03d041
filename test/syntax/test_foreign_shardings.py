"""Shardings of other languages: an error that names each, and no program for one device."""

from pathlib import Path

import pytest

from shardir.tools.opt import main

SHARDED = {
    'sdy.sharding = "x"': "sdy.sharding",
    "sdy.sharding = #sdy.sharding<@mesh, [{x}]>": "sdy.sharding",
    "a = #sdy.sharding<@mesh, [{x}]>": "a = #sdy.sharding",
    'mhlo.sharding = "{devices=[2]<=[2]}"': "mhlo.sharding",
    "mhlo.num_partitions = 2 : i32": "mhlo.num_partitions",
    "mhlo.num_replicas = 4 : i32": "mhlo.num_replicas",
    'mhlo.frontend_attributes = {xla.sdy.sharding = "x"}': "xla.sdy.sharding",
    'several = [{xla.sdy.meshes = "x"}]': "xla.sdy.meshes",
    "mhlo.spmd_parameters_shardings = []": "mhlo.spmd_parameters_shardings",
    '_XlaSharding = "x"': "_XlaSharding",
}
HARMLESS = (
    "mhlo.num_partitions = 1 : i32", "mhlo.num_replicas = 1 : i32", 'jax.result_info = "x"',
    'mhlo.layout_mode = "default"', "tf.aliasing_output = 0 : i32",
)  # fmt: skip
OPS = (
    '"sdy.mesh"() <{sym_name = "mesh", mesh = "x=2"}> : () -> ()',
    '%b = "sdy.sharding_constraint"(%a) : (tensor<8xf32>) -> tensor<8xf32>',
    '%b = "sdy.all_gather"(%a) : (tensor<8xf32>) -> tensor<8xf32>',
)


def program(of_module: str = "", of_function: str = "", of_argument: str = "", op: str = "") -> str:
    return (
        f'"builtin.module"() ({{\n  "func.func"() <{{sym_name = "main", function_type = '
        f"(tensor<8xf32>) -> tensor<8xf32>, arg_attrs = [{{{of_argument}}}]}}> ({{\n"
        f'  ^b(%a: tensor<8xf32>):\n    {op}\n    "func.return"(%a) : (tensor<8xf32>) -> ()\n'
        f"  }}) {{{of_function}}} : () -> ()\n}}) {{{of_module}}} : () -> ()"
    )


def run(text: str, path: Path, capfd: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Return the exit code and the errors of a program, for one device."""
    path.write_text(text)
    code = main([str(path), "-f", "xdsl", "--allow-unregistered-dialect", "-p", "train"])
    return code, capfd.readouterr().err


@pytest.mark.parametrize("place", ["of_module", "of_function", "of_argument", "op"])
@pytest.mark.parametrize("attribute", SHARDED)
def test_an_attribute_that_splits_a_program_is_refused(
    attribute: str, place: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    op = f'%b = "stablehlo.abs"(%a) {{{attribute}}} : (tensor<8xf32>) -> tensor<8xf32>'
    code, err = run(program(**{place: op if place == "op" else attribute}), tmp_path / "x", capfd)
    assert code == 1
    assert "[L9] expected a layout, got the attribute" in err
    assert SHARDED[attribute] in err


@pytest.mark.parametrize("op", OPS)
def test_an_op_of_shardy_is_refused(
    op: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code, err = run(program(op=op), tmp_path / "x", capfd)
    assert code == 1
    assert "[L9] expected an op of shardir, got sdy." in err


@pytest.mark.parametrize("attribute", HARMLESS)
def test_attributes_that_split_nothing_stay(
    attribute: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code, err = run(program(attribute, attribute, attribute), tmp_path / "x", capfd)
    assert code == 0, err
