"""Random bits by threefry, as XLA computes them: the same numbers, on every mesh.

The state is a key and a counter of 64 bits. Each count gives two numbers of 32 bits; narrower
results have their lower bits, and lie side by side along one dimension.
"""

from math import prod

from shardir.build import Value, nn
from shardir.frontends.stablehlo.translation import HloEntry, OpTranslation
from shardir.frontends.stablehlo.types import WIDTHS, shifted_right, wrap

ROTATIONS = (13, 15, 26, 6), (17, 29, 16, 24)
PARITY = 0x1BD11BDA
"""The constants of threefry (Salmon and others, 2011)."""


def _threefry(x: tuple[Value, Value], key: tuple[Value, Value]) -> tuple[Value, Value]:
    """Encrypt two numbers of 32 bits, in i64, in 20 rounds."""
    keys = [*key, nn.xor(nn.xor(*key), PARITY)]
    a, b = (wrap(nn.add(n, k), "ui32") for n, k in zip(x, keys, strict=False))
    for i in range(5):
        for amount in ROTATIONS[i % 2]:
            a = wrap(nn.add(a, b), "ui32")
            turned = nn.or_(nn.shift_left(b, amount), nn.shift_right(b, 32 - amount))
            b = nn.xor(wrap(turned, "ui32"), a)
        a = wrap(nn.add(a, keys[(i + 1) % 3]), "ui32")
        b = wrap(nn.add(nn.add(b, keys[(i + 2) % 3]), i + 1), "ui32")
    return a, b


def _halves(x: Value) -> tuple[Value, Value]:
    """Return the lower and the upper 32 bits."""
    return wrap(x, "ui32"), shifted_right(x, 32, 64)


def _rng_bit_generator(t: OpTranslation, state: Value) -> tuple[Value, Value]:
    algorithm, result = str(t["rng_algorithm"]), t.op.results[1].type
    if "THREE_FRY" not in algorithm or state.shape != (2,):
        t.refuse(
            f"random bits by {algorithm}, which XLA defines; use jax.random.key(seed), or THREE_FRY"
        )
    key, counter = (t.reshape(t.part(state, 0, k, 1), ()) for k in (0, 1))
    shape, width = result.shape or (1,), WIDTHS[result.element]
    dim = next((d for d, n in enumerate(shape) if n % 2 == 0), shape.index(max(shape)))
    half = tuple(-(-n // 2) if d == dim else n for d, n in enumerate(shape))
    counts = shape if width == 64 else half
    count = prod(counts)
    steps = t.reshape(t.iota((count,), 0), counts)
    low, high = _threefry(_halves(nn.add(counter, steps)), _halves(key))
    if width == 64:
        bits = nn.or_(low, nn.shift_left(high, 32))
    else:
        pairs = nn.stack(low, high, axis=dim + 1)
        whole = tuple(2 * n if d == dim else n for d, n in enumerate(half))
        bits = t.part(t.reshape(pairs, whole), dim, 0, shape[dim])
        bits = bits if result.element == "ui32" else bits.to("i32")
        bits = wrap(bits, result.element)
    new = nn.stack(key, nn.add(counter, count), axis=0)
    return new, t.reshape(bits, result.shape)


TABLE: dict[str, HloEntry] = {"stablehlo.rng_bit_generator": _rng_bit_generator}
