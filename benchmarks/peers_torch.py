"""PyTorch's methods for peers.py: DDP, ZeroRedundancyOptimizer, FSDP2, DiLoCo, ACCO.

ACCO is rewritten from the paper (arXiv 2406.02613) on torch.distributed: one thread
computes gradients, another communicates those of the half-round before.
"""

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from benchmarks.peers_worker import Program


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        names = ("q_proj", "k_proj", "v_proj", "out_proj")
        self.attn = nn.ModuleDict({name: nn.Linear(width, width) for name in names})
        self.mlp = nn.ModuleDict(
            {"c_fc": nn.Linear(width, 4 * width), "c_proj": nn.Linear(4 * width, width)}
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, m, y = self.attn, self.mlp, self.ln_1(x)
        q, k, v = (
            a[name](y).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for name in ("q_proj", "k_proj", "v_proj")
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + a["out_proj"](y.transpose(1, 2).flatten(2))
        y = F.gelu(m["c_fc"](self.ln_2(x)), approximate="tanh")
        return x + m["c_proj"](y)


class GPT2(nn.Module):
    """GPT-2; its result is the mean loss of tokens [rows, length + 1]."""

    def __init__(
        self, vocab_size: int, max_length: int, width: int, layers: int, heads: int
    ) -> None:
        super().__init__()
        self.wte, self.wpe = (nn.Embedding(n, width) for n in (vocab_size, max_length))
        self.h = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.ln_f = nn.LayerNorm(width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        places = torch.arange(tokens.shape[1] - 1)
        x = self.wte(tokens[:, :-1]) + self.wpe(places)
        for block in self.h:
            x = block(x)
        logits = F.linear(self.ln_f(x), self.wte.weight)
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    def load(self, arrays: dict[str, np.ndarray]) -> None:
        """Takes parameters by JAX's paths, whose blocks are stacked."""
        leaves = {"kernel": "weight", "scale": "weight", "embedding": "weight"}
        found = {}
        for path, x in arrays.items():
            *modules, leaf = path.split("/")
            leaf_name, transpose = leaves.get(leaf, leaf), leaf == "kernel"
            if modules[0] == "h":  # h/0_global/attn/q_proj/kernel
                rest = ".".join((*modules[2:], leaf_name))
                parts = {f"h.{i}.{rest}": part for i, part in enumerate(x)}
            else:
                parts = {".".join((*modules, leaf_name)): x}
            for name, part in parts.items():
                found[name] = torch.from_numpy((part.T if transpose else part).copy())
        self.load_state_dict(found)


def build(spec: dict[str, Any]) -> Program:
    """Joins the processes and makes the method's step."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://{spec['coordinator']}", rank=spec["index"],
        world_size=spec["processes"],
    )  # fmt: skip
    with np.load(spec["file"]) as file:
        arrays = dict(file)
    tokens = torch.from_numpy(arrays.pop("tokens")[:, spec["index"]]).long()
    model = GPT2(**spec["model"])
    model.load(arrays)
    make = {
        "torch/ddp": ddp, "torch/zero1": zero1, "torch/fsdp2": fsdp2,
        "torch/diloco": diloco, "torch/acco": acco,
    }  # fmt: skip
    steps = make[spec["method"]](spec, model, tokens)

    def make_compute() -> Callable[[], None]:
        return compute(spec, arrays, tokens)

    return Program(steps, make_compute)


def adamw(parameters: Any, hyper: dict[str, float]) -> torch.optim.AdamW:
    return torch.optim.AdamW(parameters, **_named(hyper))


def _named(hyper: dict[str, float]) -> dict[str, Any]:
    """Returns optax's names and values of AdamW in PyTorch's."""
    return {
        "lr": hyper["learning_rate"], "betas": (hyper["b1"], hyper["b2"]),
        "eps": hyper["eps"], "weight_decay": hyper["weight_decay"],
    }  # fmt: skip


Steps = Callable[[int, int], list[float]]
Tokens = torch.Tensor  # [steps, microbatches, rows, length + 1] of this process


def accumulate(
    model: Callable[[torch.Tensor], torch.Tensor],
    microbatches: torch.Tensor,
    unsynced: Callable[[bool], contextlib.AbstractContextManager],
) -> float:
    """Adds the microbatches' mean gradient; all but the last are not synchronized."""
    n, total = len(microbatches), 0.0
    for i, part in enumerate(microbatches):
        with unsynced(i < n - 1):
            loss = model(part) / n
            loss.backward()
        total += float(loss.detach())
    return total


def synchronous(model: Any, optimizer: Any, tokens: Tokens, unsynced: Any) -> Steps:
    done = 0

    def steps(number: int, first: int) -> list[float]:
        nonlocal done
        del first
        losses = []
        for _ in range(number):
            losses.append(accumulate(model, tokens[done % len(tokens)], unsynced))
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            done += 1
        return losses

    return steps


def _no_sync(model: DistributedDataParallel) -> Any:
    return lambda skip: model.no_sync() if skip else contextlib.nullcontext()


def ddp(spec: dict[str, Any], model: GPT2, tokens: Tokens) -> Steps:
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = adamw(model.parameters(), spec["adamw"])
    return synchronous(wrapped, optimizer, tokens, _no_sync(wrapped))


def zero1(spec: dict[str, Any], model: GPT2, tokens: Tokens) -> Steps:
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.AdamW, parameters_as_bucket_view=True,
        **_named(spec["adamw"]),
    )  # fmt: skip
    return synchronous(wrapped, optimizer, tokens, _no_sync(wrapped))


def fsdp2(spec: dict[str, Any], model: GPT2, tokens: Tokens) -> Steps:
    """FSDP2 that gathers once a step and reduces once: the fewest bytes it can send."""
    mesh = init_device_mesh("cpu", (spec["processes"],))
    for module in (*model.h, model):
        fully_shard(module, mesh=mesh, reshard_after_forward=False)

    @contextlib.contextmanager
    def unsynced(skip: bool) -> Iterator[None]:
        model.set_requires_gradient_sync(not skip)
        model.set_reshard_after_backward(not skip)
        model.set_is_last_backward(not skip)
        yield

    optimizer = adamw(model.parameters(), spec["adamw"])
    return synchronous(model, optimizer, tokens, unsynced)


def diloco(spec: dict[str, Any], model: GPT2, tokens: Tokens) -> Steps:
    """DiLoCo of torchft: each process is a replica group with a manager of its own."""
    from torchft.coordination import LighthouseServer
    from torchft.local_sgd import DiLoCo
    from torchft.manager import Manager
    from torchft.process_group import ProcessGroupGloo

    host, port = spec["coordinator"].split(":")
    lighthouse, own = int(port) + 10_000, int(port) + 20_000
    kept: list[Any] = []  # servers end with their objects
    if spec["index"] == 0:
        bind = f"{host}:{lighthouse}"
        kept.append(LighthouseServer(bind=bind, min_replicas=spec["processes"]))
    dist.barrier()
    kept.append(dist.TCPStore(spec["address"], own, is_master=True))
    manager = Manager(
        pg=ProcessGroupGloo(), load_state_dict=None, state_dict=None,
        min_replica_size=spec["processes"], use_async_quorum=False, rank=0,
        world_size=1, store_addr=spec["address"], store_port=own,
        lighthouse_addr=f"http://{host}:{lighthouse}", hostname=spec["address"],
        replica_id=str(spec["index"]), init_sync=False,
    )  # fmt: skip
    optimizer = adamw(model.parameters(), spec["adamw"])
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    rounds = DiLoCo(manager, [model], optimizer, outer, sync_every=spec["period"])
    kept.append(rounds.__enter__())  # its hooks count the optimizer's steps
    run = synchronous(model, optimizer, tokens, lambda skip: contextlib.nullcontext())

    def steps(number: int, first: int) -> list[float]:
        losses = run(number, first)
        assert manager.num_participants() == spec["processes"] and kept
        return losses

    return steps


# ---- ACCO


class Acco:
    """The paper's recurrence: estimate, commit; gradients of one are sent in the next.

    Parameters lie in one vector, padded to a multiple of the processes; each process
    owns a shard of it, and of AdamW's moments.
    """

    def __init__(self, model: GPT2, hyper: dict[str, float]) -> None:
        self.model, self.hyper = model, hyper
        self.thread = ThreadPoolExecutor(1)
        self.n, rank = dist.get_world_size(), dist.get_rank()
        parameters = list(model.parameters())
        size = sum(p.numel() for p in parameters)
        size += -size % self.n
        self.theta = torch.zeros(size)  # at which gradients are computed
        self.gradient = torch.zeros(size)  # sum of the current half-round
        self.in_flight = torch.zeros(size)  # sum of the half-round before
        self.gathered, self.weight, self.calls, begin = torch.zeros(size), 0.0, 0, 0
        for p in parameters:
            part = slice(begin, begin + p.numel())
            self.theta[part] = p.detach().flatten()
            p.data = self.theta[part].view_as(p)
            p.grad = self.gradient[part].view_as(p)
            begin += p.numel()
        self.shard = self.theta.chunk(self.n)[rank].clone()  # committed
        self.moments = torch.zeros_like(self.shard), torch.zeros_like(self.shard)
        self.updates = 0
        self.carry: tuple[torch.Tensor, float] = torch.zeros_like(self.shard), 0.0

    def half_round(self, microbatches: torch.Tensor) -> float:
        """Computes gradients while those of the half-round before are communicated."""
        exchange = self.thread.submit(self.exchange) if self.calls else None
        self.gradient.zero_()
        total = 0.0
        for part in microbatches:
            loss = self.model(part)
            loss.backward()
            total += float(loss.detach())
        if exchange:
            exchange.result()
            self.theta.copy_(self.gathered)
        self.in_flight.copy_(self.gradient)
        self.weight = float(len(microbatches))
        self.calls += 1
        return total / len(microbatches)

    def exchange(self) -> None:
        """Reduces gradients to shards, steps on the shard, gathers the parameters."""
        parts = torch.empty_like(self.in_flight)
        dist.all_to_all_single(parts, self.in_flight)
        gradient = parts.view(self.n, -1).sum(0)
        weights = torch.tensor(self.weight)
        dist.all_reduce(weights)
        weight = float(weights)
        if self.calls % 2:  # estimate: the optimizer state does not advance
            self.carry = gradient, weight
            theta, _ = self.adamw(gradient / weight)
        else:
            gradient += self.carry[0]
            theta, self.moments = self.adamw(gradient / (weight + self.carry[1]))
            self.shard, self.updates = theta, self.updates + 1
        dist.all_gather_into_tensor(self.gathered, theta)

    def adamw(self, g: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Returns the shard and the moments after one step from the committed state."""
        h, t = self.hyper, self.updates + 1
        m = self.moments[0].lerp(g, 1 - h["b1"])
        v = (self.moments[1] * h["b2"]).addcmul_(g, g, value=1 - h["b2"])
        scale = (v / (1 - h["b2"] ** t)).sqrt_().add_(h["eps"])
        theta = self.shard * (1 - h["learning_rate"] * h["weight_decay"])
        theta.addcdiv_(m, scale, value=-h["learning_rate"] / (1 - h["b1"] ** t))
        return theta, (m, v)


def acco(spec: dict[str, Any], model: GPT2, tokens: Tokens) -> Steps:
    half, method = spec["microbatches"] // 2, Acco(model, spec["adamw"])

    def steps(number: int, first: int) -> list[float]:
        del first
        losses = []
        for _ in range(2 * number):
            # the first call is a second half: it fills the pipeline
            step, second = divmod(method.calls + 1, 2)
            begin = half * second
            part = tokens[step % len(tokens), begin : begin + half]
            losses.append(method.half_round(part))
        return losses

    return steps


# ---- one process


def compute(
    spec: dict[str, Any], arrays: dict[str, np.ndarray], tokens: Tokens
) -> Callable[[], None]:
    """Makes one process's work: gradients, and AdamW on its own parameters."""
    model = GPT2(**spec["model"])
    model.load(arrays)
    part = 1 / spec["processes"] if spec["sharded"] else 1
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    owned = []
    for p in model.parameters():
        size = int(p.numel() * part)
        owned.append(nn.Parameter(p.detach().flatten()[:size].clone()))
        owned[-1].grad = p.grad.flatten()[:size]  # type: ignore[union-attr]
    optimizer = adamw(owned, spec["adamw"])

    def run() -> None:
        for p in model.parameters():
            p.grad.zero_()  # type: ignore[union-attr]
        accumulate(model, tokens[0], lambda skip: contextlib.nullcontext())
        for _ in range(spec["updates"]):
            optimizer.step()

    return run
