"""The text of a program of the benchmarks, op by op."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch


@dataclass
class Text:
    """Lines of IR, and the types of their values.

    Axes of size 1 are left out of layouts. `fsdp`: parameters are split over dp as well, along the
    first unsharded dimension that dp divides. `layouts` replaces the axes of arguments, by patterns
    of names, of which the first that matches counts."""

    mesh: dict[str, int]
    fsdp: bool = False
    layouts: Mapping[str, str] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    types: dict[str, str] = field(default_factory=dict)
    arguments: list[str] = field(default_factory=list)

    def argument(
        self, name: str, shape: list[int], axes: str, attrs: str, element: str = "f32"
    ) -> str:
        type = tensor(shape, element)
        axes = next((a for pattern, a in self.layouts.items() if fnmatch(name, pattern)), axes)
        laid = f"{type[:-1]}, #dist.layout<@m, [{self.splitting(axes)}]>>"
        self.types[name] = laid
        self.arguments.append(f"%{name}: {laid} {{{attrs}}}")
        return name

    def splitting(self, axes: str) -> str:
        """Return the axes of each dimension without those of size 1."""
        for axis, n in self.mesh.items():
            axes = axes.replace(f"{{{axis}}}", "{}") if n == 1 else axes
        return axes

    def op(self, name: str, text: str, operands: list[str], type: str) -> str:
        types = ", ".join(self.types[o] for o in operands)
        self.types[name] = type
        arrow = f" : ({types}) -> {type}" if operands else f" -> {type}"
        self.lines.append(f"  %{name} = {text}{arrow}")
        return name

    def parameter(self, name: str, shape: list[int], axes: str, init: str) -> str:
        entries = self.splitting(axes).split(", ")
        if self.fsdp:
            unsharded = [
                d for d, e in enumerate(entries) if e == "{}" and shape[d] % self.mesh["dp"] == 0
            ]
            for d in unsharded[:1]:
                entries[d] = "{dp}"
        axes = ", ".join(entries)
        return self.argument(name, shape, axes, f'train.parameter = "{name}", train.init = {init}')

    def indices(self, name: str, shape: list[int], axes: str, high: int, low: int = 0) -> str:
        attrs = f"train.input = #train.init<integers, low = {low}, high = {high}>"
        return self.argument(name, shape, axes, attrs, "i32")

    def squared_error(self, y: str, shape: list[int]) -> str:
        """Add the loss mean((y - target)^2)."""
        e = self.op("error", f"nn.sub %{y}, %target", [y, "target"], tensor(shape))
        e = self.op("squared", f"nn.mul %{e}, %{e}", [e, e], tensor(shape))
        dims = ", ".join(map(str, range(len(shape))))
        return self.op("loss", f"nn.reduce <mean> %{e} dims <{dims}>", [e], "tensor<f32>")

    def step(self, lr: float, optimizer: str = "sgd") -> str:
        """Return the module: the mesh, a function that returns %loss, and its step."""
        arguments = ",\n    ".join(self.arguments)
        mesh = ", ".join(f"{axis} = {n}" for axis, n in self.mesh.items())
        return (
            f"dist.mesh @m <{mesh}>\n\n"
            f"func.func private @loss(\n    {arguments}\n) -> tensor<f32> {{\n"
            + "\n".join(self.lines)
            + "\n  func.return %loss : tensor<f32>\n}\n\n"
            f"train.step @step of @loss <{optimizer}, lr = {lr}>\n"
        )


def tensor(shape: list[int], element: str = "f32") -> str:
    return f"tensor<{'x'.join(map(str, [*shape, element]))}>"


NORMAL = "#train.init<normal, mean = 0.0, std = {:.6f}>"
ONES, ZEROS = (f"#train.init<constant, value = {v}>" for v in ("1.0", "0.0"))
