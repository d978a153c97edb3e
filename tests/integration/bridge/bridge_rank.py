"""Runs one rank of a test group: it makes a bridge, runs its scenario, and reports in JSON lines.

python -m tests.integration.bridge.bridge_rank '{"rank": 0, "world": 2, …}'
"""

import hashlib
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from heteroinfer_contract.errors import ContractError
from tests.integration.bridge.calls import Call, random_calls
from vllm_heteroinfer.distributed.bridge import Bridge
from vllm_heteroinfer.distributed.errors import CollectiveMismatchError, PeerLostError
from vllm_heteroinfer.distributed.meter import Meter


class CountingMeter(Meter):
    """Adds up the measurements of a bridge."""

    def __init__(self) -> None:
        self.waited_s = self.transferred_s = 0.0
        self.num_bytes = 0
        self.awaited: list[int] = []

    def add_wait(self, seconds: float) -> None:
        self.waited_s += seconds

    def add_transfer(self, direction: str, seconds: float, num_bytes: int) -> None:
        assert direction in {"send", "recv"}
        self.transferred_s += seconds
        self.num_bytes += num_bytes

    def set_awaited_rank(self, rank: int | None) -> None:
        if rank is not None and self.awaited[-1:] != [rank]:
            self.awaited.append(rank)


def tell(**event: Any) -> None:
    print(json.dumps(event), flush=True)


def part_of(call: Call, rank: int, seed: int) -> torch.Tensor:
    """Returns a rank's input of a call. Every rank can compute the inputs of all ranks."""
    shape = list(call.shape)
    if call.operation == "all_gatherv":
        shape[call.dim] = call.sizes[rank]
    generator = torch.Generator().manual_seed(seed * 100 + rank)
    dtype = getattr(torch, call.dtype)
    if dtype.is_floating_point:
        return (torch.randn(shape, generator=generator) * 4).to(dtype)
    return torch.randint(-1000, 1000, shape, generator=generator).to(dtype)


def summed(parts: list[torch.Tensor]) -> torch.Tensor:
    """Returns the sum in the order of the process group, in float32 for narrow floats."""
    narrow = parts[0].dtype in (torch.bfloat16, torch.float16)
    total = parts[0].float() if narrow else parts[0].clone()
    for part in parts[1:]:
        total += part
    return total.to(parts[0].dtype)


def expected(call: Call, parts: list[torch.Tensor], rank: int) -> torch.Tensor | None:
    """Returns the result that torch computes for a rank."""
    world = len(parts)
    match call.operation:
        case "all_reduce" | "all_reduce_in_place":
            return summed(parts)
        case "all_gather" | "all_gatherv":
            return torch.cat(parts, call.dim)
        case "gather":
            return torch.cat(parts, call.dim) if rank == call.root else None
        case "broadcast":
            return parts[call.root]
        case "reduce_scatter":
            return summed(parts).chunk(world, call.dim)[rank] if parts[0].shape[call.dim] else summed(parts)
        case "reduce_scatterv":
            return summed(parts).split(call.sizes, call.dim)[rank]
    raise AssertionError(call.operation)


def perform(bridge: Bridge, call: Call, x: torch.Tensor) -> Any:
    """Makes one call with the input `x`, and returns its result."""
    if call.step is not None:
        bridge.begin_step(call.step)
    if call.history is not None:
        bridge.set_history(call.history)
    calls: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: bridge.all_reduce(x),
        "all_reduce_in_place": lambda: bridge.all_reduce(x, in_place=True),
        "all_gather": lambda: bridge.all_gather(x, call.dim),
        "all_gatherv": lambda: bridge.all_gatherv(x, call.dim, call.sizes),
        "reduce_scatter": lambda: bridge.reduce_scatter(x, call.dim),
        "reduce_scatterv": lambda: bridge.reduce_scatterv(x, call.dim, call.sizes),
        "gather": lambda: bridge.gather(x, call.root, call.dim),
        "broadcast": lambda: bridge.broadcast(x, call.root),
    }
    return calls[call.operation]()


