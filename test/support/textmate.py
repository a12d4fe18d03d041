"""TextMate grammars, as far as ours needs them: match and begin/end rules, captures, includes.

test/editor/test_grammar.py compares it with vscode-textmate, the engine of VS Code.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

Rule = Mapping[str, Any]


class Span(NamedTuple):
    start: int
    end: int
    scopes: tuple[str, ...]


@cache
def _regex(text: str) -> re.Pattern[str]:
    return re.compile(text, re.ASCII)


class Grammar:
    def __init__(self, path: Path):
        self.grammar = json.loads(path.read_text())

    def _rules(self, patterns: Sequence[Rule]) -> Iterator[Rule]:
        """Yield the rules of patterns in their order, those of includes too."""
        for rule in patterns:
            if "include" in rule:
                rule = self.grammar["repository"][rule["include"].removeprefix("#")]
            if "match" in rule or "begin" in rule:
                yield rule
            else:
                yield from self._rules(rule["patterns"])

    def spans(self, text: str) -> Iterator[tuple[int, str, list[Span]]]:
        """Yield each line, with its number and its spans, equal neighbours joined."""
        stack: list[tuple[Rule, tuple[str, ...]]] = [(self.grammar, (self.grammar["scopeName"],))]
        for number, line in enumerate(text.split("\n")):
            yield number, line, _joined(self._line(line + "\n", stack))

    def _line(self, line: str, stack: list[tuple[Rule, tuple[str, ...]]]) -> Iterator[Span]:
        at = 0
        while at <= len(line):
            rule, scopes = stack[-1]
            found = [
                (m.start(), i, m, r) for i, r in enumerate(self._rules(rule["patterns"]))
                if (m := _regex(r["match" if "match" in r else "begin"]).search(line, at))
            ]  # fmt: skip
            end = _regex(rule["end"]).search(line, at) if "end" in rule else None
            if end is not None:
                found.append((end.start(), -1, end, rule))
            if not found:
                yield Span(at, len(line), scopes)
                return
            start, i, m, r = min(found, key=lambda each: each[:2])
            yield Span(at, start, scopes)
            named = (*scopes, r["name"]) if "name" in r and i >= 0 else scopes
            kind = "endCaptures" if i < 0 else "beginCaptures" if "begin" in r else "captures"
            yield from _captured(m, r.get(kind, r.get("captures", {})), named)
            if i < 0:
                stack.pop()
            elif "begin" in r:
                stack.append((r, named))
            elif m.end() == m.start():
                yield Span(at, at + 1, scopes)
                at += 1
                continue
            at = m.end()
            if i < 0 and at == len(line) - 1 and m.start() == m.end():
                yield Span(at, len(line), stack[-1][1])
                return


def _captured(
    m: re.Match[str], captures: Mapping[str, Rule], scopes: tuple[str, ...]
) -> Iterator[Span]:
    at = m.start()
    whole = (*scopes, captures["0"]["name"]) if "0" in captures else scopes
    for key in sorted(captures, key=int):
        group = int(key)
        if group and m.start(group) >= at and m.end(group) > m.start(group):
            yield Span(at, m.start(group), whole)
            yield Span(m.start(group), m.end(group), (*whole, captures[key]["name"]))
            at = m.end(group)
    yield Span(at, m.end(), whole)


def _joined(spans: Iterator[Span]) -> list[Span]:
    joined: list[Span] = []
    for span in spans:
        if span.start == span.end:
            continue
        if joined and joined[-1].scopes == span.scopes and joined[-1].end == span.start:
            span = Span(joined.pop().start, span.end, span.scopes)
        joined.append(span)
    return joined
