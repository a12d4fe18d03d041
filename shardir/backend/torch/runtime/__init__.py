"""The files that are copied beside an emitted program. They import Python, torch and each other."""

from pathlib import Path

FOLDER = Path(__file__).parent

MEASURING = "measure_main.py"
"""Copied only beside programs that are measured together."""

RUNTIME_FILES = tuple(
    sorted(p.name for p in FOLDER.glob("*.py") if p.name not in ("__init__.py", MEASURING))
)
