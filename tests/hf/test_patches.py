"""The table of patches: every attribute exists in the installed library, is documented, and is patched on import."""

import importlib
import importlib.metadata
import inspect
import sys
import types

import pytest

from fullshard.hf import patches
from tests.pool import ROOT

INSTALLED = [patch for patch in patches.PATCHES if importlib.util.find_spec(patch.module.split(".")[0])]


def name_of(patch):
    return f"{patch.module}.{patch.attribute}"


@pytest.mark.parametrize("patch", INSTALLED, ids=name_of)
def test_a_patch_fits_the_installed_library(patch):
    owner, name = patches._owner(importlib.import_module(patch.module), patch.attribute)
    original = getattr(owner, name)
    home, function = patch.replacement.split(":")
    made = getattr(importlib.import_module(home), function)(original)
    theirs, ours = inspect.signature(original).parameters, inspect.signature(made).parameters
    anything = any(p.kind is p.VAR_KEYWORD for p in ours.values())
    named = {p.name for p in ours.values() if p.kind is p.POSITIONAL_OR_KEYWORD or p.kind is p.KEYWORD_ONLY}
    if patches._library(patch) in patches.OLDEST:
        assert named & set(theirs) - {"self"} <= set(patch.needs.split()), (
            "a parameter that the replacement relies on is not listed"
        )
    assert anything or set(theirs) - {"args"} <= set(ours), f"{set(theirs) - set(ours)} cannot be given any more"


@pytest.mark.parametrize("library", patches.OLDEST)
def test_the_installed_library_lacks_nothing(library):
    assert importlib.util.find_spec(library) is not None and patches.missing(library) == ()


def test_the_page_lists_every_patch_and_version():
    page = (ROOT / "docs" / "integrations.md").read_text(encoding="utf-8")
    for patch in patches.PATCHES:
        assert f"`{name_of(patch)}`" in page, name_of(patch)
    for library, version in patches.OLDEST.items():
        assert f"{library} {version}" in page, library


FIRST = "class Thing:\n    def size(self, by=1):\n        return by\ndef plain():\n    return 1\n"


@pytest.fixture
def library(tmp_path, monkeypatch):
    """A library of two modules, the second of which imports a name from the first."""
    folder = tmp_path / "stand_in"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "first.py").write_text(FIRST)
    (folder / "second.py").write_text("from stand_in.first import plain\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    replacements = types.ModuleType("stand_in_replacements")
    replacements.doubled = lambda original: lambda *args, **kwargs: 2 * original(*args, **kwargs)
    monkeypatch.setitem(sys.modules, "stand_in_replacements", replacements)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setitem(patches.OLDEST, "stand_in", "1.2")
    replaced = (("Thing.size", "self by"), ("plain", ""))
    table = (
        patches.Patch("stand_in.first", *one[:1], "stand_in_replacements:doubled", one[1], "a test") for one in replaced
    )
    monkeypatch.setattr(patches, "PATCHES", tuple(table))
    yield folder
    for name in [name for name in sys.modules if name.startswith("stand_in")]:
        del sys.modules[name]


def with_version(monkeypatch, version):
    real = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version if name == "stand_in" else real(name))
    patches.missing.cache_clear()


@pytest.mark.parametrize(
    ("version", "expected"), [("1.2.9", (6, 2)), ("1.3.0", (6, 2)), ("2.0.0.dev0", (6, 2)), ("1.1.9", (3, 1))]
)
def test_names_are_replaced_before_others_import_them_and_in_newer_versions_too(
    library, monkeypatch, version, expected
):
    with_version(monkeypatch, version)
    patches.install()
    first, second = importlib.import_module("stand_in.first"), importlib.import_module("stand_in.second")
    assert (first.Thing().size(by=3), second.plain()) == expected
    assert list(inspect.signature(first.Thing.size).parameters) == ["self", "by"]


CHANGED = {
    "a parameter has another name": (FIRST.replace("by", "factor"), ("stand_in.first.Thing.size(self, by)",)),
    "a parameter is new and required": (FIRST.replace("plain()", "plain(unit)"), ("stand_in.first.plain()",)),
    "a function is gone": (FIRST.replace("def plain", "def simple"), ("stand_in.first.plain",)),
    "a class is gone": (FIRST.replace("Thing", "Object"), ("stand_in.first.Thing.size",)),
    "a parameter is new and optional": (FIRST.replace("by=1", "by=1, *, unit=None"), ()),
    "defined by a condition": (f"import sys\nif sys:\n{'    ' + FIRST.replace(chr(10), chr(10) + '    ')}", ()),
}


@pytest.mark.parametrize("change", CHANGED)
def test_a_library_of_another_shape_is_left_alone_as_a_whole(library, monkeypatch, change):
    source, lacks = CHANGED[change]
    (library / "first.py").write_text(source.rstrip() + "\n")
    with_version(monkeypatch, "1.3.0")
    assert patches.missing("stand_in") == lacks and "stand_in.first" not in sys.modules
    patches.install()
    first = importlib.import_module("stand_in.first")
    if hasattr(first, "Thing") and not lacks:
        assert first.Thing().size(3) == 6
    elif hasattr(first, "Thing"):
        assert first.Thing().size(3) == 3


def test_a_module_that_is_gone_is_named(library, monkeypatch):
    (library / "first.py").unlink()
    with_version(monkeypatch, "1.3.0")
    assert set(patches.missing("stand_in")) == {"stand_in.first"}


def test_the_fields_of_a_dataclass_are_the_parameters_of_its_init(library, monkeypatch):
    patch = patches.Patch("stand_in.first", "Options.__init__", "", "level", "a test")
    monkeypatch.setattr(patches, "PATCHES", (patch,))
    source = "from dataclasses import dataclass\n@dataclass\nclass Options:\n    level: int = 1\n"
    for text, lacks in ((source, ()), (source.replace("level", "degree"), ("stand_in.first.Options.__init__(level)",))):
        (library / "first.py").write_text(text)
        with_version(monkeypatch, "1.3.0")
        assert patches.missing("stand_in") == lacks


def test_the_variable_of_the_flag_leaves_libraries_alone(library, monkeypatch):
    monkeypatch.setenv(patches.VARIABLE, "off")
    with_version(monkeypatch, "1.2.0")
    patches.install()
    assert importlib.import_module("stand_in.second").plain() == 1


def test_a_library_that_lacks_something_says_so_once_when_it_is_used(library, monkeypatch, caplog):
    from fullshard.distributed import runtime

    (library / "first.py").write_text(FIRST.replace("by", "factor"))
    with_version(monkeypatch, "1.3.0")
    runtime.forget_warnings()
    module = importlib.import_module("stand_in.first")
    module.Thing.__init__ = lambda self: None
    patches._announce_fallback("stand_in", "Thing.__init__", module)
    module.Thing()
    module.Thing()
    message = "stand_in 1.3.0 lacks what fullshard's integrations need (stand_in.first.Thing.size(self, by))"
    assert caplog.text.count(message) == 1
