"""A pytest plugin: audits in a test suite, and what they found in pytest's summary.

def test_communication_stays_overlapped(assert_hidden):
    mesh = jax.sharding.Mesh(acco_jax.audit.devices("gpu:h100:4x8"), ("data",))
    ...
    assert_hidden(step, arguments, "gpu:h100:4x8", "data")

pytest finds the plugin where acco-jax is installed. It imports JAX when a test asks for
the fixture, so that a conftest.py can set JAX's environment variables before.
"""

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from acco_jax.audit import Audit

_PROPERTY = "overlapped communication"  # of a test's report
_QUICK = "jax_disable_most_optimizations"


@pytest.fixture
def assert_hidden(
    record_property: Callable[[str, object], None],
) -> Iterator[Callable[..., "Audit"]]:
    """`acco_jax.audit.assert_hidden`, whose results the test's report keeps.

    During the test JAX compiles with its optimizations, also in a suite that sets
    JAX_DISABLE_MOST_OPTIMIZATIONS: the schedule is the one that users get.
    """
    import jax

    from acco_jax import audit

    named = inspect.signature(audit.assert_hidden)

    @functools.wraps(audit.assert_hidden)
    def asserted(*args: Any, **options: Any) -> "Audit":
        found = audit.assert_hidden(*args, **options)
        axis = named.bind(*args, **options).arguments.get("axis")
        record_property(_PROPERTY, f"{found.topology}, {found.headline(axis)}")
        return found

    quick = jax.config.values[_QUICK]
    jax.config.update(_QUICK, False)
    yield asserted
    jax.config.update(_QUICK, quick)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print what the audits of all tests found, a line each."""
    found = [
        f"{report.nodeid}: {value}"
        for reports in terminalreporter.stats.values()
        for report in reports
        if getattr(report, "when", "") == "call"
        for name, value in report.user_properties
        if name == _PROPERTY
    ]
    if found:
        terminalreporter.write_sep("=", _PROPERTY)
        terminalreporter.write_line("\n".join(sorted(found)))
