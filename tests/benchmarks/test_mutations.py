"""Whether `benchmarks/mutations.py` tells a noticed fault from one that is not."""

import pytest

from benchmarks import mutations
from benchmarks.mutants import Mutant

pytestmark = pytest.mark.skipif(  # of which it copies what git has
    not (mutations.ROOT / ".git").exists(), reason="not a git checkout"
)
FAULT = Mutant(
    "a split has another word",
    "data",
    '"validation": ("validation", "valid", "val", "dev"),',
    '"validation": ("validation", "valid", "val"),',
)
LISTING = "tests/data/test_listing.py::test_splits_of_records"


@pytest.mark.slow
def test_a_fault_is_noticed_by_the_test_of_it_alone():
    other, own = f"{LISTING}[val-jsonl]", f"{LISTING}[dev-jsonl]"
    assert mutations.noticed(FAULT, [other]) is None
    found = mutations.noticed(FAULT, [other, own])
    assert found is not None and found.startswith(f"FAILED {own}")


@pytest.mark.slow
def test_what_tests_nothing_notices_nothing():
    with pytest.raises(RuntimeError, match="pytest ended with 4"):
        mutations.noticed(FAULT, ["tests/data/test_listing.py::test_nowhere"])
