"""Programs of StableHLO -> modules: a walk of the ops, by the table of ops/.

Calls are inlined, and what is refused is reported at once, with the line of the user's source.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from xdsl.dialects.builtin import LocationAttr
from xdsl.ir import Operation, OpResult, SSAValue

from shardir.algebra.mesh import Axes, Mesh
from shardir.algebra.sharding import Sharding
from shardir.build import Module, Value
from shardir.build.function import hint_of
from shardir.compat.xdsl import set_type
from shardir.diagnostics import ShardirError
from shardir.dialects import dist
from shardir.dialects.blocks import ops_of
from shardir.dialects.dist import with_sharding
from shardir.dialects.locations import file_location
from shardir.dialects.nn.base import TensorOp
from shardir.dialects.nn.types import unsharded_type
from shardir.frontends.stablehlo.folding import FoldingBuilder
from shardir.frontends.stablehlo.form import (
    HloBlock,
    HloFunction,
    HloOp,
    HloProgram,
    HloValue,
)
from shardir.frontends.stablehlo.loops import DEVICE_NUMBER, IN_LOOP, LoopBuilder, import_loop
from shardir.frontends.stablehlo.manual import ManualBuilder
from shardir.frontends.stablehlo.meshes import MESH_NAME, ProgramMeshes
from shardir.frontends.stablehlo.names import name_of
from shardir.frontends.stablehlo.ops import TABLE
from shardir.frontends.stablehlo.ops.custom import CALL, is_custom
from shardir.frontends.stablehlo.reductions import DeviceContents
from shardir.frontends.stablehlo.shardy import RULE, SHARDY, copied, held_dims, hold
from shardir.frontends.stablehlo.translation import (
    HloEntry,
    OpTranslation,
    Refused,
    ValueFacts,
)
from shardir.frontends.stablehlo.types import DTYPES
from shardir.syntax.source import warn

MANY_OPS = 20_000
"""The ops of a program with loops from which a warning says why there are so many."""

SHARDING = "sdy.sharding"
SHARDY_IN_LOOPS = ("sdy.sharding_constraint", "sdy.named_computation")
"""The ops of Shardy that a loop may have whose number of runs depends on values."""
RESULT_INFO = "jax.result_info"
TERMINATORS = ("func.return", "stablehlo.return", "sdy.return")
OF_ARGUMENTS = frozenset((
    SHARDING, RESULT_INFO, "tf.aliasing_output", "jax.buffer_donor", "mhlo.layout_mode",
    "jax.global_constant", "jax.arg_info",
))  # fmt: skip
"""The attributes of arguments and results that are read, or say nothing about values."""

REASONS: Mapping[str, str] = {
    "stablehlo.rng": "random numbers of XLA's own; use jax.random with threefry keys",
    "stablehlo.fft": "a Fourier transform; write it as products with cosines and sines",
    "stablehlo.complex": "complex numbers; write them as pairs of real ones",
    "stablehlo.custom_call": "a call of XLA's library; see shardir.register_custom_op",
}  # fmt: skip
"""Why an op that has no entry is refused."""

EXPANSION = (
    "a function that StableHLO's passes expand: pip install 'shardir[jax]', which has them, or run "
    "stablehlo-opt --chlo-legalize-to-stablehlo --stablehlo-complex-math-expander"
)
"""Why a function without an entry is refused in a text that our own reader has read."""

CALLBACK = "a call of Python (jax.debug, pure_callback, io_callback); take it out"
LIBRARY: Mapping[str, str] = {
    "gesdd": "singular values", "gesvd": "singular values", "syev": "eigenvalues",
    "geev": "eigenvalues", "gehrd": "a Hessenberg form", "gees": "a Schur form",
    "gtsv": "a tridiagonal system",
}  # fmt: skip
"""What the calls of a library compute, by a part of their names."""


@dataclass
class ArgumentForm:
    """What an argument is: an input or a state, with its name, init and sharding."""

    name: str
    sharding: Sharding | None = None
    is_state: bool = False
    is_parameter: bool = False
    init: str | None = None


@dataclass
class HloImporter:
    """The import of the function `main` of a program."""

    program: HloProgram
    module: Module
    mesh: Mesh | None
    """The mesh of the module, by the name that shardings have."""
    facts: ValueFacts = field(default_factory=ValueFacts)
    refusals: dict[tuple[str, str, str], None] = field(default_factory=dict)
    manuals: int = 0
    """The number of manual computations so far."""
    contents: dict[SSAValue, DeviceContents] = field(default_factory=dict)
    """What devices have of the results of Shardy's reductions."""
    by_device: dict[HloValue, HloOp] = field(default_factory=dict)
    """The ops of values that follow from the number of the device, outside of manual computations.
    They are translated for the device that reads them."""

    def __post_init__(self) -> None:
        self.meshes = ProgramMeshes(self.program.meshes, self.mesh)

    def run(
        self,
        name: str,
        roles: Sequence[ArgumentForm],
        updates: Mapping[int, str],
        source: str = "main",
        metrics: Mapping[int, str] = MappingProxyType({}),
        private: bool = False,
    ) -> FoldingBuilder:
        """Import a function.

        Args:
            name: its name in the module.
            roles: of each argument.
            updates: the state that a result replaces, by the index of the result.
            source: its name in the program.
            metrics: the names of results that a step reports, by the index of the result.
            private: whether it is dropped where no other function uses it.

        Raises:
            ShardirError: an op can't be imported; the message lists all of them.
        """
        f = self.program.functions[source]
        self.check(f)
        self.function = self.module.function(name, private=private, kind=FoldingBuilder)
        self.env: dict[HloValue, Value | None] = {}
        arguments = [self._argument(a, r) for a, r in zip(f.block.arguments, roles, strict=True)]
        results = self.translate(f.block, arguments)
        if self.refusals:
            self._raise()
        returned: list[Value] = []
        reported: dict[str, Value] = {}
        for i, (value, attributes) in enumerate(zip(results, f.results, strict=True)):
            assert value is not None
            value = self._as_said(value, attributes)
            if i in updates:
                self.function.update(updates[i], value)
            elif i in metrics:
                reported[metrics[i]] = value
            else:
                _name_result(value, str(attributes.get(RESULT_INFO, "")))
                returned.append(value)
        self.function.returns(*returned, metrics=reported)
        self.erase_unused()
        self._warn_of_loops()
        return self.function

    def _warn_of_loops(self) -> None:
        """Warn of the longest loop of a program that takes long to compile."""
        count = len(ops_of(self.function.block))
        if count > MANY_OPS and self.facts.runs:
            location, runs = max(self.facts.runs.items(), key=lambda item: item[1])
            warn(
                None,
                f"expected at most {MANY_OPS:,} ops, got {count:,}: a loop{self._place(location)} "
                f"of {runs} runs is unrolled; compiling takes about a second for each 1,000 ops",
            )

    def _raise(self) -> None:
        lines = [f"{op}{place}: {reason}" for op, place, reason in self.refusals]
        raise ShardirError(
            f"expected ops that can be imported, got {len(lines)} that can't:\n  "
            + "\n  ".join(lines)
        )

    # ---- checks ----

    def check(self, f: HloFunction) -> None:
        """Find all ops that have no entry, in all functions that `f` may call."""
        for key, value in self.program.attributes.items():
            if key == "mhlo.num_partitions" and value != 1 and not self.program.meshes:
                self._refuse(
                    "module", "", f"mhlo.num_partitions = {value} without a mesh of Shardy"
                )
        for op in self.program.others:
            self._refuse(op.name, self._place(op.location), "an op outside of functions")
        self._check_attributes(f)
        self._check_block(f.block, None, set())

    def _check_attributes(self, f: HloFunction) -> None:
        for attributes in (*f.arguments, *f.results):
            for key in attributes:
                if key not in OF_ARGUMENTS:
                    self._refuse(f"argument or result of @{f.name}", "", f"the attribute {key}")

    def _check_block(
        self, block: HloBlock, called_at: LocationAttr | None, checked: set[str]
    ) -> None:  # fmt: skip
        """Check the ops of a block, and of all functions that it calls. JAX gives the ops of a
        function that is called no lines; so they have that of the first call."""
        for op in block.ops:
            location = op.location or called_at
            if not self._check_op(op, self._place(location)):
                continue
            for region in op.regions:
                self._check_block(region, location, checked)
            f = self.called(op)
            if f is not None and f.name not in checked:
                checked.add(f.name)
                self._check_attributes(f)
                self._check_block(f.block, location, checked)

    def _check_op(self, op: HloOp, place: str) -> bool:
        """Refuse an op that has no entry, or of types that are not ours. Return whether it has
        one."""
        is_known = op.name in SHARDY or op.name in TERMINATORS or _entry_of(op) is not None
        if not is_known:
            is_expanded = op.name.startswith("chlo.") or op.name.endswith("of complex numbers")
            is_read_by_us = is_expanded and not self.program.is_verified
            self._refuse(op.key, place, EXPANSION if is_read_by_us else _reason(op))
            return False
        for key in op.attributes:
            if key == "mhlo.sharding" or (key.startswith("sdy.") and key not in (SHARDING, RULE)):
                self._refuse(op.name, place, f"the attribute {key} on it")
        for value in (*op.results, *(a for r in op.regions for a in r.arguments)):
            if value.type.problem:
                self._refuse(op.name, place, value.type.problem)
            elif value.type.element not in DTYPES:
                reason = f"the element type {value.type.element}; use one of {', '.join(DTYPES)}"
                self._refuse(op.name, place, reason)
        return True

    def _refuse(self, op: str, place: str, reason: str) -> None:
        self.refusals[op, place, reason] = None

    def _place(self, location: LocationAttr | None) -> str:
        place = file_location(location) if location is not None else None
        return f" at {place[0]}:{place[1]}" if place else ""

    # ---- arguments ----

    def _argument(self, argument: HloValue, role: ArgumentForm) -> Value | None:
        t = argument.type
        if t.problem or t.element not in DTYPES:
            self._refuse(f"argument {role.name}", "", t.problem or f"the element type {t.element}")
            return None
        shape, dtype = t.shape, DTYPES[t.element]
        if role.is_parameter:
            value = self.function.parameter(role.name, shape, dtype, init=role.init)
        elif role.is_state:
            value = self.function.state(role.name, shape, dtype, init=role.init)
        else:
            value = self.function.input(role.name, shape, dtype, init=role.init)
        if role.sharding is not None:
            _annotate(value.ssa, role.sharding)
        return value

    def sharding(self, text: str) -> Sharding | None:
        """Return a sharding of Shardy's text; None if it leaves the layout open."""
        return self.meshes.sharding(text)

    def shardings(self, text: str) -> list[Sharding | None]:
        """Return the shardings of several values, of Shardy's text."""
        return self.meshes.shardings(text)

    def axes(self, text: str, axes: Axes) -> Axes:
        """Return the axes of the mesh of Shardy's text of a sharding as those of ours."""
        return self.meshes.axes(MESH_NAME.findall(text)[0], axes)

    def manual_axes(self, text: str, names: Sequence[str]) -> list[str]:
        """Return the axes of our mesh that are manual in a computation with Shardy's text of
        shardings, by the names of its mesh."""
        meshes = {*MESH_NAME.findall(text)}
        if len(meshes) > 1:
            raise Refused("a manual computation on several meshes")
        return self.meshes.manual_axes(meshes.pop(), names) if meshes else [*names]

    def constrained(self, value: Value, sharding: Sharding | None) -> Value:
        """Annotate a value, or, where it has another annotation, a copy of it."""
        if sharding is None:
            return value
        if isinstance(self.function, ManualBuilder):
            self.function.wanted.append((value.ssa, sharding.layout.dims))
            return value
        if isinstance(self.function, LoopBuilder):
            place = self._place(self.function.location())
            warn(None, f"the layout [{sharding.layout}]{place} is left out: it is {IN_LOOP}, all "
                 "of which each device computes")  # fmt: skip
            return value
        self.facts.sources.pop(value.ssa, None)  # users read this value, not what it was made from
        self.facts.origins.pop(value.ssa, None)
        annotation = dist.sharding_of(value.ssa)
        if annotation is None:
            _annotate(value.ssa, sharding)
        elif annotation != sharding:
            value = copied(self, value)
            _annotate(value.ssa, sharding)
        return value

    def _as_said(self, value: Value, attributes: Mapping[str, Any]) -> Value:
        """Return an argument or a result with the sharding of its attributes."""
        text = attributes.get(SHARDING)
        return value if text is None else self.constrained(value, self.sharding(text))

    # ---- ops ----

    def translate(self, block: HloBlock, arguments: Sequence[Value | None]) -> list[Value | None]:
        """Translate a block with these arguments; return its results."""
        self.env.update(zip(block.arguments, arguments, strict=True))
        for op in block.ops[:-1]:
            before = self.function.location()
            location = op.location or before
            with self.function.at(location):
                results = self._results(op)
            self.env.update(zip(op.results, results, strict=True))
        for v in block.results:
            if v in self.by_device:
                self._refuse_of_devices(self.by_device[v])
        return [self.env[v] for v in block.results]

    def _results(self, op: HloOp) -> Sequence[Value | None]:
        """Translate an op; None for each result of one that is refused, or that reads such one."""
        operands: Sequence[Value | None]
        is_number = op.name == DEVICE_NUMBER and not isinstance(self.function, ManualBuilder)
        if is_number and op.results[0] in self.env:  # a loop in a manual computation has it
            return [self.env[op.results[0]]]
        if is_number or any(v in self.by_device for v in op.operands):
            device = self.meshes.device_of(op)
            if device is None:
                return self._postpone(op)
            here: dict[HloValue, Value | None] = {}
            operands = [self._on_device(v, device, here) for v in op.operands]
        else:
            operands = [self.env[v] for v in op.operands]
        return self._attempt(op, operands)

    def _attempt(self, op: HloOp, operands: Sequence[Value | None]) -> Sequence[Value | None]:
        nothing = [None for _ in op.results]
        if any(v is None for v in operands):
            return nothing
        try:
            return self._translate(op, [v for v in operands if v is not None])
        except _Inner:
            return nothing
        except (Refused, ShardirError) as error:
            self._refuse(op.name, self._place(self.function.location()), str(error))
            return nothing
        except Exception as error:
            if self.program.is_verified:
                raise
            reason = f"it is not as StableHLO defines it: {type(error).__name__}: {error}"
            self._refuse(op.name, self._place(self.function.location()), reason)
            return nothing

    def _postpone(self, op: HloOp) -> Sequence[Value | None]:
        """Leave an op to the devices that read its results."""
        if not op.results:
            self._refuse_of_devices(op)
        self.by_device.update(dict.fromkeys(op.results, op))
        return [None for _ in op.results]

    def _on_device(
        self, value: HloValue, device: int, here: dict[HloValue, Value | None]
    ) -> Value | None:
        """Return the value that a device has; `here` are those that it has already."""
        op = self.by_device.get(value)
        if op is None:
            return self.env[value]
        if value not in here:
            if op.name == DEVICE_NUMBER:
                number = self.function.constant(device, dtype=DTYPES[value.type.element])
                results: Sequence[Value | None] = [number]
            else:
                operands = [self._on_device(v, device, here) for v in op.operands]
                results = self._attempt(op, operands)
            here.update(zip(op.results, results, strict=True))
        return here[value]

    def _refuse_of_devices(self, op: HloOp) -> None:
        reason = "a value that follows from the number of the device, outside of shard_map"
        self._refuse(op.name, self._place(op.location), reason)

    def _translate(self, op: HloOp, operands: Sequence[Value]) -> Sequence[Value | None]:
        if op.name in SHARDY:
            if isinstance(self.function, LoopBuilder) and op.name not in SHARDY_IN_LOOPS:
                raise Refused(f"{op.name} {IN_LOOP}")
            return SHARDY[op.name](self, op, *operands)
        called = self.called(op)
        if called is not None:
            operands = [
                self._as_said(v, a) for v, a in zip(operands, called.arguments, strict=True)
            ]
        entry = _entry_of(op)
        if entry is None or any(r.type.element not in DTYPES for r in op.results):
            return [None for _ in op.results]  # it is refused already
        is_whole = isinstance(self.function, LoopBuilder)  # no op of a loop is split
        rule = op.attributes.get(RULE) if op.name != CALL and not is_whole else None
        if rule is not None:
            operands = [copied(self, v, "both") for v in operands]
        last = self.function.block.last_op
        out = entry(
            OpTranslation(
                self.function, op, self.facts, self.run_region, self._callee,
                lambda carried: import_loop(self, op, carried),
            ),
            *operands,
        )  # fmt: skip
        results = [out] if isinstance(out, Value) else list(out)
        if rule is not None:
            results = self._ruled(rule, operands, last, results)
        for value, result in zip(results, op.results, strict=True):
            if value is None:
                continue
            expected = result.type.shape, DTYPES[result.type.element]
            if (value.shape, value.dtype) != expected:
                raise AssertionError(f"a result of {result.type} from operands that give {value}")
        if called is not None:
            pairs = zip(results, called.results, strict=True)
            results = [None if v is None else self._as_said(v, a) for v, a in pairs]
        if (text := op.attributes.get(SHARDING)) is not None:
            shardings = zip(results, self.shardings(text), strict=True)
            results = [None if v is None else self.constrained(v, s) for v, s in shardings]
        return results

    def _ruled(
        self, rule: str, operands: Sequence[Value], last: Operation | None,
        results: Sequence[Value | None],
    ) -> list[Value | None]:  # fmt: skip
        """Hold the dimensions that the rule of an op leaves unsharded; return copies of its
        results, which its users may split.

        Args:
            last: the op before its translation.
        """
        op = None if last is None else last.next_op
        values = [v.ssa for v in (*operands, *results) if v is not None]
        if (
            not isinstance(op, TensorOp)
            or op.next_op is not None
            or [*op.operands, *op.results] != values
        ):
            raise Refused(f"the attribute {RULE} on an op that is not one op here")
        if isinstance(self.function, ManualBuilder):
            raise Refused(f"the attribute {RULE} in a manual computation")
        held = held_dims(rule, op.factors())
        for value, dims in zip((*operands, *results), held, strict=True):
            if value is not None:
                hold(self, value, dims)
        return [None if v is None else copied(self, v, "both") for v in results]

    def within(self, body: FoldingBuilder) -> "HloImporter":
        """Return the importer of a region as a function of its own."""
        inner = HloImporter(self.program, self.module, self.mesh, refusals=self.refusals)
        inner.function, inner.env = body, {}
        return inner

    @property
    def device_ids(self) -> list[int] | None:
        """The device at each place of the mesh; None where these are the same numbers."""
        return self.meshes.device_ids

    def called(self, op: HloOp) -> HloFunction | None:
        """Return the function that an op calls; None if it calls none of the program."""
        name = op.attributes.get("callee") or op.attributes.get("decomposition")
        return self.program.functions.get(name) if isinstance(name, str) else None

    def value(self, v: HloValue) -> Value:
        """Return a value that a loop reads. Raises Refused where it was refused."""
        if v in self.by_device:
            self._refuse_of_devices(self.by_device[v])
        value = self.env[v]
        if value is None:
            raise _Inner
        return value

    def run_region(self, block: HloBlock, arguments: Sequence[Value]) -> list[Any]:
        results = self.translate(block, arguments)
        if any(v is None for v in results):
            raise _Inner
        return results

    def _callee(self, name: str) -> HloBlock:
        if name not in self.program.functions:
            raise Refused(f"a call of @{name}, which the module lacks")
        return self.program.functions[name].block

    def erase_unused(self) -> None:
        """Erase ops without a use: broadcasts whose sources were read, and comparisons that bounds
        decided."""
        for op in reversed([*self.function.block.ops]):
            if op.results and not any(r.uses.get_length() for r in op.results):
                op.detach()
                op.erase()


