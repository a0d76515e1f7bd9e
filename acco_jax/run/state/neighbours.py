"""Shards of a state that other hosts keep, and how processes get them from there.

Every process sends its shards to a process on another host, over the network between
the devices: as a permutation, of a few arrays at a time. After a loss whoever has a
shard sends it to all.
"""

import collections
import functools
import json
import socket
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, Sharding
from jax.sharding import PartitionSpec as P

from acco_jax.run.state import processes, shards

GROUP_BYTES = 2**26  # of a process's shards that are sent at a time
Permute = Callable[[tuple[jax.Array, ...]], tuple[jax.Array, ...]]
Like = dict[str, jax.ShapeDtypeStruct]


def holders(hosts: Sequence[int]) -> list[int] | None:
    """Return for each process another one, on another host, which holds its copy.

    Each holds one. None: there is one host, or one has more than half of the processes.

    Args:
      hosts: of each process, a number.
    """
    order = sorted(range(len(hosts)), key=lambda i: (hosts.index(hosts[i]), i))
    shift = max(collections.Counter(hosts).values())
    found = dict(zip(order, order[shift:] + order[:shift], strict=True))
    if any(hosts[i] == hosts[j] for i, j in found.items()):
        return None
    return [found[i] for i in range(len(hosts))]


def find() -> tuple[list[int], list[int] | None]:
    """Return the processes' hosts, and `holders`; None if devices are not equally many.

    A host is a number.
    """
    host = zlib.crc32(socket.gethostname().encode()) >> 1
    mine = np.array([host, jax.local_device_count()], np.int32)
    hosts, devices = processes.gathered(mine).T.tolist()
    return hosts, holders(hosts) if len(set(devices)) == 1 else None


def sent(arrays: dict[str, jax.Array], holder: list[int]) -> shards.Shards:
    """Send this process's shards to its holder; return those that arrive here.

    All processes take part. Arrays of which all have the same parts are left out.

    Args:
      arrays: by name, over meshes.
      holder: of each process.
    """
    arrived: shards.Shards = {}
    for group in _groups(
        {k: x for k, x in arrays.items() if _differ(x.sharding, x.shape)}
    ):
        arrived |= _group_sent(group, holder)
    return arrived


def _group_sent(group: dict[str, jax.Array], holder: list[int]) -> shards.Shards:
    """Return what arrives of arrays on one mesh, which are sent at once."""
    homes = [_home(x) for x in group.values()]
    pairs = _pairs(homes[0].mesh, tuple(holder))
    specs = tuple(home.spec for home in homes)
    moved = _permutation(homes[0].mesh, specs, pairs)(tuple(group.values()))
    devices = list(homes[0].mesh.devices.flat)
    source = {devices[j]: devices[i] for i, j in pairs}
    found: dict[str, dict[str, jax.Array]] = {}
    for name, x in zip(group, moved, strict=True):
        index = x.sharding.devices_indices_map(x.shape)
        found[name] = {  # one of equal ones
            shards.where(index[source[s.device]], x.shape): s.data
            for s in x.addressable_shards
        }
        for own in found[name].values():
            own.copy_to_host_async()
    return jax.device_get(found)


def completed(
    own: shards.Shards, like: Like, *, same: bool
) -> dict[str, jax.Array] | None:
    """Return arrays from the shards that processes have; None if one is missing.

    All processes take part. What one needs and does not have is sent by the first
    process that has it.

    Args:
      own: sound shards that are here.
      like: what is returned, by name, with shardings.
      same: whether shards lie as they did; else every process needs all of them.
    """
    mine = [[i, at] for i, name in enumerate(like) for at in own.get(name, ())]
    everyone = [
        {(i, at) for i, at in json.loads(data)}
        for data in processes.all_bytes(json.dumps(mine).encode())
    ]
    tiles = collections.defaultdict[int, set[str]](set)
    for i, at in set.union(*everyone):
        tiles[i].add(at)
    first: dict[tuple[int, str], int] = {}  # the process that sends a shard
    for process, known in enumerate(everyone):
        for key in known:
            first.setdefault(key, process)
    coming: list[dict[int, list[str]]] = []  # of each array: source -> places
    for i, x in enumerate(like.values()):
        if same:
            needs = _needs(x.sharding, x.shape)
        elif sum(map(shards.volume, tiles[i])) == x.size:
            needs = dict.fromkeys(range(len(everyone)), tiles[i])
        else:
            return None
        from_: dict[int, list[str]] = {}
        for at in sorted(set.union(*needs.values())):
            if (i, at) not in first:
                return None
            if any(
                at in need and (i, at) not in everyone[p] for p, need in needs.items()
            ):
                from_.setdefault(first[i, at], []).append(at)
        coming.append(from_)
    found = {}
    for (name, x), from_ in zip(like.items(), coming, strict=True):
        arrived = _exchanged(own.get(name, {}), from_, x.dtype)
        found[name] = shards.placed(x, own.get(name, {}) | arrived)
    return found


