"""The files by which people join: they agree with the project that they describe."""

import re
import tomllib
from pathlib import Path
from typing import Any

import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import shardir

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
GITHUB = ROOT / ".github"


def of_yaml(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def test_the_workflow_runs_what_ci_runs() -> None:
    """And the tests with the oldest xDSL in range, and with its newest release."""
    jobs = of_yaml(GITHUB / "workflows" / "ci.yml")["jobs"]
    commands = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    assert commands == [".ci/run", 'make test-xdsl XDSL="${{ matrix.xdsl }}"']
    oldest = next(d for d in PROJECT["dependencies"] if d.startswith("xdsl"))[len("xdsl>=") :]
    versions = [f"xdsl=={oldest.partition(',')[0]}.0", "xdsl"]
    assert jobs["xdsl"]["strategy"]["matrix"]["xdsl"] == versions
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o111


def test_forms_of_issues_have_fields() -> None:
    for form in ("bug", "feature"):
        fields = of_yaml(GITHUB / "ISSUE_TEMPLATE" / f"{form}.yml")["body"]
        assert all(field["attributes"]["label"] for field in fields)
        assert len({field["id"] for field in fields}) == len(fields)


def test_hooks_are_the_linters_of_make() -> None:
    hooks = of_yaml(ROOT / ".pre-commit-config.yaml")["repos"][0]["hooks"]
    entries = [hook["entry"].replace(" --force-exclude", "") for hook in hooks]
    recipe = re.search(r"^lint:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.M)
    assert recipe is not None
    lines = recipe[1].replace("$(BIN)", ".venv/bin").split("\n")
    assert entries == [line.strip().removesuffix(" .") for line in lines if line]


def test_the_changelog_has_this_version_first() -> None:
    headings = re.findall(r"^## \[(.+?)\](?: - (.*))?$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert headings[0] == ("Unreleased", "") and headings[1][0] == shardir.__version__
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\d", date) for _, date in headings[1:])
    assert [date for _, date in headings[1:]] == sorted((d for _, d in headings[1:]), reverse=True)


def test_constraints_have_one_version_in_range_of_each_package() -> None:
    lines = [x for x in (ROOT / "constraints.txt").read_text().splitlines() if x[0] != "#"]
    parts = [re.fullmatch(r"([\w.-]+)==([\w.+!]+)", line) for line in lines]
    assert all(parts), "expected lines of the form name==version"
    versions = {canonicalize_name(m[1]): m[2] for m in parts if m}
    assert len(versions) == len(lines) and "torch" not in versions
    made = set(re.findall(r"\.\[([\w,]+)\]", (ROOT / "Makefile").read_text()))
    extras = [extra for group in made for extra in group.split(",")]
    optional = PROJECT["optional-dependencies"]
    for text in [*PROJECT["dependencies"], *(r for extra in extras for r in optional[extra])]:
        requirement = Requirement(text)
        if (name := canonicalize_name(requirement.name)) != "torch":
            assert name in versions, f"{text} has no line; run make constraints"
            assert versions[name] in requirement.specifier, f"{text}, got {versions[name]}"
