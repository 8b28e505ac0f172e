"""A GCS that stands still: nothing at the quota actor waits for it for ever."""

from __future__ import annotations

import pytest

from tests.e2e.alone import run_alone
from tests.requires import requires

pytestmark = pytest.mark.long  # a cluster of its own


def test_what_the_gcs_has_to_store_is_refused_while_it_stands_still_and_the_rest_is_answered() -> None:
    requires("linux")
    reported = run_alone("tests.e2e.gcs_still")
    assert reported == {"before": "granted", "known": "granted", "new": "quota_away", "after": "granted"}
