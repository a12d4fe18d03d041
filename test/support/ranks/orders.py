"""The order of rows, computed with Python's integers alone, one row at a time."""

MASK = (1 << 64) - 1


def splitmix(seed: int, index: int) -> int:
    """Return splitmix64's output number `index`."""
    z = (seed + (index + 1) * 0x9E3779B97F4A7C15) & MASK
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & MASK
    return z ^ (z >> 31)


def fnv(text: str) -> int:
    """Return the 64 bits of FNV-1a of a text."""
    state = 0xCBF29CE484222325
    for byte in text.encode():
        state = (state ^ byte) * 0x100000001B3 & MASK
    return state


def row(rows: int, epoch: int, place: int, seed: int) -> int:
    """Return the row at a place of an epoch."""
    low = ((rows - 1).bit_length() + 1) // 2
    high = (rows - 1).bit_length() - low
    key = splitmix(fnv(f"{seed}/order"), epoch)
    while True:
        above, below = place >> low, place % 2**low
        for number in range(12):
            mix = splitmix(splitmix(key, number), below if number % 2 == 0 else above)
            if number % 2 == 0:
                above ^= mix % 2**high
            else:
                below ^= mix % 2**low
        place = above * 2**low + below
        if place < rows:
            return place


def batch_rows(rows: int, step: int, batch: int, seed: int) -> list[int]:
    """Return the rows of the batch at a step."""
    places = range(step * batch, (step + 1) * batch)
    return [row(rows, place // rows, place % rows, seed) for place in places]
