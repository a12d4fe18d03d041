"""search-strategies: nothing or a few pins -> the strategies and layouts of least cost.

    %y = nn.matmul %x, %w : (tensor<8x4xf32>, tensor<4x6xf32>) -> tensor<8x6xf32>
 -> %y = nn.matmul %x, %w strategy<@m, (({dp}, {}), ({}, {tp}))> : ...

After distributed-autodiff, so that gradients and updates count: the layouts of a training step are
those of forward and backward part together.

1. Every op gets a strategy, every value a layout; insert-redistributions follows them, and what it
   makes takes the seconds that the search counted. A mesh without rates calculates as Gloo's ranks
   (cost/ready/gloo.ir) do.
2. What the text states, a layout of a value or a strategy of an op, stays.
3. The plan is the least in the modelled seconds of calculation and communication, of all plans in
   which an axis splits one dimension of an op, as a whole and evenly; or, where the solver's tables
   would be too large, one that is above the least by no more than the gap that is stated.
4. Parameters and states lie as the updates leave them, and may be split: nothing is said of memory.
5. The function's `search` attribute says the seconds (`objective`), the bound, and the gap.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from xdsl.context import Context
from xdsl.dialects.builtin import DictionaryAttr, ModuleOp, TensorType
from xdsl.dialects.func import CallOp, FuncOp
from xdsl.ir import Block, Operation
from xdsl.passes import ModulePass

from shardir.algebra.errors import ShardirError
from shardir.algebra.factors import FactorAxes, Factors
from shardir.algebra.mesh import Mesh
from shardir.cost import op_seconds
from shardir.cost.clusters import load
from shardir.cost.functions import DEFAULT
from shardir.dialects.composites import expand
from shardir.dialects.dist import (
    Collective,
    PropagationBarrierOp,
    RedistributeOp,
    ShardingGroupOp,
    StrategyAttr,
    layout_of,
    with_layout,
)
from shardir.dialects.nn.base import TensorOp, float_attr, plain
from shardir.dialects.train import GradientOp, StepOp
from shardir.passes.functions import (
    bodies,
    is_local_body,
    mesh_of,
    name_of,
    set_type,
    settle_all,
    ties,
    update_signature,
)
from shardir.search.choices import Offers
from shardir.search.drawing import form_of
from shardir.search.elimination import CAP
from shardir.search.graph import Plan, search
from shardir.search.picture import Described, described
from shardir.syntax.diagnostics import Failure
from shardir.syntax.files import write_text
from shardir.syntax.printer import value_names


@dataclass(frozen=True)
class SearchStrategies(ModulePass):
    """Finds the strategies and layouts of least cost."""

    name = "search-strategies"
    entries: int = CAP
    """The entries of the solver's largest table: memory for exactness."""
    graph: str | None = None
    """A file for the graph of costs: .json, .dot or .svg."""

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        form = None if self.graph is None else form_of(Path(self.graph))
        graphs: list[Described] = []
        later = {
            o.function.root_reference.data
            for o in op.body.ops
            if isinstance(o, StepOp | GradientOp)
        }
        for f, block in bodies(op):
            mesh = mesh_of(f, op)
            if mesh is None or is_local_body(block):
                continue
            if name_of(f) in later:
                message = "is still to be differentiated; run distributed-autodiff before"
                raise Failure([(f, f"@{name_of(f)} {message}, so that its gradients count")])
            _check(f, block)
            settle_all(block, None)
            expand(block, None)
            try:
                plan = search(block, offers(mesh), ties(f, block), self.entries)
            except ShardirError as e:
                raise Failure([(f, str(e))]) from None
            if form is not None:
                graphs.append(described(name_of(f), mesh, value_names(block), plan))
            write(f, plan)
        if self.graph is not None and form is not None:
            if not graphs:
                raise Failure("no function has a mesh, so there is no graph of costs")
            write_text(Path(self.graph), form(graphs))


def offers(mesh: Mesh) -> Offers:
    """What may be chosen on a mesh, in the time model's seconds."""
    wires, usual = mesh.wires, load(DEFAULT)
    if not wires.flops:
        rates = {"flops": usual.flops, "memory_bandwidth": usual.memory_bandwidth}
        wires = replace(wires, **rates, overhead=usual.overhead)
    rated = replace(mesh, cluster=wires)

    def seconds(
        kind: type[TensorOp], factors: Factors, chosen: FactorAxes, types: Sequence[TensorType]
    ) -> float:
        return op_seconds(kind, factors, chosen, types, rated)

    return Offers(mesh, seconds)


def _check(f: FuncOp, block: Block) -> None:
    faults: list[tuple[Operation | None, str]] = []
    for op in block.ops:
        match op:
            case RedistributeOp() | Collective() | CallOp():
                message = (
                    "the search decides on communication; leave it out, and state layouts or "
                    "strategies instead"
                )
            case ShardingGroupOp():
                message = "the search knows no groups; state the layouts of its values instead"
            case PropagationBarrierOp() if layout_of(op.out) not in (None, layout_of(op.value)):
                message = "nothing spreads that it could hold back; leave it out"
            case _:
                continue
        faults.append((op, f"{op.name} in @{name_of(f)}: {message}"))
    if faults:
        raise Failure(faults)


def write(f: FuncOp, plan: Plan) -> None:
    """The plan, in the IR."""
    for op, choice in plan.choices.items():
        if op.operands:
            op.properties["strategy"] = StrategyAttr(choice.strategy)
    for v, layout in plan.layouts.items():
        set_type(v, with_layout(plain(v), layout))
    update_signature(f)
    s = plan.solution
    numbers = {"objective": s.objective, "bound": s.bound, "gap": s.gap}
    f.attributes["search"] = DictionaryAttr({k: float_attr(x) for k, x in numbers.items()})
