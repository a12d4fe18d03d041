"""Requests for functions, `train.step`, `train.gradient` and `train.forward`, and the marks between
the parts of the resulting functions."""

from abc import ABC
from typing import Any, NamedTuple

from xdsl.dialects.builtin import (
    AnyFloat,
    StringAttr,
    SymbolNameConstraint,
    SymbolRefAttr,
    TensorType,
    UnitAttr,
)
from xdsl.dialects.func import FuncOp
from xdsl.irdl import IRDLOperation, opt_prop_def, prop_def, traits_def
from xdsl.traits import SymbolOpInterface
from xdsl.utils.exceptions import VerifyException

from shardir.diagnostics import coded
from shardir.dialects.definition import OpClass, op_definition
from shardir.dialects.dist import find_mesh, global_type, type_layout
from shardir.dialects.nn.properties import DimsAttr
from shardir.dialects.symbols import find_symbol
from shardir.dialects.train.optimizer import RULE_OF, RULES
from shardir.dialects.train.optimizers import OptimizerAttr
from shardir.dialects.train.options import (
    AccumulateAttr,
    AverageAttr,
    ClipAttr,
    LossScaleAttr,
    MetricsAttr,
)
from shardir.dialects.train.role_checks import (
    check_arguments,
    check_gradients,
    check_own_numbers,
    check_parameters,
    check_updates,
)
from shardir.dialects.train.roles import (
    GRADIENT,
    METRIC,
    STEP,
    UPDATES,
    Role,
    arguments,
    result_attrs,
    text_attr,
)
from shardir.dialects.train.rules import check_rule
from shardir.dialects.train.stages import PipelineAttr
from shardir.dialects.train.synchronization import SyncAttr

EMA, SUM = "ema", "gradient"
"""The names of the moving average of a parameter among its states, and of the sum of its gradients
since the last update, where updates are separate."""


class StateKeys(NamedTuple):
    """The keys of the states of an optimizer.

    Args:
        step: the name of the step.
        own: the name of the states, `states "adam"`, if they have one.
    """

    step: str
    own: str | None = None

    def of_parameter(self, parameter: str, state: str) -> str:
        """Return the key of a state of a parameter: `w.exp_avg` or `w.adam.exp_avg`."""
        return f"{parameter}.{state}" if self.own is None else f"{parameter}.{self.own}.{state}"

    def of_step(self, state: str) -> str:
        """Return the key of a state of all parameters: `step.count` or `adam.count`."""
        return f"{self.own or self.step}.{state}"


class _OfFunction(IRDLOperation, ABC):
    sym_name = prop_def(SymbolNameConstraint())
    function = prop_def(SymbolRefAttr)

    def find(self) -> FuncOp:
        """The function. Raises VerifyException if no function with this name has a body."""
        wanted = self.function.root_reference.data
        module = self.parent_op()
        f = None if module is None else find_symbol(module, FuncOp, wanted)
        if f is None:
            raise VerifyException(coded("G1", f"expected a function @{wanted}, got none"))
        if not f.body.blocks:
            message = f"expected a body of function @{wanted}, got none"
            raise VerifyException(coded("G1", message, use="write it"))
        return f


