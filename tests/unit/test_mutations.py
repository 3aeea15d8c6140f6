"""Every planted bug still has a place in the code, and tests that are to catch it."""

from __future__ import annotations

import pytest

from tests.mutations.run import ROOT, Mutation, applies, read_all


@pytest.mark.parametrize("mutation", read_all(), ids=lambda one: f"{one.source}: {one.name}")
def test_a_bug_can_be_planted(mutation: Mutation) -> None:
    assert applies(mutation, ROOT), f"{mutation.text!r} is not once in {mutation.file}"
    assert mutation.becomes != mutation.text
    assert all((ROOT / test.partition("::")[0]).is_file() for test in mutation.tests)
