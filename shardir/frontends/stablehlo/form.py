"""StableHLO as plain values, which a reader makes and the importer walks.

An attribute is a number, a bool, a text, a numpy array, a list or dict of attributes, or `None` for
one without a value. Attributes of StableHLO are dicts of their fields, enumerations their words,
and those of Shardy their text.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from xdsl.dialects.builtin import LocationAttr

FIELDS: Mapping[str, tuple[str, ...]] = {
    "dot": (
        "lhs_batching_dimensions", "rhs_batching_dimensions", "lhs_contracting_dimensions",
        "rhs_contracting_dimensions",
    ),
    "gather": (
        "offset_dims", "collapsed_slice_dims", "operand_batching_dims",
        "start_indices_batching_dims", "start_index_map", "index_vector_dim",
    ),
    "scatter": (
        "update_window_dims", "inserted_window_dims", "input_batching_dims",
        "scatter_indices_batching_dims", "scattered_dims_to_operand_dims", "index_vector_dim",
    ),
    "conv": (
        "input_batch_dimension", "input_feature_dimension", "input_spatial_dimensions",
        "kernel_input_feature_dimension", "kernel_output_feature_dimension",
        "kernel_spatial_dimensions", "output_batch_dimension", "output_feature_dimension",
        "output_spatial_dimensions",
    ),
}  # fmt: skip
"""The fields of StableHLO's attributes, `#stablehlo.dot<...>`: numbers, or tuples of numbers."""

WORDS = (
    "comparison_direction", "comparison_type", "precision", "rng_algorithm", "rng_distribution",
    "fft_type", "transpose",
)  # fmt: skip
"""StableHLO's enumerations, `#stablehlo<precision DEFAULT>`."""


@dataclass(frozen=True)
class HloType:
    """The type of a tensor: the sizes of its dimensions, and its element type by name. `problem`
    says why it is no tensor of static shape without an encoding; empty if it is one."""

    shape: tuple[int, ...]
    element: str
    problem: str = ""

    def __str__(self) -> str:
        return f"tensor<{'x'.join([*map(str, self.shape), self.element])}>"


@dataclass(eq=False)
class HloValue:
    """A value: a result of an op, or an argument of a block."""

    type: HloType
    name: str = ""
    """The name of an argument in its debug location: `params['w']`."""


@dataclass(eq=False)
class HloOp:
    """An op."""

    name: str
    operands: Sequence[HloValue]
    results: Sequence[HloValue]
    attributes: Mapping[str, Any]
    regions: "Sequence[HloBlock]"
    location: LocationAttr | None
    """The innermost line of the source; None if it is unknown."""

    @property
    def key(self) -> str:
        """The name, with the target of a call of a library."""
        target = self.attributes.get("call_target_name")
        return f"{self.name} @{target}" if target else self.name


@dataclass(eq=False)
class HloBlock:
    """The only block of a region."""

    arguments: Sequence[HloValue]
    ops: Sequence[HloOp]

    @property
    def results(self) -> Sequence[HloValue]:
        """The operands of the terminator."""
        return self.ops[-1].operands if self.ops else ()


@dataclass(eq=False)
class HloFunction:
    """A function, with the attributes of its arguments and results."""

    name: str
    block: HloBlock
    arguments: Sequence[Mapping[str, Any]]
    results: Sequence[Mapping[str, Any]]


@dataclass(eq=False)
class HloProgram:
    """A module: its functions, its meshes in Shardy's text, and what else it has."""

    functions: dict[str, HloFunction] = field(default_factory=dict)
    meshes: dict[str, str] = field(default_factory=dict)
    others: list[HloOp] = field(default_factory=list)
    """Ops at the top level that are neither functions nor meshes."""
    attributes: Mapping[str, Any] = field(default_factory=dict)
    is_verified: bool = True
    """Whether each op was compared with its definition."""


def expression(block: HloBlock, value: HloValue | None = None) -> str:
    """Return the text of a scalar computation, by which known bodies are recognised: `add(0, 1)`.
    Arguments are their indices; without a `value`, it is that of all results."""
    arguments = {v: str(i) for i, v in enumerate(block.arguments)}
    makers = {r: op for op in block.ops for r in op.results}

    def text(v: HloValue) -> str:
        if v in arguments:
            return arguments[v]
        op = makers.get(v)
        if op is None:
            return "outer"
        name = op.name.partition(".")[2]
        if name == "sharding_constraint" or (name == "reshape" and op.operands[0].type == v.type):
            return text(op.operands[0])
        if name == "constant":
            return str(op.attributes["value"].item()) if op.attributes["value"].size == 1 else "?"
        if name == "compare":
            name = op.attributes["comparison_direction"]
        return f"{name}({', '.join(map(text, op.operands))})"

    return "; ".join(map(text, block.results if value is None else [value]))
