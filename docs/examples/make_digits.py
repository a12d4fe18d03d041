"""Write digits.npz beside this file: scikit-learn's images of handwritten digits, in two parts.

1797 images of 8x8 pixels (0 to 16, here 0 to 1) and their labels: 1437 images to train on and 360
to test on, drawn with a fixed seed.
"""

from pathlib import Path

import numpy as np

TEST_IMAGES = 360


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
        path, train_x=x[TEST_IMAGES:], train_y=y[TEST_IMAGES:],
        test_x=x[:TEST_IMAGES], test_y=y[:TEST_IMAGES],
    )  # fmt: skip
    print(f"{path.name}: {len(x) - TEST_IMAGES} images to train on, {TEST_IMAGES} to test on")


if __name__ == "__main__":
    main()
