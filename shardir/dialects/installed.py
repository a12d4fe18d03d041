"""What installed packages add: one registry, which all tools and the Python API ask.

    [project.entry-points."shardir.extensions"]
    acme = "acme:EXTENSION"                          # acme/__init__.py: EXTENSION = Extension(...)

A package may also have an entry point `xdsl.universe`, with dialects, passes and targets alone, as
xDSL itself has. What does not load, or takes a name that another package or shardir has, is left
out, with one warning that names its package; everything else goes on. A process adds to the
registry by `shardir.register`.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Self, TypeVar

from xdsl.ir import Dialect, Operation
from xdsl.passes import ModulePass
from xdsl.universe import Universe
from xdsl.utils.target import Target

from shardir.compat.xdsl import universe_of
from shardir.diagnostics import ShardirError

T = TypeVar("T")

GROUP, UNIVERSES = "shardir.extensions", "xdsl.universe"

OWNER = "shardir"
"""The entry point of shardir's own dialects, passes and targets."""


@dataclass(frozen=True, kw_only=True)
class Extension:
    """What a package adds to shardir, each by its name.

    Attributes:
        name: of the package, for messages.
        dialects, passes, targets: functions that import and return a Dialect, the class of a pass,
            and that of a Backend. Each is called when it is needed.
        pipelines: the text of a pipeline.
        modes: the pipeline of a mode, and how it decides on layouts, for `--list-passes`.
        torch: a function that returns how programs of torch compute each class of op: an
            expression, with the operands and properties of the op in braces,
            `"{x} * torch.sigmoid({x})"`, or a function of the scope and the op.
        clusters: the text of a cluster, `dist.cluster @acme <levels [...]>`.
        presets: a plan: a product of presets, `"ddp * fsdp"`, which gets the axes of its factors;
            or a function from its axes, `"dp, tp"`, to a plan in any form of Python.
        cases: a function that returns the cases of each class of op, and its reference, for
            `shardir.testing.check_extension`: `{SwishOp: (CASES, reference)}`.
    """

    name: str
    dialects: Mapping[str, Callable[[], Dialect]] = field(default_factory=dict)
    passes: Mapping[str, Callable[[], type[ModulePass]]] = field(default_factory=dict)
    targets: Mapping[str, Callable[[], type[Target]]] = field(default_factory=dict)
    pipelines: Mapping[str, str] = field(default_factory=dict)
    modes: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    torch: Callable[[], Mapping[type[Operation], Any]] | None = None
    clusters: Mapping[str, str] = field(default_factory=dict)
    presets: Mapping[str, str | Callable[[str], Any]] = field(default_factory=dict)
    cases: Callable[[], Mapping[type[Operation], tuple[Sequence[Any], Any]]] | None = None

    @property
    def tables(self) -> dict[str, Mapping[str, Any]]:
        """The things by their kinds and names."""
        return {kind: getattr(self, kind) for kind in KINDS}


class XdslExtension(Extension):
    """What a universe of xDSL has."""

    @classmethod
    def of(cls, name: str, universe: Universe) -> Self:
        return cls(
            name=name, dialects=universe.all_dialects, passes=universe.all_passes,
            targets=universe.all_targets,
        )  # fmt: skip


KINDS = {
    "dialects": "a dialect", "passes": "a pass", "targets": "a target", "pipelines": "a pipeline",
    "modes": "a mode", "clusters": "a cluster", "presets": "a preset",
}  # fmt: skip
"""The kinds of things in an extension, in words."""

SHARED = {"passes": "pipelines", "pipelines": "passes"}
"""Kinds whose names are used in the same places."""


