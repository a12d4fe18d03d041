"""The texts of values that are elements of lists: as expressions they are the same values, in the
same order."""

import random
from collections.abc import Sequence

from support.extent import extent

from shardir.backend.torch.emit.sequences import Spot, texts_of

LISTS = {"a": 12, "b": 12, "c": 9, "d": 30}


def values(texts: list[str]) -> list[str]:
    """The elements of a list with these texts, where a list's elements are texts like b[3]."""
    held = {name: [f"{name}[{i}]" for i in range(n)] for name, n in LISTS.items()}
    alone = {f"x{i}": f"x{i}" for i in range(100)}
    return eval(f"[{', '.join(texts)}]", {**held, **alone})


def texts(wanted: Sequence[Spot | str]) -> list[str]:
    spots = [x if isinstance(x, Spot) else None for x in wanted]
    return texts_of(spots, lambda i: text(wanted[i]))


def text(x: Spot | str) -> str:
    return x if isinstance(x, str) else f"{x.name}[{x.index}]"


def of(name: str, *indices: int) -> list[Spot]:
    return [Spot(name, i, LISTS[name]) for i in indices]


def rows(*columns: list[Spot] | list[str]) -> list[Spot | str]:
    return [x for row in zip(*columns, strict=True) for x in row]


def test_a_list_has_one_text() -> None:
    assert texts(["x0", *of("c", *range(9)), "x1"]) == ["x0", "*c", "x1"]
    assert texts(of("c", *range(8, -1, -1))) == ["*reversed(c)"]
    assert texts(of("a", 2, 3, 4)) == ["*a[2:5]"]
    assert texts(of("a", 9, 6, 3, 0)) == ["*a[9::-3]"]
    assert texts(of("a", 0, 1)) == ["a[0]", "a[1]"]


def test_lists_in_turn_are_rows() -> None:
    both = rows(of("a", *range(12)), of("b", *range(11, -1, -1)))
    assert texts(both) == ["*(x for of_each in zip(a, reversed(b)) for x in of_each)"]
    names = [f"x{i}" for i in range(12)]
    mixed = texts(rows(names, of("a", *range(12))))
    assert mixed == [f"*(x for of_each in zip([{', '.join(names)}], a) for x in of_each)"]


def test_elements_that_are_taken_out_are_written_in_full() -> None:
    taken = [Spot("c", i, 9, is_full=True) for i in range(9)]
    assert texts(taken[:-1]) == [f"c[{i}]" for i in range(8)]
    assert texts(taken) == ["*c"]


def test_texts_have_the_values_in_their_order() -> None:
    draw = random.Random(0)
    for _ in range(extent(300, 20_000)):
        wanted: list[Spot | str] = []
        while len(wanted) < 60:
            columns = []
            count = draw.randint(1, 12)
            for _ in range(draw.randint(1, 4)):
                name, step = draw.choice(list(LISTS)), draw.choice((1, 1, -1, 2, -3))
                start = draw.randrange(LISTS[name])
                indices = [(start + step * k) % LISTS[name] for k in range(count)]
                free = [f"x{draw.randrange(100)}" for _ in range(count)]
                columns.append(free if draw.random() < 0.3 else of(name, *indices))
            wanted += rows(*columns)
        assert values(texts(wanted)) == [text(x) for x in wanted]
