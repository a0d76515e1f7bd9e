"""Programs for target hardware are compiled as users compile them."""

import pytest


@pytest.fixture(scope="module", autouse=True)
def _as_users_compile(optimized):
    pass
