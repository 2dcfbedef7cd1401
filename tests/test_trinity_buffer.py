"""The root of the package: names that are loaded when they are asked for."""

from __future__ import annotations

import importlib

import pytest

import trinity_buffer


@pytest.mark.parametrize("name", trinity_buffer.__all__)
def test_every_public_name_exists_where_the_root_says(name: str) -> None:
    value = getattr(trinity_buffer, name)
    home = trinity_buffer._HOMES.get(name)
    assert home is None or getattr(importlib.import_module(home), name) is value


def test_the_public_names_are_sorted_and_complete() -> None:
    names = trinity_buffer.__all__
    assert len(set(names)) == len(names)
    assert {*trinity_buffer._HOMES, "__version__"} == set(names) <= set(dir(trinity_buffer))
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        getattr(trinity_buffer, "nonsense")  # noqa: B009 - mypy would find it
