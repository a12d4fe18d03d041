"""Exported programs of torch -> modules: a walk of the graph, by the table of ATen ops."""

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.export.graph_signature import InputKind
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg
from xdsl.dialects.builtin import FloatAttr, SymbolRefAttr, UnitAttr, f64
from xdsl.ir import Attribute, Block, Operation

from shardir.algebra.garbage import no_gc
from shardir.build import FunctionBuilder, Module, Value
from shardir.build.function import hint_of
from shardir.compat.torch import FakeTensor, OpOverload, overload_of, schema_of, tree_leaves
from shardir.diagnostics import ShardirError
from shardir.dialects.locations import file_location
from shardir.dialects.train import (
    LR_SCALE,
    OWN_LR,
    RULE,
    WEIGHT_DECAY,
    OptimizerAttr,
    ScheduleAttr,
    arg_attrs,
    arguments,
    set_arg_attrs,
)
from shardir.frontends.torch import fallback
from shardir.frontends.torch.aten import MOVEMENTS, TABLE
from shardir.frontends.torch.capture import Capture
from shardir.frontends.torch.decompose import decompose_call, decomposition
from shardir.frontends.torch.dtypes import check_dtypes, dtype_name
from shardir.frontends.torch.merged import separate
from shardir.frontends.torch.names import location_of, path_of, value_names
from shardir.frontends.torch.positions import simplify_positions
from shardir.frontends.torch.regions import checkpoint_of
from shardir.frontends.torch.static import IGNORED, check_static
from shardir.frontends.torch.translation import (
    AtenEntry,
    Translation,
    conform,
    entry_call,
    not_taken,
)
from shardir.frontends.torch.weights import array_of
from shardir.rewriting.marks import RECOMPUTE

FUNCTION, STEP, MODEL, EVALUATION = "forward", "step", "model", "evaluate"
"""The names of the imported function, of its training step, of the function that `forward` runs on
several microbatches or in stages, and of the loss of the module in eval()."""

KEY = "random_key"
"""The state that seeds random numbers."""

MAX_CONSTANT = 16
"""Bounds the elements of a constant in the text, to one line; larger constants are states."""


@dataclass
class Imported:
    """A module of torch as a module of the compiler."""

    model: torch.nn.Module
    module: Module
    function: FunctionBuilder
    values: Mapping[str, torch.Tensor]
    """The initial value of each parameter and state, by its name."""
    inputs: list[tuple[str, torch.Tensor]]
    """The name and the example of each input."""
    constants: Mapping[str, Any]
    """The arguments that are no tensors, by their names."""

    def own_numbers(
        self, lr_scales: Mapping[str, float], weight_decays: Mapping[str, float],
        rates: Mapping[str, str], rules: Mapping[str, str],
    ) -> None:  # fmt: skip
        """Give parameters, by their names, a learning rate, a weight decay and a rule of their
        own."""
        f = self.function.func
        given: dict[str, dict[str, Attribute]] = {
            LR_SCALE: {name: FloatAttr(x, f64) for name, x in lr_scales.items()},
            WEIGHT_DECAY: {name: FloatAttr(x, f64) for name, x in weight_decays.items()},
            OWN_LR: {
                name: ScheduleAttr(OptimizerAttr.read(f"sgd, lr = {text}").values["lr"])
                for name, text in rates.items()
            },
            RULE: {name: SymbolRefAttr(rule) for name, rule in rules.items()},
        }
        all_attributes = arg_attrs(f)
        for argument, attributes in zip(arguments(f), all_attributes, strict=True):
            for option, of in given.items():
                if argument.key is not None and argument.key in of:
                    attributes[option] = of[argument.key]
        set_arg_attrs(f, all_attributes)


