"""Aliases of attributes in a program."""

import shardir


def test_alias_may_be_indented() -> None:
    """It was reported as undefined."""
    text = """
        dist.mesh @m <a = 2>
        #rows = #dist.layout<@m, [{a}]>
        func.func private @f(tensor<4xf32, #rows>)"""
    assert "[{a}]" in shardir.compile(text, "").text
