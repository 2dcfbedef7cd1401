"""Where the package installs from wheels alone: what it needs, asked of the registry itself."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[3]
PLATFORMS = {
    "linux-x86_64": [f"manylinux_2_{glibc}_x86_64" for glibc in (28, 27, 24, 17, 12, 5)],
    "linux-aarch64": [f"manylinux_2_{glibc}_aarch64" for glibc in (28, 27, 24, 17)],
    "darwin-arm64": [f"macosx_{version}_0_arm64" for version in (14, 13, 12, 11)],
}
PYTHONS = ("3.11", "3.12", "3.13", "3.14")


def needed(platform: str, python: str) -> list[str]:
    """Return the core dependencies there; torch, which has wheels of its own kinds, apart."""
    system, machine = platform.split("-")
    there = {"sys_platform": system, "platform_machine": machine, "python_version": python}
    with (ROOT / "pyproject.toml").open("rb") as file:
        listed = map(Requirement, tomllib.load(file)["project"]["dependencies"])
    found = [one for one in listed if one.marker is None or one.marker.evaluate(there)]
    for one in found:
        one.marker = None  # pip would ask it of the machine that it runs on
    return [str(one) for one in found if one.name != "torch"]


def resolved(requirements: list[str], platform: str, python: str, folder: Path) -> str:
    """Let pip find wheels of all that is needed, without installing it; return what it says."""
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--only-binary=:all:"]
    command += ["--ignore-installed", "--target", str(folder), "--python-version", python]
    command += [word for tag in PLATFORMS[platform] for word in ("--platform", tag)]
    done = subprocess.run([*command, *requirements], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize("platform", PLATFORMS)
def test_wheels_are_enough(platform: str, python: str, tmp_path: Path) -> None:
    said = resolved(needed(platform, python), platform, python, tmp_path)
    (line,) = (line for line in said.splitlines() if line.startswith("Would install "))
    for name in ("numpy", "safetensors", "msgpack", "msgspec"):
        assert f" {name}-" in line, line


def test_a_wheel_that_is_missing_is_found(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="No matching distribution found for pysqlite3"):
        resolved(["pysqlite3>=0.6"], "linux-aarch64", "3.12", tmp_path)
