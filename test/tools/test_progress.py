"""Long passes say how far they have come to the tool around them."""

from shardir.syntax.diagnostics import tell, told


def test_what_a_pass_says_goes_to_the_innermost_listener():
    outer: list[str] = []
    inner: list[str] = []
    tell("nobody listens")
    with told(outer.append):
        tell("a")
        with told(inner.append):
            tell("b")
        tell("c")
    assert (outer, inner) == (["a", "c"], ["b"])
