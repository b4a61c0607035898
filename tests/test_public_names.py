"""`fullshard.quant`, `fullshard.lora` and `fullshard.weights` offer their public names, and importing them is cheap."""

import importlib
import pkgutil
import subprocess
import sys
from types import ModuleType

import pytest

PACKAGES = ("quant", "lora", "weights")


@pytest.mark.parametrize("name", PACKAGES)
def test_public_names_are_no_modules(name: str) -> None:
    """A submodule of the same name would hide a name once it is imported."""
    package = importlib.import_module(f"fullshard.{name}")
    modules = {module.name for module in pkgutil.iter_modules(package.__path__)}
    assert not modules & set(package.__all__)
    for public in package.__all__:
        assert not isinstance(getattr(package, public), ModuleType), public
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = package.nothing


def test_packages_are_imported_without_torch() -> None:
    program = f"import sys, {', '.join(f'fullshard.{name}' for name in PACKAGES)}; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
