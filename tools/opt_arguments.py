"""The command line of `shard-opt`: xDSL's arguments, with our help texts, and our own."""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from xdsl.context import Context
from xdsl.dialects.builtin import ModuleOp
from xdsl.xdsl_opt_main import xDSLOptMain

from shardir import __version__
from shardir.backend import BACKENDS
from shardir.dialects.installed import of_registry
from shardir.rewriting.registry import known_passes, known_pipelines
from shardir.tools.arguments import ToolParser, output_file

HELP = {
    "input_file": "the program (standard input)",
    "frontend": "the parser: ir or mlir for shardir's own, stablehlo for programs of JAX and XLA "
    "(also files *.mlir with such ops), xdsl for xDSL's (ir)",
    "disable_verify": "do not verify the program",
    "allow_unregistered_dialect": "accept ops and attributes of dialects that are not registered",
    "no_implicit_module": "with -f xdsl: expect a module in the input",
    "passes": "the passes to run: a,b{x=1 y=2}; the name of a pipeline stands for its passes",
    "target": "the output format: mlir, torch or stablehlo (mlir)",
    "output_file": "the output: a file, or a directory for -t torch (standard output)",
    "print_between_passes": "print the IR after each pass but the last",
    "time_passes": "print the seconds of each pass to stderr",
    "verify_diagnostics": "compare the errors with // expected-error {{...}} in the input",
    "split_input_file": "process the parts of the input between lines // ----- one by one",
    "print_op_generic": "print ops in the generic form",
    "print_no_properties": "print properties as attributes",
    "print_debuginfo": "print source locations",
    "version": "print the versions of shardir and xDSL",
}
"""The help texts of xDSL's arguments."""

OF_MLIR = {
    "print_op_generic": ("--mlir-print-op-generic",),
    "print_debuginfo": ("--mlir-print-debuginfo",),
    "split_input_file": ("-split-input-file",),
    "verify_diagnostics": ("-verify-diagnostics",),
    "time_passes": ("--mlir-timing",),
}
"""Names that options have in mlir-opt."""

METAVARS = {"input_file": "FILE", "target": "FORMAT", "output_file": "OUT"}

UNSUPPORTED = ("parsing_diagnostics", "shrink", "syntax_highlight")
"""xDSL's arguments that shard-opt does not have."""

OPTIONAL_VALUE = ("--cost", "--cost-ops", "--explain")
"""Arguments whose value is optional, and needs a `=`: the next word is the input file."""


GROUPS = {
    "what runs": (
        "input_file", "passes", "mode", "plan", "target", "output_file", "arena", "imports",
        "list_passes",
    ),
    "which plan, what it costs, and why": (
        "cost", "cost_ops", "compare", "meshes", "by_layer", "format", "report",
        "explain", "explain_redistributions", "trace", "print_plan", "save_strategies",
        "cost_graph",
    ),
    "the text": (
        "short_types", "no_aliases", "print_op_generic", "print_no_properties", "print_debuginfo",
    ),
    "each pass": (
        "print_ir_after_all", "print_ir_before_all", "print_ir_after", "print_ir_before",
        "print_between_passes", "time_passes", "verify_each", "check_equivalence",
        "dump_pass_pipeline",
    ),
    "what is read": (
        "frontend", "split_input_file", "allow_unregistered_dialect", "no_implicit_module",
        "disable_verify",
    ),
    "tests and errors": (
        "verify_diagnostics", "verify_roundtrip", "run_reproducer", "traceback", "show_dialects",
    ),
}  # fmt: skip
"""The arguments of shard-opt by what they are for."""

EXAMPLES = """\
shard-opt net.ir -p propagate-strategies                   a layout on every value
shard-opt net.ir --plan "fsdp(dp)" -p train --cost=h200    the time and memory of a step
shard-opt net.ir --compare "ddp; fsdp(dp); auto" --meshes 16 --cost=h200
shard-opt net.ir -p train -t torch -o out                  a directory for shard-run
"""


