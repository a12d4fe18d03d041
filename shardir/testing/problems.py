"""A program with random arguments, and its expected results."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from xdsl.dialects.builtin import ModuleOp

from shardir.dialects.nn.base import Array
from shardir.interpret import run
from shardir.testing.answers import Answer
from shardir.testing.arrays import differs, numbers
from shardir.testing.programs import (
    FLOATS,
    Arg,
    BuildBody,
    defined,
    elements_of,
    function,
    program,
    tensors,
)


@dataclass
class Problem:
    """A program @f with arguments and, for its gradient @g, random cotangents; and the expected
    results of both.

    Attributes:
        wrt: the arguments of @f to differentiate by; none where there is no @g.
        elements: the element types of the results.
        least: the tolerance of gradients that are less precise than their types.
    """

    module: ModuleOp
    wrt: tuple[int, ...]
    arguments: list[Array]
    wanted: list[Array]
    elements: list[str]
    least: float = 0.0

    @property
    def name(self) -> str:
        """The function with all results."""
        return "g" if self.wrt else "f"

    def errors(self, module: ModuleOp, factor: float = 1.0) -> str:
        """Return the difference of the results of a compiled form from the expected ones, or "".

        Before differentiation the results are those of @f alone."""
        name = self.name if self.name in defined(module) else "f"
        inputs = function(module, name).function_type.inputs.data
        return self.differences(run(module, name, self.arguments[: len(inputs)]), factor)

    def differences(self, found: Sequence[Array], factor: float = 1.0) -> str:
        """Return the first difference of results of @f or @g from the expected ones, or ""."""
        gradients = len(self.wanted) - len(self.wrt)
        for i, (x, y, e) in enumerate(zip(found, self.wanted, self.elements, strict=False)):
            least = self.least if i >= gradients else 0.0
            if message := differs(x, y, e, factor, least):
                what = (
                    f"result {i}"
                    if i < gradients
                    else f"the gradient of operand {self.wrt[i - gradients]}"
                )
                return f"{what} {message}"
        return ""


def problem(
    answer: Answer,
    args: Sequence[Arg],
    body: BuildBody,
    wrt: Sequence[int] = (),
    kinds: Sequence[str] = (),
    seed: int = 0,
    least: float = 0.0,
) -> Problem:
    """Return a program with random arguments, of the `kinds` of `numbers`."""
    rng = np.random.default_rng(seed)
    module = program(args, body, wrt if wrt else None)
    return posed(answer, module, wrt, random_arguments(rng, args, kinds), rng, least)


def random_arguments(
    rng: np.random.Generator, args: Sequence[Arg], kinds: Sequence[str] = ()
) -> list[Array]:
    """Return random arguments, of the `kinds` of `numbers`; by default normal ones."""
    kinds = [*kinds, *["normal"] * (len(args) - len(kinds))]
    return [numbers(rng, a.element, a.shape, k) for a, k in zip(args, kinds, strict=True)]


def posed(
    answer: Answer,
    module: ModuleOp,
    wrt: Sequence[int],
    arguments: list[Array],
    rng: np.random.Generator,
    least: float = 0.0,
) -> Problem:
    """Return a program with these arguments and random cotangents."""
    outs = tensors(function(module, "f").function_type.outputs)
    elements = elements_of(outs)
    cotangents = []
    if wrt:
        cotangents = [
            numbers(rng, e, t.get_shape())
            for e, t in zip(elements, outs, strict=True)
            if e in FLOATS and t.get_shape()
        ]
    wanted = answer(module, arguments, wrt, cotangents)
    inputs = elements_of(function(module, "f").function_type.inputs.data)
    return Problem(
        module, tuple(wrt), [*arguments, *cotangents], wanted,
        [*elements, *(inputs[i] for i in wrt)], least,
    )  # fmt: skip
