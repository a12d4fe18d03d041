"""The LALR(1) tables of a grammar, as plain data: Lark computes them once, a file retains them.

    tables = tables_of('sum: NUMBER ("+" NUMBER)*  ...', ["sum"])

Computing the tables of all ops takes 1 s, reading them 10 ms, without Lark.
"""

import json
import re
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

from shardir.grammar.retained import retained, version


class Terminal(NamedTuple):
    """A terminal: the text of a literal, or a regex."""

    name: str
    text: str
    is_literal: bool
    priority: int


class Production(NamedTuple):
    """A rule: its method, and the children that the method gets.

    `picks` has one entry for each child that is not dropped: its number, or -1 for an absent
    optional child, and whether it is itself a list of children. A rule that `expands` and has one
    child has the value of this child.
    """

    origin: str
    method: str
    size: int
    picks: list[tuple[int, bool]]
    expands: bool


class State(NamedTuple):
    """The actions of one state: terminal -> state, (number of a rule, number of its lookaheads),
    origin of a rule -> state."""

    shift: dict[str, int]
    reduce: list[tuple[int, int]]
    goto: dict[str, int]


class Tables(NamedTuple):
    """The tables of a grammar. The `rules` are lists, and the `states` JSON texts: few are used.

    `kept` are the terminals with a value in some rule, `matched_literals` the literals that each
    regex matches, `lookaheads` the sets of terminals before which states reduce.
    """

    terminals: list[Terminal]
    kept: list[str]
    matched_literals: dict[str, list[str]]
    rules: list[Any]
    lookaheads: list[list[str]]
    states: list[str]
    first: dict[str, int]
    final: dict[str, int]

    def rule(self, number: int) -> Production:
        rule = Production(*self.rules[number])
        return rule._replace(picks=[(child, inlined) for child, inlined in rule.picks])

    def state(self, number: int) -> State:
        return State(*json.loads(self.states[number]))


def tables_of(grammar: str, starts: Sequence[str]) -> Tables:
    """Return the tables of a grammar, from their file if they were computed before."""
    code = sha256(Path(__file__).read_bytes()).hexdigest()  # the code that makes the tables
    key = repr((code, version("lark"), [*starts], grammar))
    terminals, *fields = retained(key, lambda: compute_tables(grammar, starts))
    return Tables([Terminal(*t) for t in terminals], *fields)


class _NoLexer:
    """Stands in for Lark's lexer, which is not used and takes time to build."""

    def __init__(self, *_: Any, **__: Any) -> None: ...


def compute_tables(grammar: str, starts: Sequence[str]) -> Tables:
    """Compute the tables of a grammar by Lark."""
    from lark import Lark
    from lark.lexer import PatternStr
    from lark.parsers.lalr_analysis import Shift

    plugins = {"ContextualLexer": _NoLexer}
    lark = Lark(grammar, parser="lalr", start=[*starts], maybe_placeholders=True, _plugins=plugins)
    terminals = [
        Terminal(t.name, t.pattern.value, isinstance(t.pattern, PatternStr), t.priority)
        for t in lark.terminals
    ]
    numbers = {rule: i for i, rule in enumerate(lark.rules)}
    kept = {
        s.name for rule in lark.rules for s in rule.expansion if s.is_term and _is_kept(rule, s)
    }
    frontend: Any = lark.parser
    table = frontend.parser._parse_table
    order = {state: i for i, state in enumerate(table.states)}
    lookaheads: dict[tuple[str, ...], int] = {}
    states = []
    for actions in table.states.values():
        state = State({}, [], {})
        reduced: dict[int, list[str]] = {}
        for symbol, (action, target) in actions.items():
            name = str(symbol)
            if action is not Shift:
                reduced.setdefault(numbers[target], []).append(name)
            elif name.isupper() or name[0] == "$":
                state.shift[name] = order[target]
            else:
                state.goto[name] = order[target]
        for number, names in reduced.items():
            among = lookaheads.setdefault(tuple(sorted(names)), len(lookaheads))
            state.reduce.append((number, among))
        states.append(json.dumps(state, separators=(",", ":")))
    return Tables(
        terminals, sorted(kept), _match_literals(terminals), [_rule(r) for r in lark.rules],
        [[*names] for names in lookaheads], states,
        {s: order[n] for s, n in table.start_states.items()},
        {s: order[n] for s, n in table.end_states.items()},
    )  # fmt: skip


def _is_kept(rule: Any, symbol: Any) -> bool:
    """Whether a rule uses the value of a symbol. A terminal may have a flag that drops it."""
    return rule.options.keep_all_tokens or not getattr(symbol, "filter_out", False)


def _rule(rule: Any) -> Production:
    """Return a rule with the children that Lark's ParseTreeBuilder would choose."""
    absent = rule.options.empty_indices or [False] * len(rule.expansion)
    picks: list[tuple[int, bool]] = []
    at = 0
    for is_absent in absent:
        if is_absent:
            picks.append((-1, False))
            continue
        symbol = rule.expansion[at]
        if _is_kept(rule, symbol):
            picks.append((at, not symbol.is_term and symbol.name.startswith("_")))
        at += 1
    origin = str(rule.origin.name)
    expands = bool(rule.options.expand1) and not rule.alias
    return Production(origin, str(rule.alias or origin), len(rule.expansion), picks, expands)


def _match_literals(terminals: Sequence[Terminal]) -> dict[str, list[str]]:
    """Return the literals that each regex matches, such as a keyword that is also a name."""
    return {
        t.name: [
            o.name for o in terminals if o.is_literal and re.fullmatch(t.text, o.text, re.ASCII)
        ]
        for t in terminals
        if not t.is_literal
    }