class Importer:
    """The import of one program."""

    def __init__(
        self, capture: Capture, module: Module, name: str, train: bool, private: bool,
        rule: str | None = None, arrays: str = "",
    ):  # fmt: skip
        self.capture, self.train, self.arrays = capture, train, arrays
        self.function = module.function(name, private=private, rule=rule)
        self.known: dict[Any, Any] = {}
        """The results of each node: a value, several values, a number, or None."""
        self.values: dict[str, torch.Tensor] = {}
        self.names: dict[int, str] = {}
        """The name of each parameter and buffer, by its identity."""
        self.imported = Imported(
            capture.model, module, self.function, self.values, capture.inputs, capture.constants
        )
        self._streams, self._path = 0, ""
        self._key: Value | None = None

    # ---- arguments ----

    def add_arguments(self) -> None:
        """Add the parameters, the states and the inputs."""
        program = self.capture.program
        nodes = {n.name: n for n in program.graph.nodes if n.op == "placeholder"}
        inputs = iter(self.capture.inputs)
        used = {  # only one of tied parameters has uses
            id(self.capture.tensor(spec.target))
            for spec in program.graph_signature.input_specs
            if (n := nodes.get(getattr(spec.arg, "name", ""))) is not None and n.users
        }
        for spec in program.graph_signature.input_specs:
            node = nodes.get(getattr(spec.arg, "name", ""))
            if node is None:
                continue
            if spec.kind is InputKind.USER_INPUT:
                if not isinstance(node.meta.get("val"), torch.Tensor):
                    self.known[node] = node.meta.get("val")
                    continue
                name, example = next(inputs)
                init = f'batches, path = "data.npz", array = "{self.arrays}{name}"'
                value = self.function.input(
                    name, example.shape, dtype_name(example.dtype), init=init
                )
                self.known[node] = value
            elif node.users or id(self.capture.tensor(spec.target)) not in used:
                self.known[node] = self._add_retained(spec.kind, node, spec.target or "")

    def _add_retained(self, kind: InputKind, node: Node, target: str) -> Value:
        """Add the argument of a parameter, a buffer or a constant."""
        name, tensor = target.removeprefix("model."), self.capture.tensor(target)
        assert tensor is not None
        self.names[id(tensor)] = name
        shape, dtype = tensor.shape, dtype_name(tensor.dtype, name)
        if (
            kind is InputKind.CONSTANT_TENSOR
            and tensor.numel() <= MAX_CONSTANT
            and not tensor.is_meta
        ):
            return self.function.constant(array_of(tensor), dtype=dtype)
        init = f'file, path = "weights.npz", array = "{name}"'
        self.values[name] = tensor
        trained = kind is InputKind.PARAMETER and tensor.requires_grad and bool(node.users)
        is_fixed = not self.train and target not in self.capture.writes
        if trained or (kind is InputKind.PARAMETER and is_fixed):
            return self.function.parameter(name, shape, dtype, init=init)
        return self.function.state(name, shape, dtype, init=init)

    def next_stream(self) -> tuple[Value, int]:
        """Return the key of random numbers, and a new stream for each call."""
        if self._key is None:
            self._key = self.function.state(
                KEY, (), "i64", init="integers, low = 0, high = 1000000000"
            )
            self.function.update(KEY, self._key + 1)
        self._streams += 1
        return self._key, self._streams

    # ---- nodes ----

    def translate_graph(self, module: GraphModule) -> Any:
        """Translate a graph whose arguments are known; return its output."""
        names = value_names(module, self._path)
        block = self.function.func.body.block
        for node in module.graph.nodes:
            if node.op == "get_attr":
                self.known[node] = self._attribute(module, node)
            elif node.op == "call_function":
                before, outer = block.last_op, self._path
                self._path = path_of(node, outer)
                with self.function.at(location_of(node) or self.function.location()):
                    self.known[node] = self.translate_call(node)
                new_ops = list(_ops_from(before.next_op if before else block.first_op))
                self._name_ops(node, names.get(node, ""), new_ops)
                self._mark_checkpoint(node, new_ops)
                self._path = outer
            elif node.op == "output":
                return self._known_of(node.args[0])
        return None

    def _attribute(self, module: GraphModule, node: Node) -> Any:
        attribute: Any = module
        for part in str(node.target).split("."):
            attribute = getattr(attribute, part)
        if isinstance(attribute, FakeTensor):
            raise ShardirError(
                f"expected constants with values, got {node.target}, which the module computed "
                "outside of what is traced; make it a buffer, or compile without trace=True"
            )
        if isinstance(attribute, torch.Tensor):
            return self.function.constant(array_of(attribute), dtype=dtype_name(attribute.dtype))
        return attribute

    def _known_of(self, tree: Any) -> Any:
        return map_arg(tree, lambda n: self.known[n])

    def _name_ops(self, node: Node, name: str, ops: Sequence[Operation]) -> None:
        """Name the ops of a node: its results by `name`, intermediate results by the module's
        path."""
        new = {r for op in ops for r in op.results}
        path = hint_of(self._path) if self._path else ""
        for value in new:
            hint = value.name_hint or "value"
            if path and not hint.startswith(path):
                value.name_hint = f"{path}.{hint}"
        for value in tree_leaves(self.known[node]):
            if isinstance(value, Value) and value.ssa in new:
                value.ssa.name_hint = name

    def _mark_checkpoint(self, node: Node, ops: Sequence[Operation]) -> None:
        """Mark the ops of a node in a checkpoint: the backward part computes them again, except
        values that are used outside."""
        if (region := checkpoint_of(node)) is None:
            return
        kept_ops: set[Operation | Block] = set()
        if any(checkpoint_of(user) != region for user in _readers(node)):
            values = tree_leaves(self.known[node])
            kept_ops = {v.ssa.owner for v in values if isinstance(v, Value)}
        for op in ops:
            if op not in kept_ops:
                op.attributes[RECOMPUTE] = UnitAttr()

    def translate_call(self, node: Node) -> Any:
        """Translate a call; return its results."""
        check_static(node, self.known, self._place)
        target = node.target
        if target is operator.getitem:
            return self.known[node.args[0]][node.args[1]]
        if not isinstance(target, OpOverload):
            return self._evaluate_python(node)
        name = schema_of(target).name.partition("::")[2]
        if name.startswith(IGNORED):
            return None
        check_dtypes(node, name, self._place())
        return self._translate(node, name, overload_of(target))

    def _translate(self, node: Node, name: str, overload: str) -> Any:
        """Return the results of a call, by the table, by torch's decomposition, or by torch's own
        op."""
        entry = TABLE.get(f"{name}.{overload}") or TABLE.get(name)
        args, kwargs = self._known_of((node.args, dict(node.kwargs)))
        if entry is not None:
            results = self._run_entry(entry_call(entry), node, *args, **kwargs)
            if results is not NotImplemented:
                return conform(node, results, moved=name in MOVEMENTS)
        inner = decompose_call(node)
        if inner is not None and all(map(_has_translation, inner[0].graph.nodes)):
            module, operand_nodes, written = inner
            if written:
                raise ShardirError(
                    f"expected an op whose schema names its writes, got {node.target}"
                    f"{self._place()}; write it by other ops"
                )
            self._bind_arguments(module, operand_nodes)
            return self.translate_graph(module)
        results = self._run_entry(fallback.call_torch_op, node, args, kwargs)
        if results is not NotImplemented:
            return results
        assert isinstance(node.target, OpOverload)
        not_covered = (
            not_taken(entry, node.target, node.args, node.kwargs) if entry is not None else []
        )
        of = f" with {' and '.join(not_covered)}" if not_covered else ""
        raise ShardirError(
            f"expected an op that can be imported, got {node.target}{of}{self._place()}; write "
            "it by other ops"
        )

    def _place(self) -> str:
        """Return the path of the module, and the line of the user's source, for a message."""
        place = file_location(self.function.location())
        path = f" in {self._path!r}" if self._path else ""
        return path + (f" at {place[0]}:{place[1]}" if place else "")

    def _run_entry(self, entry: AtenEntry, node: Node, *args: Any, **kwargs: Any) -> Any:
        return entry(Translation(self.function, node, self.next_stream), *args, **kwargs)

    def _evaluate_python(self, node: Node) -> Any:
        """Evaluate functions of Python on numbers; calls on values known only at run time are
        checks."""
        args = self._known_of(node.args)
        assert callable(node.target)
        return None if None in tree_leaves(args) else node.target(*args, **node.kwargs)

    def _bind_arguments(self, module: GraphModule, arguments: Sequence[Any]) -> None:
        """Bind the arguments of a nested graph to the values of nodes."""
        inner = [n for n in module.graph.nodes if n.op == "placeholder"]
        for placeholder, argument in zip(inner, arguments, strict=True):
            self.known[placeholder] = self._known_of(argument)

    # ---- the result ----

    def run(self) -> Imported:
        """Import the program.

        Raises:
            ShardirError: an op can't be imported.
        """
        self.add_arguments()
        output = self.translate_graph(self.capture.program.graph_module)
        results: list[Value] = []
        for target, value in zip(self.capture.writes, tree_leaves(output), strict=True):
            if target is None and isinstance(value, Value):
                results.append(value)
            elif target:
                self.function.update(self.names[id(self.capture.tensor(target))], value)
        names = [name.removeprefix("model.") for name in self.capture.gradients]
        count = len(results) - len(names)
        gradients = dict(zip(names, results[count:], strict=True))
        first = count - len(self.capture.metrics)
        metrics = dict(zip(self.capture.metrics, results[first:count], strict=True))
        values = results[:first]
        if self.function.name == EVALUATION:
            metrics, values = {"loss": values[0], **metrics}, []
        self.function.returns(*values, metrics=metrics, gradients=gradients)
        block = self.function.func.body.block
        simplify_positions(block)
        separate(block)
        return self.imported


