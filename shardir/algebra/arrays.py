"""Types of arrays: costs, masks, and indices of layouts."""

from typing import Any

import numpy as np

Table = np.ndarray[Any, np.dtype[np.float64]]
"""Seconds, or seconds for each byte."""

Flags = np.ndarray[Any, np.dtype[np.bool_]]

Indices = np.ndarray[Any, np.dtype[np.int64]]
