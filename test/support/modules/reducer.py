"""Shrinks a module that is judged wrong to its fewest statements."""

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from textwrap import dedent

from support.modules.judge import OPTIMIZERS, STEPS, Verdict, judged, outcome
from support.modules.text import ClassText, ModuleText, Statement

ATTEMPTS = 400
"""The candidates that are tried of a module."""


def symptom(v: Verdict) -> tuple[str, str]:
    """The symptom that a smaller module must share: the kind, and of a refusal the message without
    numbers and names."""
    text = v.detail.partition("\n")[0] if v.kind in ("refused", "crashed") else ""
    text = re.sub(r"`[^`]*`|'[^']*'|\"[^\"]*\"|%?[\w.]*\d[\w.]*|\[[^\]]*\]", "*", text)
    return v.kind, text[:160]


def reduced(
    module: ModuleText, verdict: Verdict, optimizer: str = "sgd", outputs: bool = False,
    ranks: bool = False,
) -> ModuleText:  # fmt: skip
    """A module with the same symptom, of which no statement can be dropped."""

    def fails(candidate: ModuleText) -> bool:
        wanted = outcome(candidate, optimizer)
        if wanted is None:
            return False
        found = judged(candidate, wanted, optimizer, outputs, ranks)
        return symptom(found) == symptom(verdict) and found.wrong <= verdict.wrong

    return shrunk(module, fails)


def shrunk(module: ModuleText, fails: Callable[[ModuleText], bool]) -> ModuleText:
    """The smallest module that fails, by dropping and replacing parts one by one."""
    progress, tried = True, {str(module)}
    while progress:
        progress = False
        for candidates in (halves, without_results, without_statements, without_classes,
                           unwrapped, substituted, smaller):  # fmt: skip
            again = True
            while again:
                again = False
                for candidate in candidates(module):
                    if str(candidate) in tried or len(tried) > ATTEMPTS:
                        continue
                    tried.add(str(candidate))
                    if fails(candidate):
                        module, progress, again = candidate, True, True
                        break
    return module


def with_class(module: ModuleText, i: int, c: ClassText) -> ModuleText:
    return replace(module, classes=(*module.classes[:i], c, *module.classes[i + 1 :]))


