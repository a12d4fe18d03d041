"""The zoo: the loss and the gradients of each architecture are those of torch on one device, by
each of several plans, in the interpreter."""

from contextlib import nullcontext
from itertools import product
from pathlib import Path

import pytest
from architectures import UNEXPORTABLE, ZOO, doubles
from support.extent import extent, long_form
from support.freed import reads_of_freed
from support.modules.imported import assert_equal, values_of
from support.modules.zoo import (
    IMPORTED,
    NOT_IMPORTED,
    NOT_IN_F64,
    PLANS,
    imports,
    in_torch_alone,
)

import shardir
from shardir.diagnostics import ShardirError
from shardir.dialects.dist import CollectiveOp

SAMPLE = [("GPT-2", "megatron", False)]
"""What the default form tests."""


CASES = [(name, plan, f64) for name, plan, f64 in product(IMPORTED, PLANS, (False, True))
         if not (f64 and name in NOT_IN_F64)]  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "plan", "f64"), extent(SAMPLE, CASES))
def test_loss_and_gradients_are_those_of_torch(name: str, plan: str, f64: bool) -> None:
    architecture = ZOO[name]
    example = architecture.make()
    with doubles() if f64 else nullcontext():
        example = example.double() if f64 else example
        found, wanted = imports(architecture, example), in_torch_alone(architecture, example)
        pipeline, text = PLANS[plan]
        program = shardir.compile(found.module, pipeline, plan=text)
        assert any(isinstance(op, CollectiveOp) for op in program.module.walk()), "nothing is split"
        assert_equal(values_of(found, program.module), wanted, 1e-9 if f64 else 1e-4)
        assert not reads_of_freed(program.program)


@long_form
@pytest.mark.parametrize("name", NOT_IMPORTED)
def test_what_is_not_imported_is_named(name: str) -> None:
    with pytest.raises(
        ShardirError, match=f"got complex ones of {NOT_IMPORTED[name]} in .* at .*; write"
    ):
        imports(ZOO[name], ZOO[name].make())


@long_form
@pytest.mark.parametrize("name", sorted(UNEXPORTABLE))
def test_what_is_not_exported_is_refused_with_its_place(name: str) -> None:
    with pytest.raises(ShardirError, match=r"expected a module that torch\.export takes, got"):
        imports(UNEXPORTABLE[name], UNEXPORTABLE[name].make())


@pytest.mark.parametrize(
    ("page", "sentences"),
    [
        ("docs/guides/not-supported.md",
            ["the {exported} of {all} architectures that torch.export takes"]),
        ("docs/reference/zoo.md",
            ["the {exported} of {all} architectures that torch.export takes"]),
        ("docs/guides/imported.md", ["a zoo of {all} tiny architectures",
                            "torch.export takes {exported} of them, and {imported} import"]),
        ("docs/contribute/testing.md", ["{imported}, each with three plans"]),
    ],
)  # fmt: skip
def test_pages_count_the_architectures(page: str, sentences: list[str]) -> None:
    text = (Path(__file__).parents[2] / page).read_text()
    counts = {
        "all": len(ZOO) + len(UNEXPORTABLE), "exported": len(ZOO), "imported": len(IMPORTED),
    }  # fmt: skip
    for sentence in sentences:
        assert sentence.format(**counts) in text