def parser() -> ToolParser:
    """Return the parser of shard-opt's arguments."""
    return OptArguments.__new__(OptArguments).make_parser()


class OptArguments(xDSLOptMain):
    """xDSL's driver up to its parsed arguments.

    Dialects, passes and targets come from the installed universes, including ours. Options of
    mlir-opt have its names.
    """

    version_format = f"shard-opt of shardir {__version__}, on xDSL {{xdsl_version}}"

    def __init__(self, args: Sequence[str] | None = None):
        words = sys.argv[1:] if args is None else args
        parsed = self.make_parser()
        self.args = parsed.parse_args([f"{a}=" if a in OPTIONAL_VALUE else a for a in words])

    def make_parser(self) -> ToolParser:
        """Register what is installed, and return the parser."""
        self.available_frontends = {}
        self.available_passes = {}
        self.available_targets = {}
        self.ctx = Context()
        self.register_all_frontends()
        self.register_all_passes()
        self.register_all_targets()
        parser = ToolParser(
            "shard-opt", usage="[options] [FILE]", groups=GROUPS, examples=EXAMPLES,
            description="Verify a program, run passes over it, and print it or emit Python.",
            other=self.pass_of, version=False,
        )  # fmt: skip
        self.register_all_arguments(parser)
        parser.arrange()
        return parser

    def pass_of(self, word: str) -> str:
        """Return what to use in place of a flag of mlir-opt with the name of a pass."""
        name = word.lstrip("-")
        is_pass = name in self.available_passes or name in known_pipelines()
        return f"; use -p {name}" if is_pass else ""

    def register_all_frontends(self) -> None:
        self.available_frontends = dict.fromkeys(
            ("ir", "mlir", "stablehlo", "xdsl"), unused_frontend
        )

    def register_all_passes(self) -> None:
        self.available_passes.update(known_passes())

    def register_all_targets(self) -> None:
        self.available_targets.update(of_registry("targets", BACKENDS))

    def register_all_arguments(self, arg_parser: argparse.ArgumentParser) -> None:
        super().register_all_arguments(arg_parser)
        for action in list(arg_parser._actions):
            action.help = HELP.get(action.dest, action.help)
            action.metavar = METAVARS.get(action.dest, action.metavar)
            if action.dest in UNSUPPORTED:
                action.help = argparse.SUPPRESS
                arg_parser._remove_action(action)
                for option in action.option_strings:
                    del arg_parser._option_string_actions[option]
            if action.dest == "passes":
                action.default = None
            for option in OF_MLIR.get(action.dest, ()):
                action.option_strings = [*action.option_strings, option]
                arg_parser._option_string_actions[option] = action
        add = arg_parser.add_argument
        add(
            "--pass-pipeline", "-pass-pipeline", dest="passes",
            help="the same as -p; also builtin.module(...)",
        )  # fmt: skip
        add(
            "--dump-pass-pipeline", action="store_true",
            help="print the passes with their options to stderr, for -p",
        )  # fmt: skip
        add(
            "--mode",
            help="the mode, instead of a pipeline: stand_alone, data, hybrid, semi_auto, auto or "
            "manual, with options such as auto{memory=16GB} (--list-passes describes each)",
        )
        add(
            "--plan",
            metavar="P",
            help="annotate the program by a plan, its file, or presets: fsdp(dp) * megatron(tp)",
        )
        add(
            "--print-plan",
            action="store_true",
            help="print the plan of --plan, or of the layouts of all arguments, in place of the "
            "program",
        )
        add(
            "--save-strategies",
            metavar="F",
            help="write all strategies and layouts of the program to a file, as a plan for --plan",
        )
        add(
            "--cost-graph",
            metavar="F",
            help="write the candidates of search-strategies and their costs to a .json file, or "
            "to a .dot one, which Graphviz draws",
        )
        add(
            "--short-types",
            action="store_true",
            help="print no types that follow from the definitions of operands",
        )
        add(
            "--arena",
            action="store_true",
            help="for -t torch: let values of the program have one block of memory, at planned "
            "offsets (docs/guides/memory.md)",
        )
        add(
            "--run-reproducer",
            action="store_true",
            help="run the passes that the file of an internal error names, over its program",
        )
        add(
            "--verify-each", action="store_true", help="verify after each pass, not only at the end"
        )
        add(
            "--check-equivalence",
            action="store_true",
            help="run the program in numpy before and after each pass, and compare",
        )
        add(
            "--print-ir-after-all",
            "--mlir-print-ir-after-all",
            action="store_true",
            help="print the IR after each pass to stderr",
        )
        add(
            "--print-ir-before-all",
            "--mlir-print-ir-before-all",
            action="store_true",
            help="print the IR before each pass to stderr",
        )
        for when in ("before", "after"):
            add(
                f"--print-ir-{when}", f"--mlir-print-ir-{when}", metavar="PASSES", default="",
                help=f"print the IR {when} these passes, a,b, to stderr",
            )  # fmt: skip
        add(
            "--verify-roundtrip",
            "-verify-roundtrip",
            action="store_true",
            help="parse what is printed, and compare",
        )
        add(
            "--explain-redistributions",
            action="store_true",
            help="print the edge, plan, bytes and seconds of each redistribution to stderr",
        )
        add(
            "--cost",
            metavar="[=CLUSTER]",
            help="print a summary of the program's time and memory to stderr, on the mesh's "
            "cluster, a ready-made one or one in a file (docs/understand/cost.md)",
        )
        add(
            "--cost-ops",
            metavar="[=CLUSTER]",
            help="the same with a table of all ops",
        )
        add(
            "--compare",
            metavar="PLANS",
            help="print a table of the estimates of several plans, in place of the program: "
            "'ddp; fsdp(dp) recompute=full; megatron(tp) stages=4; auto', on the meshes of "
            "--meshes, on the cluster of --cost (docs/guides/plans.md)",
        )
        add(
            "--by-layer",
            action="store_true",
            help="for --compare: add a table of the seconds of each layer, and of their difference "
            "from the best plan's",
        )
        add(
            "--meshes",
            metavar="N | MESHES",
            help="for --compare: 'dp = 2, tp = 8; dp = 16', or a number of devices, for all meshes "
            "of them with the axes dp and tp",
        )
        add(
            "--format",
            choices=("table", "json", "csv"),
            help="for --compare and --cost: json and csv replace the program in the output; those "
            "of a cost have every op (table)",
        )
        add(
            "--report",
            type=output_file,
            metavar="FILE",
            help="for --compare: write a page with the programs side by side, report.html",
        )
        add(
            "--trace",
            type=output_file,
            metavar="FILE",
            help="write the simulated run of the program to a file for Perfetto: what each rank "
            "computes, communicates, waits for and holds (docs/understand/cost.md)",
        )
        add(
            "--explain",
            metavar="[=%NAME,...]",
            help="explain to stderr the layouts of these values, of all values within modules of "
            "these names, or of all: the ops that decide them, and the costs of alternatives",
        )
        add(
            "--import",
            dest="imports",
            action="append",
            default=[],
            metavar="MODULE",
            help="import a Python module that registers custom ops (shardir.register_custom_op)",
        )
        add("--list-passes", action="store_true", help="print the passes and their options")
        add("--show-dialects", action="store_true", help="print the names of the dialects")
        add(
            "--no-aliases", action="store_true", help="print layouts in full instead of as #layoutN"
        )
        add(
            "--traceback",
            action="store_true",
            help="print the Python traceback of an internal error",
        )


def unused_frontend(_: Any) -> ModuleOp:
    """Fill the entries of xDSL's table, which only lists the choices: Driver.parse parses."""
    raise NotImplementedError
