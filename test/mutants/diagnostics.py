"""Mutants of diagnostics: errors, suggestions and enumerations."""

from mutants import Mutant

MUTANTS = [
    Mutant(
        "the caret does not reach the column",
        "A caret stands one column before the error.",
        "shardir/diagnostics/errors.py",
        "Diagnostic.rendered",
        "before = self.source[first : self.column - 1]",
        "before = self.source[first : self.column - 2]",
        "test/diagnostics/test_errors.py",
    ),
    Mutant(
        "carets are one column long",
        "A range of several characters is underlined at its first character only.",
        "shardir/diagnostics/errors.py",
        "Diagnostic.rendered",
        "width = max(1, min(self.length,",
        "width = max(1, min(1,",
        "test/diagnostics/test_errors.py",
    ),
    Mutant(
        "notes are lost",
        "A diagnostic is printed without its notes.",
        "shardir/diagnostics/errors.py",
        "Diagnostic.rendered",
        "for n in self.notes]",
        "for n in ()]",
        "test/diagnostics/test_errors.py",
    ),
    Mutant(
        "any word is suggested",
        "Any word is suggested for any other one.",
        "shardir/diagnostics/wording.py",
        "did_you_mean",
        "cutoff=0.7",
        "cutoff=0.0",
        "test/diagnostics/test_wording.py",
    ),
    Mutant(
        "progress outlives its listener",
        "Progress goes to a tool that no longer listens.",
        "shardir/diagnostics/progress.py",
        "progress_to",
        "_sink.reset(token)",
        "pass",
        "test/diagnostics/test_progress.py",
    ),
    Mutant(
        "arguments of another type are passed on",
        "Calls do not check the classes of their arguments.",
        "shardir/diagnostics/arguments.py",
        "_check",
        "if kinds is None or any(_fits(value, kind) for kind in kinds):",
        "if kinds is None or kinds:",
        "test/frontends/test_wrong_options.py -k number",
    ),
    Mutant(
        "a kibibyte has 1000 bytes",
        "The byte count of an emitted comment is in the wrong unit.",
        "shardir/diagnostics/wording.py",
        "size_text",
        '("KiB", 1 << 10)',
        '("KiB", 1000)',
        "test/backend/test_emit_bytes.py",
    ),
]
