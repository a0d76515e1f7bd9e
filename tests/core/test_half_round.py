"""The order of an exchange and of the computation beside it, in the jaxpr."""

import jax
import jax.numpy as jnp

from acco_jax.core import half_round


def test_a_collective_and_the_work_beside_it_stand_between_the_same_barriers():
    """Both take what one barrier gives; another one takes what both give."""
    hops = (half_round.Hop(jnp.square, jnp.sin), half_round.Hop(jnp.exp, jnp.tan))

    def work(k, progress, params):
        return jax.lax.add((jnp.cos, jnp.cosh)[k](params), progress)

    traced = jax.make_jaxpr(
        lambda message, params: half_round.run(hops, message, params, work, params)
    )(1.0, 2.0)
    equations = traced.jaxpr.eqns
    giver = {out: e for e in equations for out in e.outvars}
    named = {e.primitive.name: e for e in equations}

    def takers(of):
        return [e for e in equations if of.outvars[0] in e.invars]

    for encode, collective, computed in (
        ("square", "sin", "cos"),
        ("exp", "tan", "cosh"),
    ):
        assert named[encode].outvars[0] not in named[collective].invars
        before = {id(giver[named[name].invars[0]]) for name in (collective, computed)}
        (added,) = takers(named[computed])
        behind = {id(e) for of in (named[collective], added) for e in takers(of)}
        assert len(before) == len(behind) == 1 and before.isdisjoint(behind)
    barriers = [e for e in equations if e.primitive.name == "optimization_barrier"]
    assert len(barriers) == 2 * len(hops)
