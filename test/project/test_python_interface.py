"""The names of `import shardir`, and its own errors in place of those of Python."""

import inspect
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_overloads

import numpy as np
import pytest

import shardir
from shardir.algebra.mesh import Mesh
from shardir.api.compiled import compile_module
from shardir.api.model import compile_model
from shardir.api.steps import compile_steps
from shardir.backend.runs import Options
from shardir.dialects import nn

ONE = """func.func @f() -> tensor<2xf32> {
  %x = nn.constant dense<1.0> : tensor<2xf32> -> tensor<2xf32>
  func.return %x : tensor<2xf32>
}
"""
MESH = Mesh("m", (("d", 2),))


def test_packages_are_attributes() -> None:
    from shardir.cost import report

    assert shardir.cost.report is report
    assert not hasattr(shardir, "costs") and not hasattr(shardir, "_cost")


def test_the_public_names_are_listed_once() -> None:
    assert {*shardir.__all__} == {*shardir.PLACES, "__version__"}
    assert len({*shardir.__all__}) == len(shardir.__all__)


def public_functions() -> Iterator[tuple[str, Any]]:
    """Yield each public function, class and method, with its name."""
    for name in shardir.PLACES:
        yield name, (value := getattr(shardir, name))
        if isinstance(value, type) and issubclass(value, Exception):
            continue
        for member in dir(value) if isinstance(value, type) else ():
            function = inspect.getattr_static(value, member)
            if isinstance(function, classmethod | staticmethod):
                function = function.__func__
            if isinstance(function, property):
                function = function.fget
            if inspect.isfunction(function) and not member.startswith("_"):
                yield f"{name}.{member}", function


def test_public_functions_have_types_and_docstrings() -> None:
    for name, function in public_functions():
        assert inspect.getdoc(function), name
        if isinstance(function, type):
            continue
        signature = inspect.signature(inspect.unwrap(function))
        untyped = [p.name for p in signature.parameters.values() if p.annotation is p.empty]
        assert untyped in ([], ["self"], ["cls"]), (name, untyped)
        assert signature.return_annotation is not signature.empty, name


def test_the_forms_of_compile_are_those_of_the_functions_that_it_calls() -> None:
    """Names, kinds and defaults. The options of a program of text are those of the others too."""
    text = parameters_of(compile_module)
    model, steps = parameters_of(compile_model), parameters_of(compile_steps)
    shared = {name: text[name] for name in text if name != "text_or_module"}
    of_steps = {name: x for name, x in shared.items() if name not in ("name", "base_dir")}
    given = [parameters_of(form) for form in get_overloads(shardir.compile)]
    for form in given:
        del form["program"]
    assert given == [shared, keywords(model | shared), keywords(steps | of_steps)]
    assert parameters_of(shardir.compile_file) == {"path": EMPTY} | {
        name: x for name, x in shared.items() if name != "name"
    }
    assert {*itertools.chain(*given)} <= {*inspect.signature(shardir.compile).parameters}
    assert "separate_update=False" in (shardir.compile.__doc__ or "")


EMPTY = inspect.Parameter.empty


def parameters_of(function: Any) -> dict[str, object]:
    """The default of each named parameter; EMPTY without one."""
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is not p.VAR_KEYWORD}


def keywords(parameters: dict[str, object]) -> dict[str, object]:
    return {name: x for name, x in parameters.items() if name != "model"}


def test_names_are_completed() -> None:
    names = dir(shardir)
    assert {"compile", "run", "load", "Mesh", "Cluster", "ShardirError", "cost", "build"} <= {
        *names
    }
    assert all(hasattr(shardir, name) for name in names)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Options.of({"observer": print}), "a run has no option observer; it has steps,"),
        (lambda: Options.of({"callback": 3}), "expected a function as callback, got 3"),
        (lambda: Options.of({"step": 3}), "a run has no option step; did you mean steps?"),
        (lambda: Options.of({"steps": "3"}), "option steps of a run: expected int, got '3'"),
        (lambda: Options.of({"steps": True}), "option steps of a run: expected int, got True"),
        (lambda: shardir.compile(3), "expected text or a module, got 3"),  # type: ignore - wrong
        (
            lambda: shardir.plan_redistribution((4,), "f32", "m", "@m, [{d}]", "@m, [{}]"),  # type: ignore - wrong
            "expected a Mesh, got 'm'",
        ),
        (
            lambda: shardir.plan_redistribution((4,), "f32", MESH, "@m, [{d}]", "@m, [{}]"),  # type: ignore - wrong
            "expected a Layout, got '@m, [{d}]'; use shardir.algebra.notation.parse_layout",
        ),
        (lambda: nn.MatmulOp(None, None), "expected the parts of nn.matmul by name, got values"),  # type: ignore - wrong
    ],
)
def test_errors_are_our_own(call: Callable[[], object], message: str) -> None:
    with pytest.raises(shardir.ShardirError) as error:
        call()
    assert message in str(error.value)


def test_options_of_a_run() -> None:
    given = {"steps": 3, "timeout": 60, "dump": "a.npz"}
    assert Options.of(given) == Options(steps=3, timeout=60.0, dump=Path("a.npz"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "expected an .npz file of named arrays, got another one"),
        (b"x,y\n1,2\n", "expected an .npz file of named arrays, got another one"),
        (np.array(["a", {}], dtype=object), "expected an array of numbers, got Python objects in"),
    ],
)
def test_data_that_are_no_numbers(
    tmp_path: Path, content: bytes | np.ndarray, message: str
) -> None:
    file = tmp_path / "d.npz"
    if isinstance(content, bytes):
        file.write_bytes(content)
    else:
        np.savez(file, x=content)
    argument = '%y: tensor<2xf32> {train.input = #train.init<file, path = "d.npz", array = "x">}'
    text = ONE.replace("@f()", f"@f({argument})")
    with pytest.raises(shardir.ShardirError) as error:
        shardir.compile(text, "single-device", base_dir=tmp_path).save(tmp_path / "out")
    assert message in str(error.value) and "pickle" not in str(error.value)
