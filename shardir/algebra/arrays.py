"""The types of arrays of costs and of numbers of layouts."""

from typing import Any

import numpy as np

Table = np.ndarray[Any, np.dtype[np.float64]]
"""Seconds, or parts of them."""

Flags = np.ndarray[Any, np.dtype[np.bool_]]

Indices = np.ndarray[Any, np.dtype[np.int64]]
