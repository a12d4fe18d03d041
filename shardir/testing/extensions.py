"""The laws of all ops of an extension."""

from shardir.diagnostics import ShardirError, did_you_mean
from shardir.dialects.installed import Extension, installed
from shardir.dialects.nn.base import TensorOp
from shardir.testing.op_laws import check_op


def check_extension(extension: str | Extension, *, long: bool = False) -> None:
    """Check that an extension loads, and all laws of its ops, on its `cases`.

    Args:
        extension: an extension, or the name of one that is installed or registered.
        long: as for `check_op`.

    Raises:
        ShardirError: there is no such extension, or a part of it does not load.
        AssertionError: an op breaks a law, or has no cases.
    """
    found = _extension(extension)
    for kind in ("dialects", "passes", "targets"):
        for load in found.tables[kind].values():
            load()
    samples = found.cases() if found.cases is not None else {}
    errors = []
    for load in found.dialects.values():
        for op in load().operations:
            if not issubclass(op, TensorOp):
                continue
            if op not in samples:
                errors.append(
                    f"{op.name}: expected cases, got none; give them to Extension(cases=...)"
                )
                continue
            cases, reference = samples[op]
            try:
                check_op(op, cases, reference, emitted=found.torch is not None, long=long)
            except AssertionError as e:
                errors.append(str(e))
    if errors:
        raise AssertionError(f"the extension {found.name}\n" + "\n".join(errors))


def _extension(extension: str | Extension) -> Extension:
    if isinstance(extension, Extension):
        return extension
    known = {e.name: e for e in installed().extensions}
    if extension not in known:
        raise ShardirError(
            f"expected an extension of {', '.join(known) or 'none'}, got {extension}"
            f"{did_you_mean(extension, known)}; install or register it"
        )
    return known[extension]
