"""What is read here is what users' compilers make."""

import pytest


@pytest.fixture(scope="module", autouse=True)
def _as_users_compile(optimized):
    pass
