"""The outputs of a module, made of the results of its program."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind
from torch.fx import Node

from shardir.compat.torch import TreeSpec, tree_leaves, tree_unflatten
from shardir.frontends.torch.traced import TracedProgram


class Outputs(NamedTuple):
    """The form of a module's outputs.

    Attributes:
        leaves: the dtypes of tensors, and the values of other outputs.
        spec: the structure of the outputs, such as a dict, or a class of transformers.
    """

    leaves: list[Any]
    spec: TreeSpec

    @classmethod
    def of(cls, program: ExportedProgram | TracedProgram) -> "Outputs | None":
        """Return the form of what a program returns; None of a traced step."""
        if not isinstance(program, ExportedProgram):
            return None
        results = tree_leaves(program.graph_module.graph.output_node().args[0])
        specs = program.graph_signature.output_specs
        returned = [
            x for x, spec in zip(results, specs, strict=True) if spec.kind is OutputKind.USER_OUTPUT
        ]
        leaves = [x.meta["val"].dtype if isinstance(x, Node) else x for x in returned]
        spec = program.call_spec.out_spec
        assert spec is not None
        return cls(leaves, spec)

    def made(self, results: Iterable[Any]) -> Any:
        """Return the outputs; results are arrays of numpy, one for each tensor, bf16 as f32."""
        rest = iter(results)
        leaves = [
            torch.from_numpy(next(rest)).to(x) if isinstance(x, torch.dtype) else x
            for x in self.leaves
        ]
        return tree_unflatten(leaves, self.spec)
