"""The functions of the tests' custom ops, which op_cases/custom.py and test_custom.py register."""


def mirror(x, by=1):
    """The rows from the last element to the first, perhaps times a number; in torch."""
    return x.flip(1) if by == 1 else x.flip(1) * by


def mirror_np(x, by=1):
    return x[:, ::-1] if by == 1 else x[:, ::-1] * by


def mirror_grad(x, y, dy, by=1):
    return mirror(dy, by)


def mirror_grad_np(x, y, dy, by=1):
    return mirror_np(dy, by)


def square(x):
    """In torch and in numpy."""
    return x * x


def square_grad(x, y, dy):
    return 2 * x * dy


def moments(x, w):
    """The sum of the rows by weight, and the product of all rows; in torch and in numpy."""
    return w @ x, x @ x.T


def moments_grad(x, w, total, products, d_total, d_products):
    return w[:, None] * d_total + (d_products + d_products.T) @ x, x @ d_total


def same(x):
    """Return the operand, not a copy."""
    return x


def told(x, **options):
    """x plus how long the text of its options is."""
    return x + len(repr(sorted(options.items())))