@op_definition
class StepOp(_OfFunction):
    """A training step: the function's loss, and its parameters updated by the optimizer."""

    name = STEP
    optimizer = prop_def(OptimizerAttr)
    accumulate = opt_prop_def(AccumulateAttr)
    clip = opt_prop_def(ClipAttr)
    loss_scale = opt_prop_def(LossScaleAttr)
    metrics = opt_prop_def(MetricsAttr)
    ema = opt_prop_def(AverageAttr)
    states = opt_prop_def(StringAttr)
    separate_update = opt_prop_def(UnitAttr)
    sync = opt_prop_def(SyncAttr)
    pipeline = opt_prop_def(PipelineAttr)
    traits = traits_def(SymbolOpInterface())
    assembly_format = (
        "$sym_name `of` $function $optimizer (`accumulate` $accumulate^)? (`clip` $clip^)? "
        "(`loss_scale` $loss_scale^)? (`metrics` $metrics^)? (`ema` $ema^)? "
        "(`states` $states^)? (`separate_update` $separate_update^)? (`sync` $sync^)? "
        "(`pipeline` $pipeline^)? attr-dict"
    )

    @property
    def keys(self) -> StateKeys:
        """The keys of the states of its optimizer."""
        return StateKeys(self.sym_name.data, None if self.states is None else self.states.data)

    @property
    def microbatches(self) -> int:
        """The number of runs of the function in a step."""
        return 1 if self.accumulate is None else self.accumulate.values["microbatches"]

    @property
    def is_loop(self) -> bool:
        """Whether inputs have microbatches in dimension 0: the step has several of them, or
        stages."""
        return self.microbatches > 1 or self.pipeline is not None

    def verify_(self) -> None:
        f = self.find()
        outs = list(zip(f.function_type.outputs.data, result_attrs(f), strict=True))
        marks = {UPDATES, GRADIENT, METRIC}
        losses = [t for t, attributes in outs if not marks & attributes.keys()]
        loss = losses[0] if len(losses) == 1 else None
        if not isinstance(loss, TensorType) or loss.get_shape() != ():
            marked = " and mark updates of states and metrics" if len(losses) > 1 else ""
            got = ", ".join(map(str, losses)) or "no result"
            raise VerifyException(
                coded(
                    "G2",
                    f"expected @{f.sym_name.data} to return one scalar, the loss, got {got}",
                    use=f"reduce it{marked}",
                )
            )
        check_updates(f)
        check_gradients(f)
        self.check_metrics(f)
        if not isinstance(loss.element_type, AnyFloat):
            raise VerifyException(
                coded(
                    "G2",
                    f"expected @{f.sym_name.data} to return a loss of floats, got "
                    f"{loss.element_type}",
                    use="nn.convert the operands of the loss to floats",
                )
            )
        check_parameters(f)
        check_arguments(f)
        check_own_numbers(f)
        self.check_rules(f)
        if self.ema is not None and self.sync is not None:
            message = "expected no averages of replicas, got ema and sync"
            raise VerifyException(coded("G19", message, use="drop one"))
        if self.separate_update is not None:
            for name in ("sync", "pipeline", "metrics"):
                if getattr(self, name) is not None:
                    message = f"expected no {name} of a step with separate_update, got one"
                    raise VerifyException(coded("G19", message, use="drop one"))

    def check_rules(self, f: FuncOp) -> None:
        """Raises VerifyException if the rule of a parameter is missing, or does not fit it."""
        module, rules = self.parent_op(), self.optimizer.kind == RULES
        for t, argument in zip(f.function_type.inputs, arguments(f), strict=True):
            if argument.role is not Role.PARAMETER or not isinstance(t, TensorType):
                continue
            if (name := argument.rule) is None:
                if rules:
                    message = f"expected a rule of the parameter {argument.key}, got none"
                    raise VerifyException(coded("G18", message, use=RULE_OF))
                continue
            rule = None if module is None else find_symbol(module, FuncOp, name)
            if rule is None or not rule.body.blocks:
                got = f"expected a function @{name}, the rule of {argument.key}, got none"
                raise VerifyException(coded("G1", got, use="write it"))
            layout = type_layout(t)
            mesh = None if layout is None else find_mesh(f, layout.mesh)
            check_rule(rule, global_type(t, mesh))

    def check_metrics(self, f: FuncOp) -> None:
        """Raises VerifyException if a result of the function is annotated as a metric, but is not a
        valid one."""
        known = set(() if self.metrics is None else self.metrics.data)
        loss = [{UPDATES, GRADIENT, METRIC} & a.keys() for a in result_attrs(f)].index(set())
        for i, (t, attributes) in enumerate(
            zip(f.function_type.outputs, result_attrs(f), strict=True)
        ):
            if METRIC not in attributes:
                continue
            name, where = text_attr(attributes, METRIC), f"result {i} of @{f.sym_name.data}"
            is_scalar = isinstance(t, TensorType) and t.get_shape() == ()
            if not (is_scalar and isinstance(t.element_type, AnyFloat)):
                message = f"expected {where}, a metric, to be a scalar of floats, got {t}"
                raise VerifyException(coded("G15", message, use="reduce and nn.convert it"))
            if not name or name in known:
                message = f"expected a unique name for {where}, a metric, got"
                raise VerifyException(coded("G15", f"{message} {attributes[METRIC]}"))
            if i < loss:
                message = f"expected the loss of @{f.sym_name.data} before its metrics, got {where}"
                raise VerifyException(coded("G15", f"{message} first", use="return the loss first"))
            known.add(name)


