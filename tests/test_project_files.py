"""The workflow, the pre-commit configuration and the issue templates: they parse, and call what exists."""

from __future__ import annotations

import re
import tomllib
from typing import Any

import pytest
import yaml

from tests.pool import ROOT

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
TEMPLATES = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
TARGETS = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def made(command: str) -> list[str]:
    """The make targets of a command that calls make and nothing else."""
    name, *targets = command.split()
    assert name == "make", f"{command!r} would be checked nowhere else; put it into the Makefile"
    return targets


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.name)
def test_a_workflow_calls_make_targets(file: Any) -> None:
    jobs = yaml.safe_load(file.read_text())["jobs"]
    commands = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    called = {target for command in commands for target in made(command)}
    assert called == {"lint", "check", "test"} <= TARGETS
    versions = jobs["test"]["strategy"]["matrix"]["python-version"]
    oldest = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"].removeprefix(">=")
    assert versions == [oldest, "3.13"] and all(isinstance(version, str) for version in versions)


def test_pre_commit_runs_the_linters_of_make_lint() -> None:
    (repo,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert repo["repo"] == "local", "linters of another version would disagree with make lint"
    assert [made(hook["entry"]) for hook in repo["hooks"]] == [["lint"]]
    assert all(hook["language"] == "system" and not hook["pass_filenames"] for hook in repo["hooks"])


@pytest.mark.parametrize("file", TEMPLATES, ids=lambda file: file.name)
def test_issue_templates(file: Any) -> None:
    form = yaml.safe_load(file.read_text())
    if file.stem == "config":
        assert isinstance(form["blank_issues_enabled"], bool)
        return
    fields = {one["id"]: one for one in form["body"]}
    assert form["name"] and form["description"] and len(fields) == len(form["body"])
    assert all(one["type"] == "textarea" and one["attributes"]["label"] for one in form["body"])
    if file.stem == "bug_report":
        assert fields["env"]["validations"]["required"] and "fullshard env" in fields["env"]["attributes"]["label"]


def test_contributing_names_files_and_objects_that_exist() -> None:
    """Recipes are followed by people who do not know the code yet."""
    text = (ROOT / "docs" / "contributing.md").read_text()
    named = set(re.findall(r"`((?:fullshard|tests|tools)/[\w/]+\.(?:py|txt))", text))
    assert len(named) > 15 and not [name for name in named if not (ROOT / name).is_file()]
    sources = "".join((ROOT / name).read_text() for name in sorted(named))
    objects = set(re.findall(r"`(\w+)`", text)) - {"slow"}
    assert not [name for name in objects if not re.search(rf"\b{name}\b", sources)]
