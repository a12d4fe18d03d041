"""Programs of StableHLO -> modules: a walk of the ops, by the table of ops/.

Calls are inlined, and what is refused is reported at once, with the line of the user's source.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from xdsl.dialects.builtin import LocationAttr, TensorType
from xdsl.ir import SSAValue

from shardir.algebra.mesh import Mesh
from shardir.algebra.sdy import from_sdy, mesh_from_sdy, shardings_from_sdy
from shardir.algebra.sharding import Sharding
from shardir.build import Module, Value
from shardir.compat.xdsl import set_type
from shardir.diagnostics import ShardirError
from shardir.dialects import dist
from shardir.dialects.blocks import ops_of
from shardir.dialects.dist import LayoutAttr, ShardingAttr
from shardir.dialects.locations import file_location
from shardir.frontends.stablehlo.folding import FoldingBuilder
from shardir.frontends.stablehlo.form import (
    HloBlock,
    HloFunction,
    HloOp,
    HloProgram,
    HloValue,
)
from shardir.frontends.stablehlo.manual import ManualBuilder
from shardir.frontends.stablehlo.ops import TABLE
from shardir.frontends.stablehlo.ops.custom import CALL, is_custom
from shardir.frontends.stablehlo.shardy import RULE, SHARDY, copied
from shardir.frontends.stablehlo.translation import OpTranslation, Refused, ValueFacts
from shardir.frontends.stablehlo.types import DTYPES
from shardir.syntax.source import warn

NO_AXES, NO_DEVICES = "<[]", "<[]>"
"""The text of a mesh of one device or of none begins, and the text of one without devices ends."""

MANY_OPS = 20_000
"""The ops of a program with loops from which a warning says why there are so many."""

SHARDING = "sdy.sharding"
TERMINATORS = ("func.return", "stablehlo.return", "sdy.return")
OF_ARGUMENTS = frozenset((
    SHARDING, "tf.aliasing_output", "jax.buffer_donor", "jax.result_info", "mhlo.layout_mode",
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
            if SHARDING in attributes:
                value = self.constrained(value, self.sharding(attributes[SHARDING]))
            if i in updates:
                self.function.update(updates[i], value)
            elif i in metrics:
                reported[metrics[i]] = value
            else:
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
        for attributes in (*f.arguments, *f.results):
            for key in attributes:
                if key not in OF_ARGUMENTS:
                    self._refuse(f"argument or result of @{f.name}", "", f"the attribute {key}")
        self._check_block(f.block, None, set())

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
            name = op.attributes.get("callee") or op.attributes.get("decomposition")
            if name in self.program.functions and name not in checked:
                checked.add(name)
                self._check_block(self.program.functions[name].block, location, checked)

    def _check_op(self, op: HloOp, place: str) -> bool:
        """Refuse an op that has no entry, or of types that are not ours. Return whether it has
        one."""
        is_known = op.key in TABLE or op.name in SHARDY or op.name in TERMINATORS
        if not is_known and not (op.name == CALL and is_custom(op)):
            self._refuse(op.key, place, REASONS.get(op.name, "it has no counterpart"))
            return False
        for key in op.attributes:
            if key == "mhlo.sharding" or (key.startswith("sdy.") and key not in (SHARDING, RULE)):
                self._refuse(op.name, place, f"the attribute {key} on it")
        if RULE in op.attributes and op.name != CALL:
            self._refuse(op.name, place, f"the attribute {RULE} on an op that has factors")
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
        """Return a sharding of Shardy's text; None on a mesh without devices, as JAX has one for
        values that may have any layout."""
        name = re.search(r"<@([\w$.]+)", text)
        mesh = "" if name is None else self.program.meshes.get(name[1], "")
        if mesh.endswith(NO_DEVICES):
            return None
        if NO_AXES in mesh:
            raise ShardirError(f"expected a sharding on the mesh's axes, got one device: {text}")
        if self.mesh is None:
            raise ShardirError(f"expected a mesh for the sharding {text}, got none; pass mesh=...")
        return from_sdy(text, self.mesh)

    def shardings(self, text: str) -> list[Sharding]:
        """Return the shardings of several values, of Shardy's text."""
        if self.mesh is None:
            raise ShardirError(f"expected a mesh for the shardings {text}, got none; pass mesh=...")
        return shardings_from_sdy(text, self.mesh)

    def constrained(self, value: Value, sharding: Sharding | None) -> Value:
        """Annotate a value, or, where it has another annotation, a copy of it."""
        if sharding is None:
            return value
        if isinstance(self.function, ManualBuilder):
            if sharding.layout.used:
                raise Refused(f"the sharding [{sharding.layout}] within a manual computation")
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
        return [self.env[v] for v in block.results]

    def _results(self, op: HloOp) -> Sequence[Value | None]:
        """Translate an op; None for each result of one that is refused, or that reads such one."""
        operands = [self.env[v] for v in op.operands]
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

    def _translate(self, op: HloOp, operands: Sequence[Value]) -> Sequence[Value | None]:
        if op.name in SHARDY:
            return SHARDY[op.name](self, op, *operands)
        entry = TABLE.get(op.key) or TABLE.get(op.name)
        if entry is None or any(r.type.element not in DTYPES for r in op.results):
            return [None for _ in op.results]  # it is refused already
        out = entry(
            OpTranslation(self.function, op, self.facts, self._run_region, self._callee), *operands
        )
        results = [out] if isinstance(out, Value) else list(out)
        for value, result in zip(results, op.results, strict=True):
            if value is None:
                continue
            expected = result.type.shape, DTYPES[result.type.element]
            if (value.shape, value.dtype) != expected:
                raise AssertionError(f"a result of {result.type} from operands that give {value}")
        if (text := op.attributes.get(SHARDING)) is not None:
            shardings = zip(results, self.shardings(text), strict=True)
            results = [None if v is None else self.constrained(v, s) for v, s in shardings]
        return results

    def within(self, body: FoldingBuilder) -> "HloImporter":
        """Return the importer of a region as a function of its own."""
        inner = HloImporter(self.program, self.module, self.mesh, refusals=self.refusals)
        inner.function, inner.env = body, {}
        return inner

    @property
    def device_ids(self) -> list[int] | None:
        """The device at each place of the mesh; None where these are the same numbers."""
        text = self.program.meshes.get(self.mesh.name, "") if self.mesh is not None else ""
        return device_ids_of(text)

    def _run_region(self, block: HloBlock, arguments: Sequence[Value]) -> list[Any]:
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


