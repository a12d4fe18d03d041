"""Contractions as an expert writes them: `x @ w`, `x.mT @ dy`, and torch.einsum for the rest.

The letters of a contraction are of four kinds: batch (in both operands and the result), left and
right (in one operand and the result), and summed (in both operands only). If the letters of each
kind are adjacent, in one order everywhere, they flatten into one dimension, and the contraction is
a matrix product."""

from dataclasses import dataclass
from functools import lru_cache

from shardir.analysis.accumulation import matrix_product


@dataclass(frozen=True)
class Letters:
    """The letters of each kind, in order."""

    batch: str
    left: str
    right: str
    summed: str


@lru_cache(maxsize=4096)
def kinds_of(x: str, y: str, z: str) -> Letters:
    def common_letters(text: str, a: str, b: str) -> str:
        return "".join(c for c in text if (c in a) and (c in b))

    batch = "".join(c for c in z if c in x and c in y)
    return Letters(
        batch,
        "".join(c for c in z if c in x and c not in y),
        "".join(c for c in z if c in y and c not in x),
        "".join(c for c in common_letters(x, x, y) if c not in z),
    )


def contraction(
    equation: tuple[str, str, str], names: tuple[str, str], sizes: dict[str, str]
) -> str:
    """Return the expression for x, y -> z; `sizes` are the texts of the letters' local sizes."""
    x, y, z = equation
    kinds = kinds_of(x, y, z)
    if kinds.left and z.endswith(kinds.left) and kinds.right:
        product = _product(Letters(kinds.batch, kinds.right, kinds.left, kinds.summed),
                        (y, x, z), (names[1], names[0]), sizes)  # fmt: skip
    else:
        product = _product(kinds, equation, names, sizes)
    return product or f'torch.einsum("{x},{y}->{z}", {names[0]}, {names[1]})'


def addition_call(equation: tuple[str, str, str], names: tuple[str, str]) -> str:
    """Return the call that adds a product of matrices x, y -> z to its sum in place, without the
    sum: `addmm_(a, b)`."""
    product = matrix_product(*equation)
    assert product is not None
    batch, rows, columns, summed, swapped = product
    (first, x), (second, y) = zip(names, equation, strict=False)
    if swapped:
        first, x, second, y = second, y, first, x
    a, b = _operand(first, x, batch, rows, summed), _operand(second, y, batch, summed, columns)
    assert a is not None and b is not None
    return f"{'baddbmm' if batch else 'addmm'}_({a}, {b})"


def _product(
    kinds: Letters, equation: tuple[str, str, str], names: tuple[str, str], sizes: dict[str, str]
) -> str | None:
    """Return `a @ b` with views of operands and result; None if it is not a matrix product."""
    x, y, z = equation
    batch, left, right, summed = kinds.batch, kinds.left, kinds.right, kinds.summed
    if not summed or not left or z != batch + left + right:
        return None
    if not right and (batch or (len(left) > 1 and x != left + summed)):
        return None
    # A right matrix multiplies all leading dimensions of the left operand: no need to flatten.
    wide = not batch and len(summed) == 1 and x == left + summed
    a = names[0] if wide else _operand(names[0], x, batch, left, summed)
    b = _operand(names[1], y, batch, summed, right)
    if a is None or b is None:
        return None
    product = f"{a} @ {b}"
    unflatten = []
    if len(right) > 1:
        unflatten.append(f".unflatten(-1, ({', '.join(sizes[c] for c in right)}))")
    if len(left) > 1 and not wide:
        sized = ", ".join(sizes[c] for c in left)
        unflatten.append(f".unflatten({len(batch)}, ({sized}))")
    return f"({product}){''.join(unflatten)}" if unflatten else product


def _operand(name: str, letters: str, batch: str, rows: str, columns: str) -> str | None:
    """Return the operand as a batch of matrices of rows x columns; None if it is not one."""
    if letters == batch + rows + columns:
        return name + _flatten(len(batch), len(rows), len(columns))
    if letters == batch + columns + rows and rows and columns:
        return name + _flatten(len(batch), len(columns), len(rows)) + ".mT"
    return None


def _flatten(batch: int, first: int, second: int) -> str:
    text = f".flatten({batch}, {batch + first - 1})" if first > 1 else ""
    at = batch + min(first, 1)
    return text + (f".flatten({at}, {at + second - 1})" if second > 1 else "")
