"""The terminals of the two grammars of `.ir` text, as regexes."""

STRING = r'"(?:[^"\\\n\v\f]++|\\.)*+"'


def balanced(opens: str, closes: str, depth: int) -> str:
    """Return a regex for text between brackets that nest up to `depth` levels.

    `->` and `>=` are not brackets, and brackets in strings and comments do not count. Types and
    attributes have no `%`, so an unclosed bracket ends at the next value instead of the end of the
    file.
    """
    arrows = "->|>=|-" if closes == ">" else "->|-"
    unbracketed = rf'[^\{opens}\{closes}"%/-]++|{arrows}|//[^\n]*+|/|{STRING}'
    regex = rf"\{opens}(?:{unbracketed})*+\{closes}"
    for _ in range(depth - 1):
        regex = rf"\{opens}(?:{unbracketed}|{regex})*+\{closes}"
    return regex


ANGLES, PARENS = balanced("<", ">", 8), balanced("(", ")", 5)
SQUARES, BRACES = balanced("[", "]", 6), balanced("{", "}", 6)
SYMBOL = rf"@(?:[A-Za-z_][\w$.]*|{STRING})"
NUMBER = r"-?(?:0x[0-9a-fA-F]+|\d+(?:\.\d*(?:[eE][-+]?\d+)?)?)"
NAME = r"[A-Za-z_][\w$.]*+"
TYPE = rf"(?:![A-Za-z_$][\w.$-]*+|{NAME})(?:{ANGLES}|(?!\s*<))"
FN_TYPE = rf"{PARENS}\s*->\s*(?:{PARENS}|{TYPE})"
LOC = rf"loc\s*{PARENS}"
DENSE = rf"dense(?:_resource)?{ANGLES}"

TERMINALS = {
    "LOC.3": LOC,
    "FN_TYPE.2": FN_TYPE,
    "TYPE": TYPE,
    "ATTR": rf"{STRING}|{NUMBER}(?:\s*:\s*{TYPE})?|{SYMBOL}(?:::{SYMBOL})*|{SQUARES}|{BRACES}"
    rf"|#[A-Za-z_$][\w.$-]*(?:{ANGLES})?|{LOC}|{DENSE}\s*:\s*{TYPE}|{FN_TYPE}|{TYPE}",
    "DENSE.2": DENSE,
    "NUMBER": rf"{NUMBER}|true|false",
    "SQUARES": SQUARES,
    "BRACES.2": BRACES,
    "ANGLES": ANGLES,
    "STRING": STRING,
    "SYMBOL": SYMBOL,
    "SSA_ID": r"%(?:\d+|[a-zA-Z$._-][\w$.-]*)(?:#\d+)?",
    "BLOCK_ID": r"\^(?:\d+|[a-zA-Z$._-][\w$.-]*)",
    "ALIAS_ID": r"[#!][A-Za-z_$][\w$-]*(?=\s*=)",
    "OP_NAME": NAME,
    "COUNT": r"\d+",
}


def lark_regexes(terminals: dict[str, str]) -> str:
    """Return definitions of terminals in Lark's syntax."""
    slash = chr(92) + "/"
    return "".join(f"{name}: /{r.replace('/', slash)}/\n" for name, r in terminals.items())