class _Inner(Refused):
    """A region with an op that is refused, and reported."""


def _entry_of(op: HloOp) -> HloEntry | None:
    """Return the entry of an op: of a call of a library that of its target, if it has one."""
    return TABLE.get(op.key if op.name == CALL and not is_custom(op) else op.name)


def _reason(op: HloOp) -> str:
    """Return why an op without an entry is refused."""
    name = op.name.partition(" ")[0]  # without ` of complex numbers`
    reason = REASONS.get(name, "it has no counterpart")
    if name != CALL:
        return reason
    if "callback" in op.key:
        return CALLBACK
    what = next((text for part, text in LIBRARY.items() if part in op.key), None)
    return reason if what is None else reason.replace(";", f" for {what};")


def _annotate(value: SSAValue, sharding: Sharding) -> None:
    set_type(value, with_sharding(unsharded_type(value), sharding))


def _name_result(value: Value, path: str) -> None:
    """Name what a function returns by its path in the tree of results: `aux.logits` of
    `result['aux']['logits']`. A result that is an argument has its own name."""
    name = name_of(path).removeprefix("result").removeprefix(".")
    if name and isinstance(value.ssa, OpResult):
        value.ssa.name_hint = hint_of(f"result.{name}" if name[0].isdigit() else name)


def donated_of(f: HloFunction) -> dict[int, int]:
    """Return the result that takes the memory of each donated argument: the one that is named, or
    the first of its type."""
    replaced = {i: of["tf.aliasing_output"] for i, of in enumerate(f.arguments)
                if "tf.aliasing_output" in of}  # fmt: skip
    results = f.block.results
    for i, (value, of) in enumerate(zip(f.block.arguments, f.arguments, strict=True)):
        if "jax.buffer_donor" in of:
            free = (k for k, v in enumerate(results)
                    if v.type == value.type and k not in replaced.values())  # fmt: skip
            if (result := next(free, None)) is not None:
                replaced[i] = result
    return dict(sorted(replaced.items()))
