"""The table of seams: every attribute exists in the installed library, is documented, and is put in place on import."""

import importlib
import importlib.metadata
import inspect
import sys
import types

import pytest

from fullshard.hf import patches
from tests.pool import ROOT

INSTALLED = [seam for seam in patches.SEAMS if importlib.util.find_spec(seam.module.split(".")[0])]


def name_of(seam):
    return f"{seam.module}.{seam.attribute}"


@pytest.mark.parametrize("seam", INSTALLED, ids=name_of)
def test_a_seam_fits_the_installed_library(seam):
    owner, name = patches._owner(importlib.import_module(seam.module), seam.attribute)
    original = getattr(owner, name)
    home, function = seam.replacement.split(":")
    made = getattr(importlib.import_module(home), function)(original)
    theirs, ours = inspect.signature(original).parameters, inspect.signature(made).parameters
    anything = any(p.kind is p.VAR_KEYWORD for p in ours.values())
    assert anything or set(theirs) - {"args"} <= set(ours), f"{set(theirs) - set(ours)} cannot be given any more"


def test_the_page_lists_every_seam_and_version():
    page = (ROOT / "docs" / "integrations.md").read_text(encoding="utf-8")
    for seam in patches.SEAMS:
        assert f"`{name_of(seam)}`" in page, name_of(seam)
    for library, versions in patches.TESTED.items():
        assert all(f"{library} {version}" in page for version in versions), library


@pytest.fixture
def library(tmp_path, monkeypatch):
    """A library of two modules, the second of which imports a name from the first."""
    folder = tmp_path / "stand_in"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "first.py").write_text(
        "class Thing:\n    def size(self, by=1):\n        return by\ndef plain():\n    return 1\n"
    )
    (folder / "second.py").write_text("from stand_in.first import plain\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    made = types.ModuleType("stand_in_replacements")
    made.doubled = lambda original: lambda *args, **kwargs: 2 * original(*args, **kwargs)
    monkeypatch.setitem(sys.modules, "stand_in_replacements", made)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setitem(patches.TESTED, "stand_in", ("1.2",))
    replaced = ("Thing.size", "plain")
    made_seams = (patches.Seam("stand_in.first", name, "stand_in_replacements:doubled", "a test") for name in replaced)
    monkeypatch.setattr(patches, "SEAMS", tuple(made_seams))
    yield
    for name in [name for name in sys.modules if name.startswith("stand_in")]:
        del sys.modules[name]


def with_version(monkeypatch, version):
    real = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version if name == "stand_in" else real(name))
    patches.untested.cache_clear()


@pytest.mark.parametrize(("version", "expected"), [("1.2.9", (6, 2)), ("1.3.0", (3, 1)), ("1.20.0", (3, 1))])
def test_names_are_replaced_before_others_import_them_and_only_in_tested_versions(
    library, monkeypatch, version, expected
):
    with_version(monkeypatch, version)
    patches.install()
    first, second = importlib.import_module("stand_in.first"), importlib.import_module("stand_in.second")
    assert (first.Thing().size(by=3), second.plain()) == expected
    assert list(inspect.signature(first.Thing.size).parameters) == ["self", "by"]


def test_the_variable_of_the_flag_leaves_libraries_alone(library, monkeypatch):
    monkeypatch.setenv(patches.VARIABLE, "off")
    with_version(monkeypatch, "1.2.0")
    patches.install()
    assert importlib.import_module("stand_in.second").plain() == 1


def test_an_untested_version_says_so_once_when_it_is_used(library, monkeypatch, caplog):
    from fullshard.distributed import runtime

    with_version(monkeypatch, "1.3.0")
    runtime.forget_warnings()
    module = importlib.import_module("stand_in.first")
    module.Thing.__init__ = lambda self: None
    patches._announce_untested("stand_in", "Thing.__init__", module)
    module.Thing()
    module.Thing()
    assert (
        caplog.text.count("stand_in 1.3.0 is not a version that fullshard's integrations were tested with (1.2)") == 1
    )
