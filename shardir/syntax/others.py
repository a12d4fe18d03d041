"""Ops outside of the grammar of a text: of a dialect with a grammar of its own, or with a syntax
that is a method of their class.

    func.func @f(%x: tensor<4xf32>, %n: index) {
      %s = arith.constant 0 : index                 arith.constant: the method of its class
      %t = arith.addi %s, %n : index                arith: a grammar, made when a text names it
      %y = nn.relu %x                               nn: the grammar of the text

A dialect's grammar reads one op, and gives back what it does not know: grammars of several dialects
would have to be combined in each combination.
"""

from collections.abc import Callable
from typing import Any

from xdsl.dialects.builtin import LocationAttr, UnknownLoc, UnregisteredOp
from xdsl.ir import Operation, Region
from xdsl.traits import IsolatedFromAbove
from xdsl.utils.exceptions import ParseError

from shardir.grammar.machine import Machine, Token, UnexpectedError
from shardir.syntax.builder import ModuleBuilder
from shardir.syntax.errors import StopError
from shardir.syntax.formats import MisfitError, has_format
from shardir.syntax.methods import MethodParser, has_method
from shardir.syntax.names import LostError
from shardir.syntax.recovery import Recovery
from shardir.syntax.reductions import BlockArgs
from shardir.syntax.spelling import LeafError, SilentError


class OtherOps:
    """The reader of ops outside of a grammar.

    Args:
        machine_of: returns the machine that reads the ops of a name, or None.
    """

    def __init__(
        self,
        builder: ModuleBuilder,
        recovery: Recovery,
        machine_of: Callable[[str], Machine | None],
    ):
        self.builder, self.recovery, self.machine_of = builder, recovery, machine_of
        self.dialects: list[str] = []
        """The dialects of the ops around the current one."""

    def knows(self, word: str) -> bool:
        """Whether a word is the name of a registered op with a syntax of its own. In a region of an
        op it may lack the dialect of that op."""
        name = self._full_name(word)
        op = self.builder.ctx.get_optional_op(name) if "." in name else None
        return (
            op is not None
            and not issubclass(op, UnregisteredOp)
            and (has_format(op) or has_method(op))
        )

    def read(self, word: str, start: int, end: int) -> tuple[Operation | None, int]:
        """Return an op, whose name is in [start, end) of the text, and its end. An op with an error
        is None. Raises UnexpectedError."""
        name, text = self._full_name(word), self.builder.source.text
        machine = self.machine_of(name)
        self.dialects.append(name.partition(".")[0])
        try:
            if machine is not None and name == word:
                return machine.run_part(text, "pretty", start, self.recovery.recover_within)
            return self._read_by_method(self.builder.ctx.get_op(name), start, end)
        finally:
            self.dialects.pop()

    def _full_name(self, word: str) -> str:
        return word if "." in word or not self.dialects else f"{self.dialects[-1]}.{word}"

    def _read_by_method(
        self, op_type: type[Operation], start: int, end: int
    ) -> tuple[Operation, int]:
        """Return the op that the `parse` of its class reads, and its end. Raises UnexpectedError
        after an error, which is reported."""
        builder = self.builder
        log, outer = builder.log, (builder.names.scope, builder.bad)
        reported = len(log.errors)
        body: list[int] = []
        """The ends of its regions."""

        def region(at: int, arguments: BlockArgs | None) -> tuple[Region, int]:
            builder.arguments = arguments
            builder.isolated = op_type.has_trait(IsolatedFromAbove)
            region, end = builder.read_region(builder.source.text, at)
            body.append(end)
            return region, end

        try:
            parser = MethodParser(
                builder.ctx, builder.source.text, end, builder.names, builder.leaves.aliases, region
            )
            op: Any = op_type.parse(parser)
        except StopError:
            raise
        except (LostError, SilentError):
            pass
        except MisfitError as e:
            log.report_at(e.at or Token("", start, end), str(e))
        except LeafError as e:
            log.report(e.start, e.end, e.message)
        except ParseError as e:
            log.report(e.span.start, max(e.span.end, e.span.start + 1), _message(e))
        except RecursionError:
            log.report(start, end, "expected less nesting, got more than can be read")
        except Exception as e:  # a method of another package may raise any
            if len(log.errors) == reported:
                log.report(start, end, str(e).split("\n")[0] or f"this {op_type.name} is not valid")
        else:
            self._place(op, builder.source.location(start))
            if parser.uses_lost:
                log.incomplete.ops.add(op)
            builder.bad = outer[1]
            return op, parser.pos
        builder.names.scope, builder.bad = outer[0], True
        resume = body[-1] if body else start
        error = UnexpectedError(end, resume, resume + 1, op_type.name, [])
        error.read_body = bool(body)
        raise error

    def _place(self, op: Operation, location: LocationAttr) -> None:
        """Set the location of an op, and of those without one in its regions."""
        op.location = location
        for region in op.regions:
            for block in region.blocks:
                for inner in block.ops:
                    if isinstance(inner.location, UnknownLoc) and (
                        inner not in self.builder.source.offsets
                    ):
                        self._place(inner, location)


def _message(e: ParseError) -> str:
    """Return the message of xDSL's parser, with the text in its place."""
    text = e.msg[:1].lower() + e.msg[1:]
    got = e.span.text
    is_short = "expected" in text and "got" not in text and 0 < len(got) < 40
    return f"{text}, got {got!r}" if is_short else text
