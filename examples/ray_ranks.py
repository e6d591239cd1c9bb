"""Serves one model in parts on Ray: each rank is an actor in a bundle of one placement group.

    pip install 'ray>=2.60,<2.61' headrace
    python examples/ray_ranks.py builtin --tensor-parallel-size 2 --port 8000

All arguments are those of ``headrace serve``, except ``--strategy`` and ``--gpus-per-rank``. Ray decides on which
machines the ranks run; rank 0 is the server, and the script prints its address. SIGINT and SIGTERM end all ranks.
"""

from __future__ import annotations

import argparse
import os
import secrets
import signal
import socket
import subprocess
import sys
from collections import Counter
from types import FrameType
from typing import Any

import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy


@ray.remote(max_concurrency=2)
class Rank:
    """One rank: a process of ``headrace serve`` in a bundle of the placement group."""

    def place(self) -> tuple[str, int]:
        """The address of this machine, and a port that is free there."""
        address = ray.util.get_node_ip_address()
        with socket.create_server((address, 0)) as listener:
            return address, listener.getsockname()[1]

    def run(self, arguments: list[str], variables: dict[str, str]) -> int:
        """Serve until the process ends; returns its exit status."""
        command = [sys.executable, "-m", "headrace", "serve", *arguments]
        self._process = subprocess.Popen(command, env=os.environ | variables)
        return self._process.wait()

    def stop(self) -> None:
        """End the process; that of rank 0 finishes its requests, and then the other ranks end."""
        self._process.terminate()


def main() -> None:
    """Place the ranks, start them, and wait for rank 0."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--pipeline-parallel-size", type=int, default=1)
    parser.add_argument(
        "--strategy", default="PACK", help="of the placement group: PACK, STRICT_PACK, SPREAD, STRICT_SPREAD"
    )
    parser.add_argument("--gpus-per-rank", type=int, default=0)
    args, arguments = parser.parse_known_args()
    size = args.tensor_parallel_size * args.pipeline_parallel_size
    for name in ("tensor_parallel_size", "pipeline_parallel_size"):
        arguments += [f"--{name.replace('_', '-')}", str(getattr(args, name))]

    ray.init()
    resources = {"CPU": 1.0, "GPU": float(args.gpus_per_rank)}
    group = placement_group([resources] * size, strategy=args.strategy)
    ray.get(group.ready(), timeout=60)
    ranks = [
        Rank.options(
            num_cpus=1,
            num_gpus=args.gpus_per_rank,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle),
        ).remote()
        for bundle in range(size)
    ]
    places = ray.get([rank.place.remote() for rank in ranks])
    here = Counter(address for address, _ in places)  # ranks of a machine share its CPU
    master, port = places[0]
    secret = secrets.token_hex(16)  # which only these ranks know
    running: list[Any] = []
    for number, (rank, (address, _)) in enumerate(zip(ranks, places, strict=True)):
        variables = {
            "RANK": str(number),
            "WORLD_SIZE": str(size),
            "MASTER_ADDR": master,
            "MASTER_PORT": str(port),
            "HEADRACE_RANK_SECRET": secret,
            "LOCAL_WORLD_SIZE": "1"
            if args.gpus_per_rank
            else str(here[address]),  # Ray shows each its own GPU
        }
        running.append(rank.run.remote(arguments, variables))
    print(f"rank 0 of {size} is at {master}", flush=True)

    def end(number: int, frame: FrameType | None) -> None:
        ranks[0].stop.remote()

    signal.signal(signal.SIGINT, end)
    signal.signal(signal.SIGTERM, end)
    codes = ray.get(running)
    sys.exit(max(codes))


if __name__ == "__main__":
    main()