def _annotate(value: SSAValue, sharding: Sharding) -> None:
    t = value.type
    assert isinstance(t, TensorType)
    plain = not (sharding.open or sharding.priorities or sharding.replicated)
    attr = LayoutAttr(sharding.layout) if plain else ShardingAttr(sharding)
    set_type(value, TensorType(t.element_type, t.get_shape(), attr))


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


def meshes_of(program: HloProgram) -> dict[str, Mesh]:
    """Return the meshes of a program that have axes, by name. Rank r of a mesh with device_ids
    is its device number r.

    Raises:
        ShardirError: a mesh can't be expressed.
    """
    meshes: dict[str, Mesh] = {}
    for name, text in program.meshes.items():
        if (text := text.removeprefix("#sdy.mesh")).startswith(NO_AXES):
            continue
        if (ids := device_ids_of(text)) is not None and sorted(ids) == [*range(len(ids))]:
            text = DEVICE_IDS.sub("", text)
        meshes[name] = mesh_from_sdy(f"sdy.mesh @{name} = {text}")
    return meshes


DEVICE_IDS = re.compile(r",\s*device_ids\s*=\s*\[([\d,\s]*)\]")


def device_ids_of(text: str) -> list[int] | None:
    """Return the device_ids of the text of a mesh; None without."""
    m = DEVICE_IDS.search(text)
    return None if m is None else [int(n) for n in m[1].split(",") if n.strip()]