class BridgeRank:
    """Runs scenarios. Each is a method that the configuration names."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.rank, self.world = config["rank"], config["world"]
        self.device = torch.device(config["device"])
        self.arguments = config["arguments"]
        self.meter = CountingMeter()
        self.config = config
        self.bridge = self.connect(dist.group.WORLD)

    def connect(self, group: Any) -> Bridge:
        return Bridge(
            group="test",
            ranks=range(self.world),
            rank=self.rank,
            device=self.device,
            cpu_group=group,
            share_host=self.config["share_host"],
            timeout_s=self.config["timeout_s"],
            meter=self.meter,
        )

    def start(self) -> None:
        tell(path=self.bridge.path, listeners=self.bridge.listeners, pid=os.getpid())

    def calls(self) -> None:
        """Makes calls with changing layouts of memory, and compares each result with torch's."""
        given = self.arguments.get("calls")
        calls = (
            [Call.from_json(call) for call in given]
            if given
            else random_calls(self.arguments["seed"], self.arguments["count"], self.world, 6000)
        )
        digest = hashlib.sha256()
        for index, call in enumerate(calls):
            parts = [part_of(call, rank, index) for rank in range(self.world)]
            x = parts[self.rank].to(self.device, copy=True)
            if index % 3 == 2 and x.dim() > 1:  # not contiguous
                x = x.transpose(0, 1).contiguous().transpose(0, 1)
            got = perform(self.bridge, call, x)
            if call.operation not in ("all_reduce_in_place", "broadcast"):
                x.zero_()  # the argument may be reused after the call returns
            wanted = expected(call, parts, self.rank)
            if wanted is None:
                assert got is None, call
                continue
            assert got.device == self.device, call
            assert got.dtype == wanted.dtype, (call, got.dtype)
            assert torch.equal(got.cpu(), wanted), (index, call)
            if call.operation in ("all_reduce", "all_reduce_in_place", "all_gather", "broadcast"):
                digest.update(
                    got.cpu().contiguous().view(torch.uint8).numpy().tobytes() if got.numel() else b""
                )
        tell(
            done=len(calls),
            digest=digest.hexdigest(),
            waited_s=self.meter.waited_s,
            transferred_s=self.meter.transferred_s,
            num_bytes=self.meter.num_bytes,
        )

    def differ(self) -> None:
        """Makes calls that differ from those of the other ranks, each in its own group.

        Reports the errors.
        """
        for name, ranks in self.arguments["differences"].items():
            bridge = self.connect(dist.new_group())
            start = time.monotonic()
            try:
                for call in map(Call.from_json, ranks[self.rank]):
                    perform(bridge, call, part_of(call, self.rank, 0).to(self.device))
            except CollectiveMismatchError as error:
                reported = {"message": str(error), "seconds": time.monotonic() - start, "peer": error.peer}
            else:
                reported = {"message": "no error"}
            tell(**{name: reported})
            dist.barrier()

    def until_error(self) -> None:
        """Computes sums until a rank is lost."""
        x = torch.ones(self.arguments["elements"], device=self.device)
        self.bridge.all_reduce(x)
        tell(ready=True)
        while True:
            self.bridge.all_reduce(x)

    def leave(self) -> None:
        """Closes the bridge of the last rank. The others continue."""
        x = torch.ones(8, device=self.device)
        self.bridge.all_reduce(x)
        if self.rank == self.world - 1:
            self.bridge.close()
            dist.destroy_process_group()
            return
        self.bridge.all_reduce(x)

    def announcements(self) -> None:
        """Sends announcements from the first rank. The other ranks report them."""
        messages = [bytes([index % 256]) * (index * 97 % 4097) for index in range(self.arguments["count"])]
        if self.rank == 0:
            for message in messages:
                self.bridge.announce(message)
        elif self.rank in self.bridge.listeners:
            received = [self.bridge.listen(20) for _ in messages]
            assert received == messages
            tell(received=len(received))
        self.bridge.all_reduce(torch.ones(3, device=self.device))
        tell(done=True)

    def silence(self) -> None:
        """Listens to a first rank that announces nothing, until a line on stdin ends the scenario."""
        if self.rank == 0:
            sys.stdin.readline()
        else:
            self.bridge.listen(0.5)

    def mail(self) -> None:
        """Sends tensors around a ring, and back."""
        for elements in (1, 1000, 3_000_001):
            x = torch.full((elements,), float(self.rank), device=self.device)
            following, before = (self.rank + 1) % self.world, (self.rank - 1) % self.world
            if self.rank == 0:
                self.bridge.send(x, following)
                got = self.bridge.recv(x.shape, x.dtype, before)
            else:
                got = self.bridge.recv(x.shape, x.dtype, before)
                self.bridge.send(x, following)
            assert torch.equal(got.cpu(), torch.full((elements,), float(before)))
        tell(done=True)


def main(text: str) -> None:
    """Runs a rank's scenario. Reports an expected error, and then exits with code 3."""
    config = json.loads(text)
    torch.set_num_threads(1)
    if config["device"].startswith("cuda"):
        torch.cuda.set_device(config["device"])
    dist.init_process_group(
        "gloo", init_method=f"file://{config['store']}", rank=config["rank"], world_size=config["world"]
    )
    start = time.monotonic()
    try:
        rank = BridgeRank(config)
        rank.start()
        start = time.monotonic()
        getattr(rank, config["scenario"])()
    except (CollectiveMismatchError, PeerLostError, ContractError, ValueError) as error:
        seconds = time.monotonic() - start
        tell(
            error=type(error).__name__, message=str(error), seconds=seconds, peer=getattr(error, "peer", None)
        )
        os._exit(3)
    rank.bridge.close()
    tell(closed=True)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
