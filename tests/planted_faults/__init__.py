"""Faults on purpose, and the checks that must find them."""

import pytest

for module in ("checks", "trainer_checks", "scenes"):
    pytest.register_assert_rewrite(f"tests.planted_faults.{module}")
