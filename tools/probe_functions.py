"""The functions of probes, as text in the local view."""

from dataclasses import dataclass

ROW = 256
"""The number of f32 elements in a row of a communicated value: 1 KB."""

SMALLEST = 1 << 12
"""The bytes of the smallest value."""


@dataclass(frozen=True)
class Probe:
    """A measurement for shard-calibrate.

    Attributes:
        name: the name of its function or, for a probe of computation, of an op's result in OPS.
        about: the subject: an element type, `memory`, `overhead`, `interference`, `skew`, a
            collective, or the name of an op.
        size: the approximate bytes of its values.
        text: the function; empty for a probe of computation.
        against: another probe, without a subject: the ratio of both times counts.
        exposed: whether only the time counts that computation does not hide.
    """

    name: str
    about: str
    size: int
    text: str
    against: str = ""
    exposed: bool = False


def sizes(most: int) -> list[int]:
    """Return 4 KB, 16 KB, ... up to `most` bytes, at least one size."""
    sizes = [SMALLEST]
    while sizes[-1] * 4 <= most:
        sizes.append(sizes[-1] * 4)
    return sizes


class ProbeFunction:
    """Builds the text of a function. The last value is its result, unless `results` are set."""

    def __init__(self, name: str, arguments: list[tuple[str, str]]):
        self.name, self.arguments = name, arguments
        self.filled: set[str] = set()  # arguments whose elements are equal, except indices
        self.lines: list[str] = []
        self.last = ""
        self.results: list[tuple[str, str]] = []

    def op(self, text: str, type: str, results: int = 1) -> str:
        """Add an op with `results` results; return the first one, whose type is `type`."""
        self.last = f"%v{len(self.lines)}"
        self.results = [(self.last, type)]
        names = [self.last, *(f"{self.last}_{i}" for i in range(1, results))]
        self.lines.append(f"  {', '.join(names)} = {text}")
        return self.last

    def probe(self, about: str, size: int, against: str = "", exposed: bool = False) -> Probe:
        inputs = ((n, t, _draw(t, n in self.filled)) for n, t in self.arguments)
        arguments = ", ".join(f"%{n}: {t} {{train.input = {drawn}}}" for n, t, drawn in inputs)
        values, types = (", ".join(words) for words in zip(*self.results, strict=True))
        is_step = self.results[0][1] == type_text(())  # then values are freed after their last use
        attributes = "attributes {train.step} " if is_step else ""
        text = (
            f"func.func @{self.name}({arguments}) -> ({types}) {attributes}{{\n"
            + "\n".join(self.lines)
            + f"\n  func.return {values} : {types}\n}}"
        )
        return Probe(self.name, about, size, text, against, exposed)


def type_text(
    shape: tuple[int, ...], element: str = "f32", dims: tuple[str, ...] = (), partial: str = ""
) -> str:
    """Return a type of the local view."""
    split = ", ".join(f"{{{axes}}}" for axes in dims or ("",) * len(shape))
    sums = f", partial sum {{{partial}}}" if partial else ""
    return f"tensor<{'x'.join([*map(str, shape), element])}, #dist.local<@m, [{split}]{sums}>>"


def _draw(type: str, filled: bool = False) -> str:
    """Return the initial values of an input. They are random, for integers the numbers of rows.
    `filled` inputs have equal elements: large values take longer to draw than to compute with. It
    is for ops whose time does not depend on the values. (GPUs multiply equal numbers faster.)"""
    if "i32," in type:
        return "#train.init<integers, low = 0, high = 3>"
    return (
        f"#train.init<{'constant, value = 0.5' if filled else 'uniform, low = -0.02, high = 0.02'}>"
    )
