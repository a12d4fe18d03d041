"""Mutants of reports."""

from mutants import Mutant

MUTANTS = [
    Mutant(
        "an explanation starts at the second redistribution",
        "--explain-redistributions omits the first one from the sum.",
        "shardir/reports/redistributions.py",
        "explain",
        "sum(p.received_bytes for p in plans)",
        "sum(p.received_bytes for p in plans[1:])",
        "test/reports",
    ),
    Mutant(
        "a module is explained by one value",
        "Of what is within a module only the first value is explained.",
        "shardir/reports/layouts.py",
        "Explanation.look_up",
        "for each in [hint] if hint in found else within:",
        "for each in [hint] if hint in found else within[:1]:",
        "test/frontends/test_compile_model.py",
    ),
    Mutant(
        "names are markup",
        "A name with </script> ends the data of a page.",
        "shardir/reports/page.py",
        "html",
        'record.json().replace("<", "\\\\u003c")',
        "record.json()",
        "test/reports/test_report.py -k names_are_text",
    ),
    Mutant(
        "a report exposes waits for the last device",
        "They count twice, so that the parts are longer than the step.",
        "shardir/reports/recorder.py",
        "_FunctionRecorder._split",
        "self.simulation.seconds - computation - late - r.exposed",
        "self.simulation.seconds - computation - r.exposed",
        "test/reports/test_report.py -k cost_model",
    ),
]