def halves(module: ModuleText) -> Iterator[ModuleText]:
    """Without the first or the last half of the statements of a class."""
    for i, c in enumerate(module.classes):
        n = len(c.forward)
        for part in (c.forward[n // 2 :], c.forward[: n // 2]):
            if 0 < len(part) < n:
                yield with_class(module, i, replace(c, forward=part))


def without_results(module: ModuleText) -> Iterator[ModuleText]:
    """Without a result; of a class within, its calls too have one less."""
    for i, c in enumerate(module.classes):
        for j in range(len(c.returns)):
            if len(c.returns) > 1:
                less = replace(c, returns=c.returns[:j] + c.returns[j + 1 :])
                yield with_class(without_target(module, c.name, j), i, less)
        last = i == len(module.classes) - 1
        if last:
            names = re.findall(r"^(v\d+)\b", "\n".join(s.text for s in c.forward), re.MULTILINE)
            for name in dict.fromkeys(names):
                if c.returns != (name,):
                    yield with_class(module, i, replace(c, returns=(name,)))


def without_target(module: ModuleText, name: str, j: int) -> ModuleText:
    """The module, whose calls of instances of a class have one result less."""
    classes = []
    for c in module.classes:
        made = {s.text.partition(" = ")[0] for s in c.init if s.text.endswith(f"= {name}()")}
        forward = []
        for s in c.forward:
            targets, equals, call = s.text.partition(" = ")
            if equals and call.partition("(")[0] in made:
                names = targets.split(", ")
                s = replace(s, text=f"{', '.join(names[:j] + names[j + 1 :])} = {call}")
            forward.append(s)
        classes.append(replace(c, forward=tuple(forward)))
    return replace(module, classes=tuple(classes))


def without_statements(module: ModuleText) -> Iterator[ModuleText]:
    """Without one statement, later ones first; or without one line of one."""
    for i in reversed(range(len(module.classes))):
        c = module.classes[i]
        for forward in fewer(c.forward):
            yield with_class(module, i, replace(c, forward=forward))
        for init in fewer(c.init):
            yield with_class(module, i, replace(c, init=init))


def fewer(statements: tuple[Statement, ...]) -> Iterator[tuple[Statement, ...]]:
    for j in reversed(range(len(statements))):
        yield (*statements[:j], *statements[j + 1 :])
        lines = statements[j].text.split("\n")
        for k in reversed(range(len(lines) if len(lines) > 1 else 0)):
            less = replace(statements[j], text="\n".join(lines[:k] + lines[k + 1 :]))
            yield (*statements[:j], less, *statements[j + 1 :])


def without_classes(module: ModuleText) -> Iterator[ModuleText]:
    """Without a class that nothing names, or with one within as the module's own; with one input
    less, and in the other mode."""
    for i in range(len(module.classes) - 1):
        name = module.classes[i].name
        if not any(f"{name}(" in str(c) for c in module.classes[i + 1 :]):
            yield replace(module, classes=module.classes[:i] + module.classes[i + 1 :])
        inner = module.classes[i]
        for shape in ((4, 6), (2, 3)):
            shapes = tuple(shape for _ in inner.inputs)
            yield replace(module, classes=module.classes[: i + 1], shapes=shapes)
    last = module.classes[-1]
    for i in range(len(last.inputs) if len(last.inputs) > 1 else 0):
        rest = replace(last, inputs=last.inputs[:i] + last.inputs[i + 1 :])
        shapes = module.shapes[:i] + module.shapes[i + 1 :]
        yield replace(module, classes=(*module.classes[:-1], rest), shapes=shapes)
    for i, c in enumerate(module.classes):
        if c.decorator:
            yield with_class(module, i, replace(c, decorator=""))


def unwrapped(module: ModuleText) -> Iterator[ModuleText]:
    """With the body of a block in place of the block."""
    for i, j, s in forward_statements(module):
        head, _, body = s.text.partition("\n")
        if head.endswith(":") and body:
            yield with_text(module, i, j, dedent(body))


def substituted(module: ModuleText) -> Iterator[ModuleText]:
    """With a simpler expression in place of one: what a call or a view is of, or a name."""
    for i, j, s in forward_statements(module):
        for m in re.finditer(r"\.\w+\([^()]*\)|\[[^\[\]]*\]|\.(?:mT|T|data)\b", s.text):
            rest = s.text[: m.start()] + s.text[m.end() :]
            yield with_text(module, i, j, rest)
        for m in re.finditer(r"(?<![\w.])[\w.]+\(((?:[^()]|\([^()]*\))*)\)", s.text):
            yield with_text(module, i, j, s.text[: m.start()] + m[1] + s.text[m.end() :])
        for m in re.finditer(r" [-+*/] [\w.]+|[\w.]+ [-+*/] ", s.text):
            yield with_text(module, i, j, s.text[: m.start()] + s.text[m.end() :])
        for m in re.finditer(r"\bv\d+\b(?! =)(?!,)", s.text):
            if m[0] != "x0":
                yield with_text(module, i, j, f"{s.text[: m.start()]}x0{s.text[m.end() :]}")


def smaller(module: ModuleText) -> Iterator[ModuleText]:
    """With a smaller number in place of one, everywhere, and with smaller inputs."""
    for i, shape in enumerate(module.shapes):
        for j, n in enumerate(shape):
            for k in range(1, n):
                shapes = (*shape[:j], k, *shape[j + 1 :])
                yield replace(module, shapes=(*module.shapes[:i], shapes, *module.shapes[i + 1 :]))
    numbers = sorted({int(x) for x in re.findall(r"(?<![\w.])\d+(?![\w.])", module.body)})
    for n in reversed(numbers):
        for k in (1, 2, 3):
            if k < n:
                found = rf"(?<![\w.]){n}(?![\w.])"
                classes = tuple(
                    replace(c, init=with_numbers(c.init, found, k),
                            forward=with_numbers(c.forward, found, k)) for c in module.classes
                )  # fmt: skip
                shapes = tuple(tuple(k if x == n else x for x in s) for s in module.shapes)
                yield replace(module, classes=classes, shapes=shapes)


def with_numbers(statements: tuple[Statement, ...], found: str, k: int) -> tuple[Statement, ...]:
    return tuple(replace(s, text=re.sub(found, str(k), s.text)) for s in statements)


def forward_statements(module: ModuleText) -> Iterator[tuple[int, int, Statement]]:
    for i, c in enumerate(module.classes):
        for j, s in enumerate(c.forward):
            yield i, j, s


def with_text(module: ModuleText, i: int, j: int, text: str) -> ModuleText:
    c = module.classes[i]
    s = replace(c.forward[j], text=text)
    return with_class(module, i, replace(c, forward=(*c.forward[:j], s, *c.forward[j + 1 :])))


def reproducer(module: ModuleText, verdict: Verdict) -> str:
    """A text that stands alone: the module, its inputs, its loss, and what is wrong."""
    training = "" if module.trained else "model.eval()\n"
    return f"""\
{module}

# {verdict.kind}: {verdict.detail.replace(chr(10), chr(10) + "# ")}
torch.manual_seed(0)
model = {module.classes[-1].name}()
{training}g = torch.Generator().manual_seed(1)
batches = [tuple(torch.randn(s, generator=g) for s in {module.shapes}) for _ in range({STEPS})]
# three steps of {" or ".join(OPTIMIZERS)}; the loss: the sum of mean(sin(v * linspace(0.5, 1.5)))
# over the outputs v
"""
