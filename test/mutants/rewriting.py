"""Mutants of rewriting: bases of passes, the rewriter, placement and autodiff."""

from mutants import Mutant

MUTANTS = [
    Mutant(
        "an annotated parameter fixes its states",
        "Before a search states have the annotated layout of their parameter.",
        "shardir/rewriting/autodiff/arguments.py",
        "            return layout\n",
        "            return layout or layout_of(self[i])\n",
        "test/filecheck/distributed-autodiff/states.ir test/search/test_states.py",
    ),
    Mutant(
        "gradients are reduced to the parameter's layout",
        "With sharded states of a replicated parameter the gradient is all-reduced.",
        "shardir/rewriting/autodiff/function.py",
        "sum(self.arguments[i], target=target)",
        "sum(self.arguments[i])",
        "test/filecheck/distributed-autodiff/states.ir test/search/test_states.py",
    ),
    Mutant(
        "addends of one layout are dropped",
        "A value that is used twice has the cotangent of one use.",
        "shardir/rewriting/autodiff/cotangents.py",
        "found[layout] = self.builder.add(found[layout], d)",
        "pass",
        "test/rewriting/test_cotangents.py",
    ),
    Mutant(
        "stop_gradient passes gradients",
        "The result of nn.stop_gradient is active.",
        "shardir/rewriting/autodiff/activity.py",
        "if isinstance(op, StopGradientOp):",
        "if False:",
        "test/rewriting/test_cotangents.py",
    ),
    Mutant(
        "gradients are added up at the end",
        "The gradients of all microbatches are live until the last one.",
        "shardir/rewriting/autodiff/microbatches.py",
        "        backward.cotangents.accumulate(retained)\n        block",
        "        block",
        "test/rewriting/test_microbatches.py -k memory_of_microbatches",
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
        "names are lost",
        "The results of new ops do not have the names that they are given.",
        "shardir/rewriting/rewriter.py",
        "result.name_hint = value.name_hint",
        "pass",
        "test/rewriting/test_rewriting.py",
    ),
    Mutant(
        "fusion indices are lost",
        "The collectives of a redistribution do not have its fusion index.",
        "shardir/rewriting/lowering.py",
        'new.properties["fusion"] = op.fusion',
        "pass",
        "test/rewriting/test_rewriting.py -k fusion_index",
    ),
    Mutant(
        "a kibibyte is a kilobyte",
        "Sizes in KiB are powers of 1000.",
        "shardir/rewriting/options.py",
        '("iB", 1024)',
        '("iB", 1000)',
        "test/rewriting/test_options.py",
    ),
]
