"""Products of tensors."""

from string import ascii_letters

from shardir.build import Value, nn
from shardir.frontends.stablehlo.translation import HloEntry, OpTranslation
from shardir.frontends.stablehlo.types import wrap


def _dot_general(t: OpTranslation, x: Value, y: Value) -> Value:
    """A contraction, as an equation: the batch, then the other dimensions of both operands."""
    numbers = t["dot_dimension_numbers"]
    letters = iter(ascii_letters)
    left, right = [""] * len(x.shape), [""] * len(y.shape)
    batch = ""
    for kind in ("batching", "contracting"):
        dims = (numbers[f"{side}_{kind}_dimensions"] for side in ("lhs", "rhs"))
        for i, j in zip(*dims, strict=True):
            left[i] = right[j] = next(letters)
            batch += left[i] if kind == "batching" else ""
    free = ["", ""]
    for side, names in enumerate((left, right)):
        for d, name in enumerate(names):
            if not name:
                names[d] = next(letters)
                free[side] += names[d]
    equation = f"{''.join(left)},{''.join(right)}->{batch}{''.join(free)}"
    return of_products(t, nn.einsum(*factors(t, x, y), equation=equation))


def factors(t: OpTranslation, *xs: Value) -> list[Value]:
    """Return the operands of a product in the type in which products are added: booleans as
    integers."""
    dtype = "i32" if t.dtype == "i1" else t.dtype
    return [x if x.dtype == dtype else x.to(dtype) for x in xs]


def of_products(t: OpTranslation, total: Value) -> Value:
    """Return a sum of products in the type of the result: whether one is true, of booleans."""
    return nn.compare(total, 0, how="ne") if t.element == "i1" else wrap(total, t.element)


TABLE: dict[str, HloEntry] = {"stablehlo.dot_general": _dot_general}
