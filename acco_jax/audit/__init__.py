"""Audit of a JAX program: how much of its communication is overlapped.

    result = audit(step, *abstract_arguments, topology="gpu:h100:8x8")
    print(result)
    assert_hidden(step, abstract_arguments, "gpu:h100:8x8", "data")

It proves a property of the compiled schedule: what lies between the launch of a
collective and its end. It does not prove that the network keeps up, nor how much a
collective and the computation beside it slow each other down.
"""

from acco_jax.audit.auditing import assert_hidden as assert_hidden
from acco_jax.audit.auditing import audit as audit
from acco_jax.audit.auditing import devices as devices
from acco_jax.audit.result import Audit as Audit