def has_all(own: shards.Shards, like: Like) -> bool:
    """Return whether this process has all shards that it needs, where they lay."""
    process = jax.process_index()
    return all(
        _needs(x.sharding, x.shape)[process] <= own.get(name, {}).keys()
        for name, x in like.items()
    )


def _needs(sharding: Any, shape: tuple[int, ...]) -> dict[int, set[str]]:
    """Return the places of each process's shards."""
    places = collections.defaultdict[int, set[str]](set)
    for device, index in sharding.devices_indices_map(shape).items():
        places[device.process_index].add(shards.where(index, shape))
    return dict(places)


@functools.lru_cache(maxsize=4096)
def _differ(sharding: Sharding, shape: tuple[int, ...]) -> bool:
    """Return whether processes have different parts of an array."""
    return len(set(map(frozenset, _needs(sharding, shape).values()))) > 1


def _exchanged(
    own: dict[str, np.ndarray], from_: dict[int, list[str]], dtype: np.dtype
) -> dict[str, np.ndarray]:
    """Return shards of one array, which some processes send to all.

    Args:
      own: this process's, by place.
      from_: the places of those that each process sends.
      dtype: of the array.
    """
    sizes = {
        source: sum(map(shards.volume, places)) * dtype.itemsize
        for source, places in from_.items()
    }
    mine = from_.get(jax.process_index(), [])
    data = b"".join(bytes(shards.octets(own[at])) for at in mine)
    padded = np.zeros(max(sizes.values(), default=0), np.uint8)
    padded[: len(data)] = np.frombuffer(data, np.uint8)
    sent = {}
    if 2 * len(from_) > jax.process_count():  # most have some of it: all at once
        step = max(1, GROUP_BYTES // jax.process_count())
        starts = range(0, max(1, padded.size), step)
        parts = [processes.gathered(padded[i : i + step]) for i in starts]
        rows = np.concatenate(parts, axis=1)
        sent = {source: rows[source, :size].tobytes() for source, size in sizes.items()}
    else:
        for source, size in sizes.items():
            starts = range(0, max(1, size), GROUP_BYTES)
            parts = [
                processes.from_process(source, padded[i : min(i + GROUP_BYTES, size)])
                for i in starts
            ]
            sent[source] = np.concatenate(parts).tobytes()
    arrived = {}
    for source, places in from_.items():
        start = 0
        for at in places:
            end = start + shards.volume(at) * dtype.itemsize
            values = np.frombuffer(sent[source][start:end], dtype)
            arrived[at], start = values.reshape(shards.shape(at)), end
    return arrived


def _home(x: jax.Array) -> NamedSharding:
    """Return where an array lies; what processes have parts of lies on a mesh."""
    assert isinstance(x.sharding, NamedSharding)
    return x.sharding


def _groups(arrays: dict[str, jax.Array]) -> Iterator[dict[str, jax.Array]]:
    """Yield arrays on one mesh, of `GROUP_BYTES` here or less, or one."""
    group: dict[str, jax.Array] = {}
    size, mesh = 0, None
    for name, x in arrays.items():
        own = sum(s.data.nbytes for s in x.addressable_shards)
        if group and (_home(x).mesh != mesh or size + own > GROUP_BYTES):
            yield group
            group, size = {}, 0
        group[name], mesh = x, _home(x).mesh
        size += own
    if group:
        yield group


@functools.lru_cache
def _pairs(mesh: Mesh, holder: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """Return from which of the mesh's devices to which one the shards go."""
    places = collections.defaultdict[int, list[int]](list)
    for i, device in enumerate(mesh.devices.flat):
        places[device.process_index].append(i)
    return tuple(
        pair
        for process, own in places.items()
        for pair in zip(own, places[holder[process]], strict=True)
    )


@functools.lru_cache
def _permutation(
    mesh: Mesh, specs: tuple[P, ...], pairs: tuple[tuple[int, int], ...]
) -> Permute:
    """Return the program that sends arrays of these specs."""

    def permuted(arrays: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        return tuple(lax.ppermute(x, mesh.axis_names, pairs) for x in arrays)

    run = jax.shard_map(
        permuted, mesh=mesh, in_specs=(specs,), out_specs=specs, check_vma=False
    )
    return jax.jit(run)
