"""A case of the laws of ops: one op on operands of some shapes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from xdsl.dialects.builtin import ModuleOp
from xdsl.ir import Attribute, Region, SSAValue

from shardir.algebra.layout import Shape
from shardir.dialects import dist
from shardir.dialects.builder import OpBuilder
from shardir.dialects.nn.base import Props, TensorOp
from shardir.testing.answers import Answer
from shardir.testing.problems import Problem, posed, random_arguments
from shardir.testing.programs import ELEMENTS, FLOATS, Arg, program


@dataclass(frozen=True)
class Case:
    """One op on operands of some shapes.

    Attributes:
        name: of the case, among those of its op.
        op: its class.
        operands: of each operand its shape, or (element type, shape) where the type is not the
            case's own.
        elements: the element types of the case, as in the IR: f32, f64, bf16, f16, i32, i64, i1.
        props: the attributes by name.
        result: the shape of the result of an op whose result types are explicit.
        result_element: its element type, where it is not the case's own.
        kinds: the random numbers of each operand: normal (the default), positive (0.5 to 2), share
            (0.1 to 0.9), small (-0.5 to 0.5), ties (few different values), halves (-2.5 to 2.5), or
            indices: below:n.
        gradient: whether the op has a gradient by its float operands.
        regions: of an op with regions a function that makes them, of the element type.
    """

    name: str
    op: type[TensorOp]
    operands: tuple[Any, ...]
    elements: tuple[str, ...] = FLOATS
    props: Props = field(default_factory=dict)
    result: Shape | None = None
    result_element: str = ""
    kinds: tuple[str, ...] = ()
    gradient: bool = True
    regions: Callable[[Attribute], Sequence[Region]] | None = None

    def __str__(self) -> str:
        return f"{self.op.name.split('.')[1]}-{self.name}"

    def args(self, element: str) -> list[Arg]:
        """Return the operands."""
        return [Arg(*o) if o and isinstance(o[0], str) else Arg(element, o) for o in self.operands]

    def wrt(self, element: str) -> tuple[int, ...]:
        """Return the operands to differentiate by."""
        if not self.gradient or element not in FLOATS:
            return ()
        return tuple(i for i, a in enumerate(self.args(element)) if a.element in FLOATS)

    def body(self, element: str) -> Callable[..., Sequence[SSAValue]]:
        """Return the function that builds the op."""

        def build(b: OpBuilder, *operands: SSAValue) -> Sequence[SSAValue]:
            result = None
            if self.result is not None:
                result = dist.tensor(ELEMENTS[self.result_element or element], self.result)
            regions = () if self.regions is None else self.regions(ELEMENTS[element])
            props = dict(self.props)
            op = b.op(self.op, *operands, props=props, result=result, regions=regions)
            return list(op.results)

        return build

    def program(self, element: str) -> ModuleOp:
        """Return the op alone, and a request for its gradient, if it has one."""
        return program(self.args(element), self.body(element), self.wrt(element) or None)

    def problem(
        self, element: str, answer: Answer, least: float = 0.0, module: ModuleOp | None = None
    ) -> Problem:
        """Return the op alone, with random operands.

        Args:
            least: the tolerance of its gradients.
            module: its program, if there is one already.
        """
        rng = np.random.default_rng(len(str(self)))
        arguments = random_arguments(rng, self.args(element), self.kinds)
        module = module or self.program(element)
        return posed(answer, module, self.wrt(element), arguments, rng, least)
