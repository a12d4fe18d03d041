"""Mutants of rewriting: bases of passes, the rewriter, placement and autodiff."""

from mutants import Mutant

MUTANTS = [
    Mutant(
        "addends of one layout are dropped",
        "A value that is used twice has the cotangent of one use.",
        "shardir/rewriting/autodiff/cotangents.py",
        "found[layout] = self.builder.add(found[layout], d)",
        "pass",
        "test/passes/test_autodiff.py::test_a_value_used_twice",
    ),
    Mutant(
        "stop_gradient passes gradients",
        "Values behind nn.stop_gradient are active.",
        "shardir/rewriting/autodiff/activity.py",
        "if isinstance(op, StopGradientOp):",
        "if False:",
        "test/passes/test_autodiff.py::test_no_cotangent_goes_through_integers_or_stop_gradient",
    ),
    Mutant(
        "microbatches reduce one by one",
        "The addends of microbatches are not added before they are reduced.",
        "shardir/rewriting/autodiff/microbatches.py",
        "        backward.cotangents.accumulate(retained)\n        block",
        "        block",
        (
            "test/dialects/test_optimizers.py::test_reductions_over_the_batch_do_not_grow_with_th"
            "e_microbatches"
        ),
    ),
    Mutant(
        "redistributions are made twice",
        "The same redistribution of a value is made for each use.",
        "shardir/rewriting/rewriter.py",
        "self._moved[value, layout] = new",
        "pass",
        "test/rewriting/test_rewriting.py",
    ),
    Mutant(
        "names are not handed on",
        "The results of a replaced op lose their names.",
        "shardir/rewriting/rewriter.py",
        "new.name_hint = new.name_hint or old.name_hint",
        "pass",
        "test/rewriting/test_rewriting.py",
    ),
    Mutant(
        "fusion indices are lost",
        "The collectives of a redistribution do not have its fusion index.",
        "shardir/rewriting/lowering.py",
        'new.properties["fusion"] = op.fusion',
        "pass",
        (
            "test/filecheck/lower-to-spmd test/filecheck/fuse-communication "
            "test/filecheck/distributed-autodiff"
        ),
    ),
    Mutant(
        "a kibibyte is a kilobyte",
        "Sizes in KiB are powers of 1000.",
        "shardir/rewriting/options.py",
        '("iB", 1024)',
        '("iB", 1000)',
        "test/tools/test_opt.py -k units",
    ),
]
