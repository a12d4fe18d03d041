"""Mutants of frontends: modules of torch."""

from mutants import Mutant

MUTANTS = [
    Mutant(
        "a write to a view is lost",
        "The result of an op that returns a view is a tensor of its own where it has no inverse.",
        "shardir/frontends/torch/importer.py",
        "return _to_cells(result, base if isinstance(base, Cell) else None)",
        "return _to_cells(result)",
        "test/frontends/test_traced.py -k view",
    ),
    Mutant(
        "a view does not see what is written to its base",
        "A view keeps the value that it had when it was made.",
        "shardir/frontends/torch/cells.py",
        "if self.base is not None and self.version != self.root.writes:",
        "if self.base is not None and self.version < 0:",
        "test/frontends",
    ),
    Mutant(
        "what is written to a view does not reach its base",
        "A write to a view changes the view alone.",
        "shardir/frontends/torch/cells.py",
        "self.base.write(self.inverse(self.base.read(), value))",
        "self.inverse(self.base.read(), value)",
        "test/frontends",
    ),
    Mutant(
        "a padding row has a gradient",
        "The row of an embedding for padding is trained.",
        "shardir/frontends/torch/aten/indexing.py",
        "nn.stop_gradient(table), table)",
        "table, table)",
        "test/frontends",
    ),
    Mutant(
        "frozen parameters are trained",
        "A parameter that requires no gradient is updated.",
        "shardir/frontends/torch/importer.py",
        "kind is InputKind.PARAMETER and tensor.requires_grad and bool(node.users)",
        "kind is InputKind.PARAMETER and bool(node.users)",
        "test/frontends",
    ),
    Mutant(
        "groups of an optimizer have one weight decay",
        "The weight decay of a group is that of the first one.",
        "shardir/frontends/torch/optimizers.py",
        'if float(g["weight_decay"]) != decay:',
        "if False:",
        "test/frontends",
    ),
    Mutant(
        "values between checkpoints are not saved",
        "All of a checkpoint is computed again, its results too.",
        "shardir/frontends/torch/importer.py",
        "if op not in kept:",
        "if True:",
        "test/frontends/test_regions.py",
    ),
    Mutant(
        "the gradient of an op of torch is that of other results",
        "The cotangents are taken from the first results.",
        "shardir/backend/torch/runtime/ops_fallback.py",
        "values[len(values) - len(results) :]",
        "values[len(operands) : len(operands) + len(results)]",
        "test/frontends/test_regions.py",
    ),
    Mutant(
        "operands of two dtypes are multiplied",
        "Products convert operands that torch refuses to multiply.",
        "shardir/frontends/torch/dtypes.py",
        "if len(given) > 1:",
        "if len(given) > 2:",
        "test/frontends/test_wrong_uses.py -k f64",
    ),
]