@op_definition
class GradientOp(_OfFunction):
    """A function from the arguments (and the cotangents of results that are not scalars) to the
    results and the cotangents of the arguments `wrt`."""

    name = "train.gradient"
    wrt = prop_def(DimsAttr)
    traits = traits_def(SymbolOpInterface())
    assembly_format = "$sym_name `of` $function `wrt` $wrt attr-dict"

    def verify_(self) -> None:
        name = self.function.root_reference.data
        n = len(self.signature(())[0])
        for i in self.wrt.data:
            if not 0 <= i < n:
                raise VerifyException(
                    coded("G4", f"expected an argument of @{name} from 0 to {n - 1}, got {i}")
                )
        if len(set(self.wrt.data)) != len(self.wrt.data):
            raise VerifyException(
                coded("G4", f"expected each argument once in wrt, got {list(self.wrt.data)}")
            )
        if self.maker() is None:
            check_arguments(self.find())

    def maker(self) -> "GradientOp | None":
        """The request that makes the function, if the function is a gradient itself."""
        module = self.parent_op()
        wanted = self.function.root_reference.data
        return None if module is None else find_symbol(module, GradientOp, wanted)

    def signature(self, above: tuple["GradientOp", ...]) -> tuple[list[Any], list[Any]]:
        """The types of the function's arguments and results. `above` are the enclosing requests.

        Raises:
            VerifyException: the function does not exist, or requests are cyclic.
        """
        if self in above:
            raise VerifyException(
                coded(
                    "G1",
                    f"expected a gradient of another function, got @{self.sym_name.data} of itself",
                )
            )
        maker = self.maker()
        if maker is None:
            type = self.find().function_type
            return list(type.inputs), list(type.outputs)
        inputs, outputs = maker.signature((*above, self))
        seeds = [
            t for t in outputs
            if isinstance(t, TensorType) and isinstance(t.element_type, AnyFloat) and t.get_shape()
        ]  # fmt: skip
        wrt = [inputs[i] for i in maker.wrt.data if 0 <= i < len(inputs)]
        return [*inputs, *seeds], [*outputs, *wrt]


@op_definition
class ForwardOp(_OfFunction):
    """A function that runs another one for several microbatches, without a backward part. Results
    that are float scalars are averaged (or summed, or averaged over tokens); other results are
    collected in a new dimension 0."""

    name = "train.forward"
    accumulate = opt_prop_def(AccumulateAttr)
    pipeline = opt_prop_def(PipelineAttr)
    traits = traits_def(SymbolOpInterface())
    assembly_format = (
        "$sym_name `of` $function (`accumulate` $accumulate^)? (`pipeline` $pipeline^)? attr-dict"
    )

    @property
    def microbatches(self) -> int:
        """The number of runs of the function."""
        return 1 if self.accumulate is None else self.accumulate.values["microbatches"]

    @property
    def sums(self) -> bool:
        """Whether scalars are summed; else they are averaged."""
        return self.accumulate is not None and self.accumulate.kind == "sum"

    def verify_(self) -> None:
        f = self.find()
        check_arguments(f)
        check_updates(f)


Request = StepOp | GradientOp | ForwardOp


class Mark(IRDLOperation, metaclass=OpClass):
    """The beginning of a part of a function."""

    assembly_format = "attr-dict"


@op_definition
class BackwardOp(Mark):
    """The beginning of the backward part of a function, or of a microbatch."""

    name = "train.backward"


@op_definition
class UpdateOp(Mark):
    """The beginning of the update part of a step, after its backward part."""

    name = "train.update"
