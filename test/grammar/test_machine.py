"""The values of a text are the parse tree that Lark makes of it."""

import pytest
from lark import Lark, Token, Tree
from lark.exceptions import UnexpectedInput

from shardir.grammar.machine import Machine, UnexpectedError

LISTS = r"""
list: "[" [_items] ["," LAST] "]" [tail]
_items: item ("," item)*
?item: NAME | list | "(" item ")" -> inner | _pair
_pair: NAME ":" NAME
!tail: "!"+ | "end" NAME
LAST: "..."
NAME: /[a-z]+/
%ignore /\s+/
"""
TEXTS = [
    "[]", "[a]", "[a, b]", "[, ...]", "[a, ...]", "[[a], (b), x: y]", "[a] end b", "[end] end end",
    "[a]!!", "[[[]], ((c))]", "[a,]", "[a", "", "[a] b", "[a, ..., b]", "[(a: b)]",
]  # fmt: skip


class Trees:
    """Reductions that make Lark's trees."""

    def __getattr__(self, name: str):
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda children: (name, children)


def tree_of(value: object) -> object:
    if isinstance(value, Tree):
        return value.data, [tree_of(c) for c in value.children]
    return str(value) if isinstance(value, Token) else value


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_has_larks_tree(text: str) -> None:
    lark = Lark(LISTS, parser="lalr", start="list", maybe_placeholders=True)
    machine = Machine(LISTS, ["list"], Trees(), token=lambda value, start, end: value)
    try:
        expected = tree_of(lark.parse(text))
    except UnexpectedInput:
        with pytest.raises(UnexpectedError):
            machine.run(text, "list")
    else:
        assert machine.run(text, "list") == expected