class Registry:
    """What all packages add, shardir among them.

    Attributes:
        tables: the things by their kinds and names.
        extensions: in the order in which they were added.
        version: the number of changes so far, for caches.
    """

    def __init__(self) -> None:
        self.tables: dict[str, dict[str, Any]] = {kind: {} for kind in KINDS}
        self.extensions: list[Extension] = []
        self._owner: dict[tuple[str, str], str] = {}
        self._own: dict[str, Mapping[str, Any]] = {}
        self.version, self.is_filled = 0, False

    def add(self, extension: Extension) -> None:
        """Add an extension.

        Raises:
            ValueError: a name is taken; nothing was added.
        """
        taken = [text for kind in KINDS for text in self._taken(extension, kind)]
        if extension in self.extensions:
            taken = [f"those of {extension.name} again"]
        if taken:
            raise ValueError(f"expected new names, got {', '.join(taken)}")
        for kind, things in extension.tables.items():
            for name, thing in things.items():
                # A target's tool says which package it needs.
                loads = kind in ("dialects", "passes")
                made = _checked(thing, extension.name, name) if loads else thing
                self.tables[kind][name] = made
                self._owner[kind, name] = extension.name
        self.extensions.append(extension)
        self.version += 1

    def _taken(self, extension: Extension, kind: str) -> list[str]:
        """Return the names of an extension that others have, with their owners."""
        found, other = [], SHARED.get(kind)
        for name in extension.tables[kind]:
            for of in (kind, other):
                if of is None:
                    continue
                if name in self._own.get(of, ()):
                    owner = OWNER
                elif (of, name) in self._owner:
                    owner = self._owner[of, name]
                elif kind == "passes" and of != kind and name in extension.tables[of]:
                    owner = extension.name
                else:
                    continue
                what = "" if owner == OWNER and of == kind else f" as {KINDS[of]}"
                found.append(f"{KINDS[kind]} {name}, which {owner} has{what}")
                break
        return found

    def with_own(self, kind: str, own: Mapping[str, T]) -> dict[str, T]:
        """Return a table of shardir's with the things of extensions. Of two with one name shardir's
        counts; a warning names the package of the other."""
        if kind not in self._own:
            self._own[kind] = own
            for of in (kind, SHARED.get(kind, kind)):
                for name in [n for n in self.tables[of] if n in own]:
                    if (owner := self._owner[of, name]) != OWNER:
                        del self.tables[of][name], self._owner[of, name]
                        warnings.warn(
                            f"{KINDS[of]} {name} of {owner} is left out: expected a new name, got "
                            f"that of {KINDS[kind]} of shardir; rename it",
                            stacklevel=4,
                        )
        return {**own, **self.tables[kind]}

    def names(self, kind: str) -> list[str]:
        """Return the names that extensions of shardir have, but not those of other tools."""
        return [
            name for e in self.extensions if not isinstance(e, XdslExtension)
            for name in e.tables[kind] if self._owner.get((kind, name)) == e.name
        ]  # fmt: skip

    def universe(self, own: Universe) -> Universe:
        """Return a universe with the things of all extensions, but for those that the tools of xDSL
        find themselves."""
        found = universe_of(
            dict(own.all_dialects), dict(own.all_passes), dict(own.all_targets),
            getattr(own, "all_frontends", {}),
        )  # fmt: skip
        for extension in self.extensions:
            if not isinstance(extension, XdslExtension):
                found.all_dialects.update(extension.dialects)
                found.all_passes.update(extension.passes)
                found.all_targets.update(extension.targets)
        return found

    def torch(self) -> dict[type[Operation], Any]:
        """Return how programs of torch compute the ops of extensions."""
        found: dict[type[Operation], Any] = {}
        for extension in self.extensions:
            if extension.torch is not None:
                found |= _checked(extension.torch, extension.name, "torch")()
        return found


REGISTRY = Registry()


def installed() -> Registry:
    """Return the registry, filled from all installed packages at its first use. Warns about each
    package that does not load, or that has a name of another one."""
    if not REGISTRY.is_filled:
        REGISTRY.is_filled = True  # a package may ask for it while it is loaded
        _fill(REGISTRY)
    return REGISTRY


def _fill(registry: Registry) -> None:
    plugins = [*entry_points(group=UNIVERSES), *entry_points(group=GROUP)]
    for plugin in sorted(plugins, key=_order):
        try:
            registry.add(_extension(plugin))
        except Exception as e:
            warnings.warn(
                f"the plugin {plugin.name} ({plugin.value}) is left out: {type(e).__name__}: {e}; "
                "repair or uninstall its package",
                stacklevel=3,
            )


def _extension(plugin: EntryPoint) -> Extension:
    """Return the extension of an entry point. Raises whatever its package raises."""
    if plugin.group == UNIVERSES:
        # UNIVERSE of shardir has what the registry has, for the tools of xDSL.
        is_own = plugin.name == OWNER
        universe = import_module(plugin.module).OWN if is_own else plugin.load()
        if not isinstance(universe, Universe):
            raise TypeError(f"expected an xdsl.universe.Universe, got {universe!r}")
        return XdslExtension.of(plugin.name, universe)
    extension = plugin.load()
    if not isinstance(extension, Extension):
        raise TypeError(f"expected a shardir.extend.Extension, got {extension!r:.60}")
    return extension


def _order(plugin: EntryPoint) -> tuple[bool, bool, str]:
    """Sort key: ours and xDSL's first, so that no other plugin takes their names."""
    return plugin.name not in (OWNER, "xdsl"), plugin.group == GROUP, plugin.name


def _checked(make: Callable[[], Any], extension: str, name: str) -> Callable[[], Any]:
    """Return a loader whose failure is a ShardirError that names the package."""

    def load() -> Any:
        try:
            return make()
        except Exception as e:
            raise ShardirError(
                f"{name} of the plugin {extension} cannot be loaded: {type(e).__name__}: {e}; "
                "repair or uninstall its package"
            ) from e

    return load


def of_registry(kind: str, own: Mapping[str, T]) -> dict[str, T]:
    """Return a table of shardir's with the things of extensions (`Registry.with_own`)."""
    return installed().with_own(kind, own)
