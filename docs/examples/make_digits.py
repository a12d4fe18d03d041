"""Writes digits.npz beside this file: the handwritten digits of scikit-learn, in two parts.

1797 images of 8x8 pixels (0 to 16, here 0 to 1) and their labels: 1437 rows to train on and 360 to
test on, drawn with a fixed seed.
"""

from pathlib import Path

import numpy as np

TEST_ROWS = 360


def main() -> None:
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        message = "make_digits.py needs scikit-learn: pip install 'shardir[examples]'"
        raise SystemExit(message) from None
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(images))
    x, y = (images[order] / 16).astype(np.float32), labels[order].astype(np.int32)
    path = Path(__file__).parent / "digits.npz"
    np.savez(
        path, train_x=x[TEST_ROWS:], train_y=y[TEST_ROWS:],
        test_x=x[:TEST_ROWS], test_y=y[:TEST_ROWS],
    )  # fmt: skip
    print(f"{path.name}: {len(x) - TEST_ROWS} rows to train on, {TEST_ROWS} to test on")


if __name__ == "__main__":
    main()