def _has_translation(node: Node) -> bool:
    """Whether the table or a decomposition covers a node of a graph, judged by its op."""
    target = node.target
    if node.op != "call_function" or not isinstance(target, OpOverload):
        return True
    name = schema_of(target).name.partition("::")[2]
    names = {name, name.removesuffix("_"), f"{name}.{overload_of(target)}"}
    return bool(names & TABLE.keys()) or decomposition(target) is not None


def _readers(node: Node) -> Iterator[Node]:
    """Yield the nodes that read a result of a node."""
    for user in node.users:
        if user.target is operator.getitem:
            yield from _readers(user)
        else:
            yield user


def _ops_from(op: Operation | None) -> Iterator[Operation]:
    """Yield an op and all ops after it."""
    while op is not None:
        yield op
        op = op.next_op


def import_model(
    capture: Capture, module: Module, name: str = FUNCTION, train: bool = True,
    private: bool = True, arrays: str = "",
) -> Imported:  # fmt: skip
    """Import an exported module as a function.

    Args:
        private: whether further functions are made from it.
        arrays: the beginning of the names of its inputs' arrays in the file of data.

    Raises:
        ShardirError: an op can't be imported.
    """
    with no_gc():
        return Importer(capture, module, name, train, private, arrays=arrays).run()
