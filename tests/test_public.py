"""The public names, and what importing them costs."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import attnbalance


@pytest.mark.parametrize("name", attnbalance.__all__)
def test_every_public_name_is_importable(name: str) -> None:
    assert getattr(attnbalance, name).__name__ == name


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="attnbalance attribute nothing"):
        attnbalance.nothing  # noqa: B018  # pyright: ignore[reportAttributeAccessIssue]


def test_lower_bounds_are_the_versions_of_lowest_txt() -> None:
    root = Path(__file__).parents[1]
    pins = dict(re.findall(r"^([\w-]+)==([\d.]+)$", (root / "lowest.txt").read_text(), re.MULTILINE))
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    bounds = dict(requirement.split(">=") for requirement in project["dependencies"])
    assert bounds.keys() == pins.keys()
    for name, bound in bounds.items():
        low, pin = (tuple(map(int, version.split("."))) for version in (bound, pins[name]))
        assert (*low, *[0] * (len(pin) - len(low))) == pin, name


def test_importing_the_package_imports_no_heavy_library() -> None:
    heavy = ("torch", "transformers", "datasets", "scipy")
    code = f"import sys, attnbalance; print([m for m in {heavy} if m in sys.modules])"
    output = subprocess.check_output([sys.executable, "-c", code], text=True)
    assert output.strip() == "[]"
