"""Programs as users compile them, and a plan of recorded ones, or its refusal."""

import re
import types

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from acco_jax.command import exits
from acco_jax.plan import programs
from acco_jax.schedule import topologies
from tests.schedule.recordings import SCHEDULES, recorded, run, text_of

_DESCRIBED = {}  # programs by config and mesh: tracing one takes seconds


@pytest.fixture(scope="module", autouse=True)
def _as_users_compile(optimized):
    pass


@pytest.fixture
def stand_in(monkeypatch):
    """Recorded schedules instead of compiles, CPU devices instead of described ones."""
    compiled, describe = [], programs.describe

    def described(config, mesh):
        key = str(config), mesh
        if key not in _DESCRIBED:
            _DESCRIBED[key] = describe(config, mesh)
        return _DESCRIBED[key]

    def compile_(program, *place):
        compiled.append(program)
        name = SCHEDULES[program.method]
        parts = {"parameters": 100, "optimizer state (shard)": 40}
        memory = programs.Memory(parts, 10**9 + 8 * 10**6 * program.rows, shards=40)
        return programs.Compiled(text_of(name), recorded(name), memory, 1.0)

    def mesh(topology, domains=None, group=types.MappingProxyType({})):
        assert set(group.values()) <= {1}
        return Mesh(np.array(jax.devices()[:8]), ("data",))

    monkeypatch.setattr(programs, "describe", described)
    monkeypatch.setattr(programs.Program, "compile", compile_)
    monkeypatch.setattr(programs, "data_mesh", mesh)
    # the schedules are of more devices
    monkeypatch.setattr(topologies, "places", lambda mesh: range(1024))
    return compiled


@pytest.fixture
def refusal(capsys):
    """refusal(*arguments): the one line in which the command refuses them."""

    def refused(*arguments, **options):
        with pytest.raises(SystemExit) as stopped:
            run(*arguments, **options)
        assert stopped.value.code == exits.REFUSED
        out, err = capsys.readouterr()
        (line,) = (x for x in err.splitlines() if not re.match(r"[IW]\d{4} ", x))
        assert out == "" and line.startswith("error: ")
        return line

    return refused
