"""The functions of probes, as text in the local view."""

from dataclasses import dataclass

ROW = 256
"""Elements of f32 in a row of a communicated value: 1 KB."""

SMALLEST = 1 << 12
"""The bytes of the smallest value."""


@dataclass(frozen=True)
class Probe:
    """A function of the module, its subject (an element type, `memory`, `overhead`,
    `interference`, `skew`, a collective, or the name of an op), and the approximate bytes of its
    values. Of a probe `against` another one, which has no subject, the ratio of both times counts;
    of one that is `exposed` what it takes beyond its computation. A probe of computation has no
    text: its name is that of an op's result in OPS."""

    name: str
    about: str
    size: int
    text: str
    against: str = ""
    exposed: bool = False


def sizes(most: int) -> list[int]:
    """Return 4 KB, 16 KB, ... up to `most` bytes, at least one."""
    found = [SMALLEST]
    while found[-1] * 4 <= most:
        found.append(found[-1] * 4)
    return found


class ProbeFunction:
    """The lines of a function; the last value is its result, unless `results` are set."""

    def __init__(self, name: str, arguments: list[tuple[str, str]]):
        self.name, self.arguments = name, arguments
        self.filled: set[str] = set()  # arguments of one number, but for indices
        self.lines: list[str] = []
        self.last = ""
        self.results: list[tuple[str, str]] = []

    def op(self, text: str, type: str, results: int = 1) -> str:
        """Add an op, and return its value; of several results the first, which has the type."""
        self.last = f"%v{len(self.lines)}"
        self.results = [(self.last, type)]
        names = [self.last, *(f"{self.last}_{i}" for i in range(1, results))]
        self.lines.append(f"  {', '.join(names)} = {text}")
        return self.last

    def probe(self, about: str, size: int, against: str = "", exposed: bool = False) -> Probe:
        inputs = ((n, t, _draw(t, n in self.filled)) for n, t in self.arguments)
        given = ", ".join(f"%{n}: {t} {{train.input = {drawn}}}" for n, t, drawn in inputs)
        values, types = (", ".join(each) for each in zip(*self.results, strict=True))
        is_step = self.results[0][1] == type_text(())  # then values are freed after their last use
        attributes = "attributes {train.step} " if is_step else ""
        text = (
            f"func.func @{self.name}({given}) -> ({types}) {attributes}{{\n"
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
    """Return the values of an input of a type of the local view: integers, which number rows, are
    random, and so are others but those of ops whose time does not depend on them, since large ones
    are drawn for longer than they are computed with. (GPUs multiply equal numbers faster.)"""
    if "i32," in type:
        return "#train.init<integers, low = 0, high = 3>"
    return (
        f"#train.init<{'constant, value = 0.5' if filled else 'uniform, low = -0.02, high = 0.02'}>"
    )
