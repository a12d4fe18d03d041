"""Random training steps and forward functions without annotations, as text, of any size.

A program is drawn from one source of random numbers: it begins with rows, sequences, tokens or
images, and grows by layers of the kinds in LAYERS, each of which has the last value as its operand,
and perhaps an earlier one. Most sizes are divided by all devices together, some by none.
"""

from collections.abc import Callable, Sequence
from random import Random

from bench.program_text import NORMAL, ONES, ZEROS, tensor
from shardir.algebra.mesh import Mesh

OPTIMIZERS = [
    "sgd, lr = 0.1",
    "momentum, lr = 0.1, momentum = 0.9",
    "adamw, lr = 0.1",
    "lamb, lr = 0.1",
]

Shape = tuple[int, ...]


def declared(mesh: Mesh) -> str:
    """Return the mesh and its cluster as text."""
    sizes = ", ".join(f"{n} = {s}" for n, s in mesh.axes)
    if mesh.cluster is None:
        return f"dist.mesh @m <{sizes}>"
    return f"dist.cluster @c <{mesh.cluster}>\ndist.mesh @m <{sizes}> on @c"


class Writer:
    """Writes one program. `last` is its last value."""

    def __init__(self, mesh: Mesh, random: Random, nearly: bool = False):
        self.mesh, self.random, self.nearly = mesh, random, nearly
        self.arguments: list[str] = []
        self.lines: list[str] = []
        self.shapes: dict[str, Shape] = {}
        self.types: dict[str, str] = {}
        self.weights: list[str] = []
        self.even = random.random() < 0.8
        self.scale = random.choice([1, 1, 8])
        self.last = self.begin()

    def size(self) -> int:
        """Return a size that all devices divide, or any; with `nearly` one that they divide, or
        one up to 4% below such a size, which the search splits unevenly."""
        if self.nearly:
            if self.random.random() < 0.3:
                return self.mesh.size * self.random.choice([1, 4, 16]) * self.scale
            n = self.mesh.size * self.random.choice([16, 32, 64]) * self.scale
            return n - self.random.randrange(1, max(2, n // 25))
        if self.even or self.random.random() < 0.5:
            return self.mesh.size * self.random.choice([1, 2, 4, 16]) * self.scale
        return self.random.choice([1, 3, 10, 50])

    # ---- values ----

    def argument(self, shape: Shape, attributes: str, element: str = "f32") -> str:
        name = f"a{len(self.arguments)}"
        self.shapes[name], self.types[name] = shape, tensor([*shape], element)
        self.arguments.append(f"%{name}: {self.types[name]} {{{attributes}}}")
        return name

    def input(self, shape: Shape) -> str:
        return self.argument(shape, f"train.input = {NORMAL.format(1)}")

    def integers(self, shape: Shape, high: int) -> str:
        init = f"#train.init<integers, low = 0, high = {high}>"
        return self.argument(shape, f"train.input = {init}", "i32")

    def parameter(self, shape: Shape, init: str = NORMAL.format(0.02)) -> str:
        """Return a new parameter, or sometimes one of the same shape that is used already."""
        same = [w for w in self.weights if self.shapes[w] == shape]
        if same and self.random.random() < 0.2:
            return self.random.choice(same)
        name = f"w{len(self.arguments)}"
        self.weights.append(
            self.argument(shape, f'train.parameter = "{name}", train.init = {init}')
        )
        return self.weights[-1]

    def op(self, text: str, operands: list[str], shape: Shape, element: str = "f32") -> str:
        name = f"v{len(self.lines)}"
        given = ", ".join(self.types[o] for o in operands)
        self.shapes[name], self.types[name] = shape, tensor([*shape], element)
        arrow = f" : ({given}) ->" if operands else " ->"
        self.lines.append(f"  %{name} = {text}{arrow} {self.types[name]}")
        return name

    def begin(self) -> str:
        start = self.random.choice(["rows", "rows", "sequences", "tokens", "images"])
        if start == "images":
            size = self.random.choice([4, 8])
            return self.input((self.size(), self.random.choice([3, 8]), size, size))
        batch, features = self.size(), self.size()
        if start == "rows":
            return self.input((batch, features))
        seq = self.random.choice([8, 16, 128])
        if start == "sequences":
            return self.input((batch, seq, features))
        words = self.size()
        table, tokens = self.parameter((words, features)), self.integers((batch, seq), words)
        return self.op(
            f"nn.gather %{table}, %{tokens} axis 0", [table, tokens], (batch, seq, features)
        )

    # ---- layers ----

    @property
    def shape(self) -> Shape:
        return self.shapes[self.last]

    def dense(self) -> None:
        *rows, n = self.shape
        m = self.random.choice([n, self.size()])
        w = self.parameter((n, m))
        self.last = self.op(f"nn.matmul %{self.last}, %{w}", [self.last, w], (*rows, m))
        if self.random.random() < 0.4:
            b = self.parameter((m,), ZEROS)
            self.last = self.op(f"nn.add %{self.last}, %{b}", [self.last, b], self.shape)

    def unary(self) -> None:
        name = self.random.choice(["relu", "gelu", "tanh", "sigmoid", "silu", "square"])
        self.last = self.op(f"nn.{name} %{self.last}", [self.last], self.shape)

    def binary(self) -> None:
        """The last value with an earlier one of its shape."""
        same = [v for v, s in self.shapes.items() if s == self.shape and "f32" in self.types[v]]
        x, name = self.random.choice(same), self.random.choice(["add", "add", "mul", "sub"])
        self.last = self.op(f"nn.{name} %{self.last}, %{x}", [self.last, x], self.shape)

    def norm(self) -> None:
        x, n = self.last, self.shape[-1]
        w = self.parameter((n,), ONES)
        if self.random.random() < 0.5:
            self.last = self.op(f"nn.rms_norm %{x}, %{w} eps 1.0e-05", [x, w], self.shape)
        else:
            b = self.parameter((n,), ZEROS)
            text = f"nn.layer_norm %{x}, %{w}, %{b} eps 1.0e-05"
            self.last = self.op(text, [x, w, b], self.shape)

    def softmax(self) -> None:
        axis = len(self.shape) - 1
        self.last = self.op(f"nn.softmax %{self.last} axis {axis}", [self.last], self.shape)

    def attention(self) -> None:
        """Attention of a sequence to itself, in heads or not."""
        x, (batch, seq, n) = self.last, self.shape
        heads = self.random.choice([h for h in (1, 2, 4, 8) if n % h == 0])
        parts = []
        for _ in range(3):
            w = self.parameter((n, n))
            y = self.op(f"nn.matmul %{x}, %{w}", [x, w], self.shape)
            y = self.op(f"nn.reshape %{y}", [y], (batch, seq, heads, n // heads))
            turned = (batch, heads, seq, n // heads)
            parts.append(self.op(f"nn.transpose %{y} perm <0, 2, 1, 3>", [y], turned))
        q, k, v = parts
        square, split = (batch, heads, seq, seq), (batch, heads, seq, n // heads)
        if self.random.random() < 0.5:
            o = self.op(f"nn.attention %{q}, %{k}, %{v}", [q, k, v], split)
        else:
            s = self.op(f'nn.einsum "bhtd,bhsd->bhts" %{q}, %{k}', [q, k], square)
            s = self.op(f"nn.softmax %{s} axis 3", [s], square)
            o = self.op(f"nn.matmul %{s}, %{v}", [s, v], split)
        o = self.op(f"nn.transpose %{o} perm <0, 2, 1, 3>", [o], (batch, seq, heads, n // heads))
        self.last = self.op(f"nn.reshape %{o}", [o], (batch, seq, n))

    def experts(self) -> None:
        """A dense mixture of experts: each expert on all rows, weighted by a softmax."""
        x, (*rows, n) = self.last, self.shape
        count, m = self.random.choice([2, 4, 8, self.mesh.size]), self.size()
        dims = "bs"[: len(rows)]
        gate, up, down = (self.parameter(s) for s in ((n, count), (count, n, m), (count, m, n)))
        g = self.op(f"nn.matmul %{x}, %{gate}", [x, gate], (*rows, count))
        g = self.op(f"nn.softmax %{g} axis {len(rows)}", [g], (*rows, count))
        h = self.op(f'nn.einsum "{dims}d,edf->e{dims}f" %{x}, %{up}', [x, up], (count, *rows, m))
        h = self.op(f"nn.relu %{h}", [h], (count, *rows, m))
        h = self.op(
            f'nn.einsum "e{dims}f,efd->e{dims}d" %{h}, %{down}', [h, down], (count, *rows, n)
        )
        self.last = self.op(f'nn.einsum "e{dims}d,{dims}e->{dims}d" %{h}, %{g}', [h, g], self.shape)

    def halves(self) -> None:
        """The first half of the features times the second one."""
        x, (*rows, n) = self.last, self.shape
        if n == 1:
            return  # a loss has no value without elements
        half = (*rows, n // 2)
        parts = []
        for start in (0, n - n // 2):
            starts = ", ".join(map(str, (*(0 for _ in rows), start)))
            limits = ", ".join(map(str, (*rows, start + n // 2)))
            strides = ", ".join("1" for _ in self.shape)
            text = f"nn.slice %{x} starts <{starts}> limits <{limits}> strides <{strides}>"
            parts.append(self.op(text, [x], half))
        self.last = self.op(f"nn.mul %{parts[0]}, %{parts[1]}", parts, half)

    def concat(self) -> None:
        *rows, n = self.shape
        same = [v for v, s in self.shapes.items() if s == self.shape and "f32" in self.types[v]]
        x = self.random.choice(same)
        text = f"nn.concat %{self.last}, %{x} axis {len(rows)}"
        self.last = self.op(text, [self.last, x], (*rows, 2 * n))

    def transpose(self) -> None:
        *rows, n, m = self.shape
        perm = ", ".join(map(str, (*range(len(rows)), len(rows) + 1, len(rows))))
        self.last = self.op(f"nn.transpose %{self.last} perm <{perm}>", [self.last], (*rows, m, n))

    def flatten(self) -> None:
        """Batch and sequence in one dimension."""
        batch, seq, n = self.shape
        self.last = self.op(f"nn.reshape %{self.last}", [self.last], (batch * seq, n))

    def pool(self) -> None:
        """The mean of a sequence."""
        batch, _, n = self.shape
        self.last = self.op(f"nn.reduce <mean> %{self.last} dims <1>", [self.last], (batch, n))

    def convolution(self) -> None:
        batch, c, *size = self.shape
        o = self.random.choice([8, self.mesh.size])
        w = self.parameter((o, c, 3, 3))
        text = f"nn.conv %{self.last}, %{w} padding <1, 1, 1, 1>"
        self.last = self.op(text, [self.last, w], (batch, o, *size))

    def features(self) -> None:
        """An image as one row."""
        batch, c, h, w = self.shape
        self.last = self.op(f"nn.reshape %{self.last}", [self.last], (batch, c * h * w))

    def grow(self) -> None:
        """Add a layer that the last value's rank admits."""
        rank = len(self.shape)
        self.random.choice([layer for layer, ranks in LAYERS if rank in ranks])(self)

    def repeat(self, layers: int, times: int) -> None:
        """Add some layers several times, in the same way; each has parameters of its own."""
        state, before, added = self.random.getstate(), self.weights, list[str]()
        for _ in range(times):
            self.random.setstate(state)
            self.weights = [*before]
            for _ in range(layers):
                self.grow()
            added += self.weights[len(before) :]
        self.weights = before + added

    # ---- the end ----

    def text(self, optimizer: str) -> str:
        """Return the program: most with parameters are training steps. Others are functions of one
        or more results."""
        is_step = bool(self.weights) and self.random.random() < 0.85
        private, results = ("private ", [self.loss()]) if is_step else ("", self.results())
        given, types = (
            ", ".join(f"%{v}" for v in results),
            ", ".join(self.types[v] for v in results),
        )
        return "\n".join([
            declared(self.mesh),
            f"func.func {private}@f({', '.join(self.arguments)}) -> ({types}) {{",
            *self.lines, f"  func.return {given} : {types}", "}",
            *([f"train.step @step of @f <{optimizer}>"] if is_step else []),
        ])  # fmt: skip

    def results(self) -> list[str]:
        """Return the last value and up to three more: earlier values, and sums of some over their
        first dimension, such as the gradient of a bias."""
        found = [self.last]
        values = [v for v, t in self.types.items() if "f32" in t]
        for x in self.random.choices(values, k=self.random.randint(0, 3)):
            rest = self.shapes[x][1:]
            if self.random.random() < 0.7 and rest:
                x = self.op(f"nn.reduce <sum> %{x} dims <0>", [x], rest)
            found.append(x)
        return found

    def loss(self) -> str:
        """Return a loss of the last value."""
        y, shape = self.last, self.shape
        kind = self.random.choice(["mean", "error", "classes"])
        if kind == "error":
            target = self.input(shape)
            return self.op(f"nn.mse_loss <mean> %{y}, %{target}", [y, target], ())
        if kind == "classes" and len(shape) < 4:
            labels = self.integers(tuple(shape[:-1]), shape[len(shape) - 1])
            text = f"nn.cross_entropy_loss <mean> %{y}, %{labels}"
            return self.op(text, [y, labels], ())
        dims = ", ".join(map(str, range(len(shape))))
        return self.op(f"nn.reduce <mean> %{y} dims <{dims}>", [y], ())


FLAT, IMAGE = (2, 3), (4,)

LAYERS: list[tuple[Callable[[Writer], None], tuple[int, ...]]] = [
    (Writer.dense, FLAT),
    (Writer.dense, FLAT),
    (Writer.dense, FLAT),
    (Writer.unary, (*FLAT, *IMAGE)),
    (Writer.binary, (*FLAT, *IMAGE)),
    (Writer.norm, FLAT),
    (Writer.softmax, FLAT),
    (Writer.attention, (3,)),
    (Writer.experts, FLAT),
    (Writer.halves, FLAT),
    (Writer.concat, FLAT),
    (Writer.transpose, FLAT),
    (Writer.flatten, (3,)),
    (Writer.pool, (3,)),
    (Writer.convolution, IMAGE),
    (Writer.convolution, IMAGE),
    (Writer.features, IMAGE),
]
"""The layers, each with the ranks of values that it may follow; some are more frequent."""


def random_step(
    mesh: Mesh, random: Random, layers: int, optimizers: Sequence[str] = OPTIMIZERS, times: int = 1,
    nearly: bool = False,
) -> str:  # fmt: skip
    """Return a random program of this many layers, `times` one after the other, with one of the
    optimizers. With `nearly` most sizes are up to 4% below such that all devices divide."""
    writer = Writer(mesh, random, nearly)
    writer.repeat(layers, times)
    return writer.text(random.choice(optimizers))
