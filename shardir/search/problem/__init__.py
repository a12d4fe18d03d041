"""Sums of costs over variables and pairs, in arrays: the minimum, its bound, limits of memory."""
