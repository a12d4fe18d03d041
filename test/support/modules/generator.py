"""Random modules of torch, each a function of its seed.

A `Writer` writes one class. It executes each statement that it draws on live tensors, so that
shapes and aliases are known, and drops a statement that torch refuses. The kinds of statements are
in module_statements.py, the judge of modules in judged_modules.py.
"""

import random
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import replace

import torch

from support.modules.statements import KINDS, STARTS, kind, place
from support.modules.text import ClassText, ModuleText
from support.modules.writer import ImpossibleError, Writer

SHAPES = ((4, 6), (4, 6), (2, 3, 4), (3, 3), (6, 2), (2, 2, 3), (4,))
DEPTH = 2
"""The levels of modules within the module."""


@kind(3)
def nested(w: Writer) -> None:
    """A call of a module of a class that is written for it, or that there is."""
    if not w.depth or len(w.classes) > 4:
        raise ImpossibleError
    if w.classes and w.draw.random() < 0.2:  # one that is there
        c = w.draw.choice(w.classes)
        arguments = [place(w, views=1) for _ in c.inputs]
    else:
        arguments = [place(w, views=1) for _ in range(w.draw.choice([1, 1, 2]))]
        # no leaf, as what a module gives to another is none
        inputs = [w.value(e).detach().clone().requires_grad_() * 1.0 for e in arguments]
        c = random_class(w.draw, inputs, w.depth - 1, w.without, w.classes)
        exec(str(c), w.names)
    l = w.fresh("l")
    made = [w.fresh() for _ in c.returns]
    text = f"{', '.join(made)} = self.{l}({', '.join(arguments)})"
    own = [s.partition(" = ")[0] for t in c.init for s in t.text.split("\n")]
    kept = [name.replace("self", f"self.{l}", 1) for name in own if name.startswith("self.")]
    kept = [name for name in kept if w.draw.random() < 0.2]
    if w.draw.random() < 0.2:  # again, with what it has returned
        text += f"\n{made[0]} = self.{l}({', '.join([*made, *arguments][: len(arguments)])})"
        text = text if len(made) == 1 else text.rpartition("\n")[0]
    if w.add(text, ["nested module"], [f"self.{l} = {c.name}()"], made):
        for name in kept:
            w.add("", ["nested module"], [], [name])


def grow(w: Writer, statements: int) -> None:
    """Add statements until there are so many, or too many were refused."""
    kinds = [known for known, weight in KINDS.items() for _ in range(weight)]
    for _ in range(6 * statements):
        if len(w.written.forward) >= statements:
            break
        with suppress(ImpossibleError):
            w.draw.choice(kinds)(w)


def random_class(
    draw: random.Random, inputs: Sequence[torch.Tensor], depth: int, without: Collection[str],
    classes: list[ClassText],
) -> ClassText:  # fmt: skip
    """Write a class, and those of the modules within it, into `classes`."""
    name = "Model" if depth == DEPTH else f"Part{len(classes)}"
    writer = Writer(draw, inputs, name, depth, without, classes)
    if depth == DEPTH or draw.random() < 0.5:
        with suppress(ImpossibleError):
            draw.choice(STARTS)(writer)
    grow(writer, draw.randint(4, 12) if depth == DEPTH else draw.randint(2, 6))
    found = writer.finished()
    if depth < DEPTH:
        found = replace(found, name=f"Part{len(classes)}")
    classes.append(found)
    return found


def drawn_module(seed: int, without: Collection[str] = ()) -> ModuleText:
    """The module of a seed, which torch may still refuse in the backward part."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    shapes = [draw.choice(SHAPES) for _ in range(draw.choice([1, 1, 2]))]
    inputs = [torch.randn(s) for s in shapes]
    classes: list[ClassText] = []
    random_class(draw, inputs, DEPTH, without, classes)
    return ModuleText(tuple(classes), tuple(shapes), draw.random() < 0.85)
