"""Mutants of what editors show: names, fixes, completions."""

from mutants import Mutant

SERVER = "test/editor/test_language_server.py"

MUTANTS = [
    Mutant(
        "names of a function are those of all",
        "A value is looked up in the first function, whatever the cursor is in.",
        "shardir/editor/index.py",
        "TextIndex.function_at",
        "before[-1]",
        "before[0]",
        f"{SERVER}::test_definitions_of_values_and_no_errors",
    ),
    Mutant(
        "axes are those of the first mesh",
        "An axis is defined by the first mesh that has one of its name.",
        "shardir/editor/index.py",
        "TextIndex.definition",
        "of_mesh or [t for _, t in known]",
        "[t for _, t in known]",
        f"{SERVER}::test_axes_of_two_meshes_with_one_name",
    ),
    Mutant(
        "a fix takes the first such text of the statement",
        "The replacement is of the first occurrence, though there are several.",
        "shardir/editor/fixes.py",
        "fix_of",
        "len(places) == 1 or not only",
        "len(places) > 1 or not only",
        f"{SERVER}::test_errors_have_ranges_codes_and_fixes",
    ),
    Mutant(
        "hovers have the written layout",
        "Propagation is not run, so that only annotated values have layouts.",
        "shardir/editor/analysis.py",
        "analyse",
        "if module is None or errors:",
        "if module is None or not errors:",
        f"{SERVER}::test_hovers_have_types_layouts_and_who_decided",
    ),
    Mutant(
        "values that are defined later are offered",
        "A completion has the value that its own statement defines.",
        "shardir/editor/completion.py",
        "completions",
        "if t.start < start",
        "if t.start <= offset",
        f"{SERVER}::test_completions",
    ),
]
