"""The LALR(1) tables of a grammar, as plain data: Lark computes them once, a file retains them.

    tables = tables_of('sum: NUMBER ("+" NUMBER)*  ...', ["sum"])

To compute the tables of all ops takes a second, to read them a hundredth of it, without Lark. The
file is in the user's cache folder, is named by all that the tables depend on, and appears complete.
It is JSON with its digest, so that a damaged file is computed again, and that of somebody else can
do no more than parse wrongly.
"""

import contextlib
import json
import os
import re
import tempfile
from collections.abc import Sequence
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

MAX_FILES = 32
"""The grammars that are retained; the oldest files are removed."""

PART = ".part"
"""The end of the name of a file that is being written."""


class Terminal(NamedTuple):
    """A terminal: the text of a literal, or a regex."""

    name: str
    text: str
    is_literal: bool
    priority: int


class Production(NamedTuple):
    """A rule: its method, and what the method gets of its children.

    `picks` has one entry for each child that is not dropped: its number, -1 for an optional one
    that is absent, and whether it is itself a list of children. A rule that `expands` and has one
    child has its value.
    """

    origin: str
    method: str
    size: int
    picks: list[tuple[int, bool]]
    expands: bool


class State(NamedTuple):
    """The actions of one state: terminal -> state, (number of a rule, number of a set of
    terminals), origin of a rule -> state."""

    shift: dict[str, int]
    reduce: list[tuple[int, int]]
    goto: dict[str, int]


class Tables(NamedTuple):
    """The tables of a grammar.

    `kept` are the terminals that have a value in some rule, `spelt` the literals that each regex
    matches, `lookaheads` the sets of terminals of the states' reductions.
    """

    terminals: list[Terminal]
    kept: list[str]
    spelt: dict[str, list[str]]
    rules: list[Production]
    lookaheads: list[list[str]]
    states: list[State]
    first: dict[str, int]
    final: dict[str, int]


def tables_of(grammar: str, starts: Sequence[str]) -> Tables:
    """Return the tables of a grammar, from its file or computed."""
    code = sha256(Path(__file__).read_bytes()).hexdigest()  # the code that makes the tables
    key = repr((code, version("lark"), [*starts], grammar))
    try:
        file = cache_folder() / f"{sha256(key.encode()).hexdigest()[:32]}.json"
        return _read(_content(file))
    except RuntimeError:  # there is no home directory
        return computed(grammar, starts)
    except (OSError, ValueError):  # no file, or a damaged one
        found = computed(grammar, starts)
    with contextlib.suppress(OSError):  # the disk is full, or the folder read-only
        _retain(file, found)
    return found


def _content(file: Path) -> Any:
    """Return what a file holds.

    Raises:
        OSError: it cannot be read. ValueError: it is not as it was written.
    """
    digest, _, data = file.read_bytes().partition(b"\n")
    if sha256(data).hexdigest().encode() != digest:
        raise ValueError(f"{file} is damaged")
    return json.loads(data)


def _retain(file: Path, found: Tables) -> None:
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    data = json.dumps(found, separators=(",", ":")).encode()
    with tempfile.NamedTemporaryFile(dir=file.parent, suffix=PART, delete=False) as part:
        try:
            part.write(sha256(data).hexdigest().encode() + b"\n" + data)
            part.flush()
            Path(part.name).replace(file)
        except BaseException:
            os.unlink(part.name)
            raise
    _prune(file.parent)


def cache_folder() -> Path:
    """Return the folder of the files: `shardir` in $XDG_CACHE_HOME, else in ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path("~/.cache").expanduser()) / "shardir"


def _prune(folder: Path) -> None:
    """Remove the oldest files; of an incomplete one another process may be the author."""
    files = sorted(folder.iterdir(), key=lambda f: f.stat().st_mtime)
    for file in files[:-MAX_FILES]:
        file.unlink(missing_ok=True)


def _read(data: list[Any]) -> Tables:
    """Return the tables of what a file holds."""
    terminals, kept, spelt, rules, lookaheads, states, first, final = data
    return Tables(
        [Terminal(*t) for t in terminals], kept, spelt, [_read_rule(r) for r in rules], lookaheads,
        [_read_state(s) for s in states], first, final,
    )  # fmt: skip


def _read_rule(data: list[Any]) -> Production:
    rule = Production(*data)
    return rule._replace(picks=[(number, inlined) for number, inlined in rule.picks])


def _read_state(data: list[Any]) -> State:
    state = State(*data)
    return state._replace(reduce=[(rule, among) for rule, among in state.reduce])


class _NoLexer:
    """Lark's lexers are not used, and so not built."""

    def __init__(self, *_: Any, **__: Any) -> None: ...


def computed(grammar: str, starts: Sequence[str]) -> Tables:
    """Return the tables that Lark computes."""
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
        states.append(state)
    return Tables(
        terminals, sorted(kept), _spelt(terminals), [_rule(r) for r in lark.rules],
        [[*names] for names in lookaheads], states,
        {s: order[n] for s, n in table.start_states.items()},
        {s: order[n] for s, n in table.end_states.items()},
    )  # fmt: skip


def _is_kept(rule: Any, symbol: Any) -> bool:
    """Whether a rule has the value of a symbol: a terminal may have a flag that drops it."""
    return rule.options.keep_all_tokens or not getattr(symbol, "filter_out", False)


def _rule(rule: Any) -> Production:
    """Return a rule with its children as Lark's ParseTreeBuilder chooses them."""
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


def _spelt(terminals: Sequence[Terminal]) -> dict[str, list[str]]:
    """Return the literals that each regex matches, such as a keyword that is a name."""
    return {
        t.name: [
            o.name for o in terminals if o.is_literal and re.fullmatch(t.text, o.text, re.ASCII)
        ]
        for t in terminals
        if not t.is_literal
    }
