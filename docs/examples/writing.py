"""Values with types and the text of a function, for the scripts here that write programs."""

from dataclasses import dataclass
from math import prod

from shardir.cost.clusters import load


@dataclass(frozen=True)
class Value:
    """A value: its name, shape and element type, and its layout where one is annotated."""

    name: str
    shape: tuple[int, ...]
    element: str
    layout: str = ""

    @property
    def type(self) -> str:
        sizes = "".join(f"{n}x" for n in self.shape)
        return f"tensor<{sizes}{self.element}{', ' if self.layout else ''}{self.layout}>"


class Program:
    """A function that is being written: its arguments, its ops, and the new values of its states.

    `axes` are those of the mesh, if there is one; it is on devices of the ready-made cluster of the
    name `cluster`, if one is given."""

    def __init__(self, element: str, axes: dict[str, int], cluster: str = ""):
        self.element, self.cluster = element, cluster
        self.axes = {name: n for name, n in axes.items() if name == "dp" or n > 1}
        self.arguments: list[str] = []
        self.ops: list[str] = []
        self.updated: list[tuple[Value, str]] = []

    def argument(
        self, key: str, shape: tuple[int, ...], role: str, init: str, axes: tuple[str, ...] = (),
        element: str = "",
    ) -> Value:  # fmt: skip
        """Add an argument. `axes` has the axis that splits each leading dimension, or ""."""
        split = [a if a in self.axes else "" for a in axes] + [""] * (len(shape) - len(axes))
        entries = ", ".join(f"{{{a}}}" for a in split)
        layout = f"#dist.layout<@m, [{entries}]>" if any(split) else ""
        value = Value("%" + key.replace(".", "_"), shape, element or self.element, layout)
        named = "" if role == "input" else f'"{key}", train.init = '
        described = f"train.{role} = {named}#train.init<{init}>"
        self.arguments.append(f"    {value.name}: {value.type} {{{described}}}")
        return value

    def op(self, name: str, text: str, operands: list[Value], *shapes: tuple[int, ...]) -> Value:
        """Add an op with a result of each shape, named `name`, `name`_1, ...; return the first.

        In its text {} stands for the operands."""
        results = [
            Value(f"%{name}{f'_{i}' * (i > 0)}", shape, self.element)
            for i, shape in enumerate(shapes)
        ]
        types = ", ".join(v.type for v in operands)
        to = ", ".join(v.type for v in results)
        left, given = (", ".join(v.name for v in vs) for vs in (results, operands))
        to = f"({to})" if len(results) > 1 else to
        self.ops.append(f"  {left} = nn.{text.format(given)} : ({types}) -> {to}")
        return results[0]

    def text(self, loss: Value, step: str) -> str:
        """Return the module, with the step of an optimizer."""
        arguments = ",\n".join(self.arguments)
        results = [loss, *(v for v, _ in self.updated)]
        names, types = (
            ", ".join(t) for t in zip(*((v.name, v.type) for v in results), strict=True)
        )
        marked = [f'{v.type} {{train.updates = "{key}"}}' for v, key in self.updated]
        body = "\n".join([*self.ops, f"  func.return {names} : {types}"])
        return (
            f"{self.head()}func.func private @loss(\n{arguments}\n"
            f") -> ({', '.join([loss.type, *marked])}) {{\n{body}\n}}\n\n"
            f"train.step @step of @loss <{step}>\n"
        )

    def head(self) -> str:
        """Return the mesh, and the cluster that it is on."""
        if not self.axes:
            return ""
        mesh = f"dist.mesh @m <{', '.join(f'{name} = {n}' for name, n in self.axes.items())}>"
        if not self.cluster:
            return f"{mesh}\n\n"
        cluster = load(self.cluster).part(prod(self.axes.values()))
        return f"dist.cluster @{self.cluster} <{cluster}>\n{mesh} on @{self.cluster}\n\n"
