"""Which packages are lacking, and how that is said."""

from importlib import metadata

import pytest

from scripts import gpu_check
from scripts.gpu_check_needs import lacking, requirements


def test_nothing_is_lacking_here() -> None:
    assert lacking(["torch", "transformers", "safetensors"]) == []


def test_versions_are_pyprojects(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: "0.0.1")
    [said] = lacking(["transformers"])
    assert said.startswith(f"transformers{requirements()['transformers'].specifier} is needed, 0.0")
    assert "WHEELS" in said


def test_what_is_not_installed_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    assert "is not installed" in lacking(["datasets"])[0]


def test_a_local_build_is_of_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: "2.11.0+cu130")
    assert lacking(["torch"]) == []


def test_sections_need_what_pyproject_lists() -> None:
    needs = {name for section in gpu_check.SECTIONS.values() for name in section.needs}
    assert needs <= requirements().keys()
