"""The laws of passes."""

from collections.abc import Callable, Iterable, Iterator, Sequence

from xdsl.context import Context
from xdsl.dialects.builtin import ModuleOp
from xdsl.dialects.func import FuncOp
from xdsl.passes import ModulePass

from shardir.dialects import dist
from shardir.interpret import check_pass as check_equivalence
from shardir.interpret.evaluator import is_local_function
from shardir.rewriting.registry import build, run_pipeline
from shardir.syntax.parser import parse
from shardir.syntax.printer import print_module
from shardir.syntax.source import collect_warnings
from shardir.testing.cases import Case
from shardir.testing.execution import AnyProgram, module_of
from shardir.testing.programs import defined
from shardir.testing.random_layouts import random_form
from shardir.testing.random_programs import random_program
from shardir.testing.reducer import reduce

Pass = str | type[ModulePass] | ModulePass
"""A pass, its class, or the text of a pipeline: `fuse-swish`, `acme-train`."""

LOWERING = "propagate-strategies,insert-redistributions,distributed-autodiff,lower-to-spmd"
"""The passes after which ranks can be interpreted."""


def check_pass(
    tested: Pass,
    programs: Iterable[AnyProgram] = (),
    *,
    before: str = "",
    idempotent: bool = True,
    seeds: Iterable[int] = range(4),
    cases: Sequence[Case] = (),
) -> None:
    """Check the laws of a pass, on programs of its own and on random ones:

    1. The pass gives a valid program, and the same one each time.
    2. The program prints, parses, and prints the same.
    3. Its functions compute what they did before; gradients that the pass derives have the slope of
       their source.
    4. Lowered to ranks, if it is not so yet, it computes what it did before, on all ranks together.
    5. A second run changes nothing.
    6. Some program is changed.

    Args:
        tested: the pass, its class, or the text of a pipeline.
        programs: modules, compiled programs, or texts. A function @f without a mesh is also checked
            with random layouts on a random mesh.
        before: the pipeline that brings a program to the form that the pass needs.
        idempotent: whether a second run changes nothing.
        seeds: of random programs, each without layouts and with random ones on a random mesh.
        cases: of further ops in the random programs.

    Raises:
        AssertionError: a law does not hold; with the least program of which it does not, as text.
        ShardirError: there is no such pass or option.
    """
    for text in (before, tested):
        if isinstance(text, str) and text:
            build(text)  # names and options that do not exist are no law's fault
    name = tested if isinstance(tested, str) else tested.name
    laws = _PassLaws(tested, name, before, idempotent)
    count, is_changed = 0, False
    for origin, program in _programs(programs, seeds, cases):
        count += 1
        law, message = laws.broken(program)
        if law:
            least = reduce(program, lambda m, law=law: laws.broken(m)[0] == law)
            _, of_least = laws.broken(least)
            command = f"{before},{name}" if before else name
            raise AssertionError(
                f"{name} breaks the law that {law}, on {origin}: {message}\n"
                f"The least program, for `shard-opt -p '{command}'`: {of_least}\n"
                f"{print_module(least)}"
            )
        is_changed = is_changed or laws.is_changed
    if not is_changed:
        raise AssertionError(
            f"expected a program that {name} changes, got {count} that it does not; give one"
        )


def _programs(
    programs: Iterable[AnyProgram], seeds: Iterable[int], cases: Sequence[Case]
) -> Iterator[tuple[str, ModuleOp]]:
    """Yield programs, with where they come from."""
    for i, program in enumerate(programs):
        module = module_of(program).clone()
        yield f"program {i}", module
        if not dist.meshes_of(module) and "f" in defined(module):
            yield f"program {i} with layouts", random_form(module, i)[0]
    for seed in seeds:
        program = random_program(seed, cases=cases)
        yield f"the random program {seed}", program
        yield f"the random program {seed} with layouts", random_form(program, seed)[0]


class _PassLaws:
    """The laws of a pass. After `broken`, `is_changed` tells whether the pass changed the
    program."""

    def __init__(self, tested: Pass, name: str, before: str, idempotent: bool):
        self.tested, self.name = tested, name
        self.before, self.idempotent = before, idempotent
        self.is_changed = False

    def run(self, module: ModuleOp) -> None:
        """Run the pass, in place."""
        if isinstance(self.tested, str):
            run_pipeline(self.tested, Context(), module)
        else:
            instance = self.tested() if isinstance(self.tested, type) else self.tested
            instance.apply(Context(), module)

    def broken(self, program: ModuleOp) -> tuple[str, str]:
        """Return the first law that does not hold of a program, and how; "" if all hold."""
        with collect_warnings():
            return self._broken(program)

    def _broken(self, program: ModuleOp) -> tuple[str, str]:
        source = program.clone()
        run_pipeline(self.before, Context(), source)
        after, again = source.clone(), source.clone()
        for law, check in self._checks(source, after, again):
            try:
                message = check()
            except Exception as e:
                message = f"{type(e).__name__}: {e}"
            if message:
                return law, message
        return "", ""

    def _checks(
        self, source: ModuleOp, after: ModuleOp, again: ModuleOp
    ) -> Iterator[tuple[str, Callable[[], str]]]:
        def valid() -> str:
            self.run(after)
            self.is_changed = str(after) != str(source)
            after.verify()
            return ""

        def same_each_time() -> str:
            self.run(again)
            return self._other(again, after, "in the second of two runs on equal programs")

        def round_trip() -> str:
            text = print_module(after)
            parsed = print_module(parse(text, "<printed>", verify=True))
            return (
                "" if parsed == text else f"expected the text\n{text}\nafter parsing, got\n{parsed}"
            )

        def equal() -> str:
            check_equivalence(source, after, self.name)
            return ""

        def equal_on_ranks() -> str:
            functions = [f for f in after.body.ops if isinstance(f, FuncOp) and f.body.blocks]
            if any(map(is_local_function, functions)) or not dist.meshes_of(after):
                return ""
            lowered = after.clone()
            run_pipeline(LOWERING, Context(), lowered)
            check_equivalence(source, lowered, f"{self.name},{LOWERING}")
            return ""

        def unchanged_again() -> str:
            self.run(again)
            return self._other(again, after, "after a second run")

        yield "it gives a valid program", valid
        yield "it gives the same program each time", same_each_time
        yield "what it gives is printed and parsed", round_trip
        yield "functions compute what they did before", equal
        yield "all ranks together compute what one device did before", equal_on_ranks
        if self.idempotent:
            yield "a second run changes nothing", unchanged_again

    @staticmethod
    def _other(found: ModuleOp, wanted: ModuleOp, when: str) -> str:
        if str(found) == str(wanted):
            return ""
        lines = zip(str(found).splitlines(), str(wanted).splitlines(), strict=False)
        for x, y in lines:
            if x != y:
                return f"expected {y.strip()}, got {x.strip()} {when}"
        return f"expected {len(str(wanted).splitlines())} lines, got another number {when}"
