"""Work in parts that do not depend on each other: one after another in this process, or as Ray tasks on GPUs and nodes.

The one room that imports Ray, and only if it was asked for. A task has one GPU if the cluster has any, else one CPU
core. Work and its arguments travel to other processes: work is a function of a module, and every node has the project,
the model and whatever files are named at the same paths.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm_kvplug.errors import PolicyError

if TYPE_CHECKING:
    from torch import Tensor


def add_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--ray",
        nargs="?",
        const="",
        metavar="ADDRESS",
        help="spread the work over the GPUs, or else CPU cores, of a Ray cluster; without ADDRESS of the one that "
        "RAY_ADDRESS names, that runs on this machine, or that is started for this command; docs/ray.md",
    )


def spread(address: str | None) -> Spread:
    """What the value of --ray asks for: None for this process, else a cluster, with "" as the one that Ray finds.

    Raises PolicyError if Ray is not installed or does not answer.
    """
    return Spread() if address is None else RaySpread(address)


@dataclass(frozen=True)
class Ranks:
    """This process's number among those that do one work together, and how many they are."""

    rank: int = 0
    count: int = 1

    def add_up(self, tensors: Iterable[Tensor]) -> None:
        """Put the sum over all processes in every tensor's place; it is bit for bit the same in all of them."""
        if self.count > 1:
            import torch.distributed

            for tensor in tensors:
                torch.distributed.all_reduce(tensor)

    def agree(self, value: Any) -> bool:
        """Whether all processes have the same value."""
        if self.count == 1:
            return True
        import torch.distributed

        values = [None] * self.count
        torch.distributed.all_gather_object(values, value)
        return values.count(value) == self.count


ALONE = Ranks()


class Spread:
    """This process: parts are worked on one after another."""

    slots = 1
    """Parts that may be worked on at once."""

    @property
    def device(self) -> str:
        """torch's name of the device that work runs on."""
        import torch

        return "cuda" if torch.cuda.is_available() else "cpu"

    def parts(self, items: Sequence[Any]) -> list[Any]:
        """Cut items, one or more, into runs of about one length: one per slot, none of them empty."""
        count = min(self.slots, len(items))
        edges = [len(items) * part // count for part in range(count + 1)]
        return [items[first:last] for first, last in zip(edges, edges[1:], strict=False)]

    def each(self, work: Callable[..., Any], jobs: Iterable[tuple], devices: int = 1) -> Iterator[tuple[int, Any]]:
        """(number of a job, what work(*job) returns) as jobs finish; `devices` is what a job needs of them.

        The first job that fails ends the others and is raised; on a cluster, always as PolicyError.
        """
        for number, job in enumerate(jobs):
            yield number, work(*job)

    def map(self, work: Callable[..., Any], jobs: Iterable[tuple]) -> list[Any]:
        """What work(*job) returns, in the order of the jobs."""
        return [result for _, result in sorted(self.each(work, jobs), key=lambda pair: pair[0])]

    def together(self, work: Callable[..., Any], most: int, *arguments: Any) -> Any:
        """What rank 0's work(ranks, *arguments) returns, of up to `most` processes at once whose Ranks add up."""
        return work(ALONE, *arguments)


class RaySpread(Spread):
    """A Ray cluster, which stays connected until this process ends."""

    def __init__(self, address: str):
        try:
            import ray
        except ImportError:
            raise PolicyError("--ray needs Ray: pip install 'vllm_kvplug[ray]'") from None
        self.ray: Any = ray
        if not ray.is_initialized():
            try:
                ray.init(address or None)
            except (ConnectionError, RuntimeError, ValueError) as error:
                raise PolicyError(f"--ray {address}: no Ray cluster there: {error}") from None
        resources = ray.cluster_resources()
        self.unit = "GPU" if resources.get("GPU", 0) >= 1 else "CPU"
        self.slots = int(resources[self.unit])

    @property
    def device(self) -> str:
        return "cuda" if self.unit == "GPU" else "cpu"

    def each(self, work: Callable[..., Any], jobs: Iterable[tuple], devices: int = 1) -> Iterator[tuple[int, Any]]:
        task = self.ray.remote(**self._share(devices))(_in_folder)
        tasks = [task.remote(os.getcwd(), work, *job) for job in jobs]
        try:
            yield from self._finished(tasks)
        finally:  # of a failure or an interrupt: those that have not finished, and the processes that they started
            for left in tasks:
                self.ray.cancel(left, force=True)

    def together(self, work: Callable[..., Any], most: int, *arguments: Any) -> Any:
        from ray.util.placement_group import placement_group, remove_placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        count = min(self.slots, most)
        # All places or none: ranks would wait for ever for one that gets none.
        group = placement_group([{"CPU": 1} | {self.unit: 1}] * count)
        places = [PlacementGroupSchedulingStrategy(group, rank) for rank in range(count)]
        kind = self.ray.remote(**self._share(1))(_Member)
        try:
            members = [kind.options(scheduling_strategy=place).remote() for place in places]
            job = (self._result(members[0].meeting_point.remote()), self.device, os.getcwd(), work, *arguments)
            tasks = [actor.run.remote(Ranks(rank, count), *job) for rank, actor in enumerate(members)]
            return dict(self._finished(tasks))[0]
        finally:
            remove_placement_group(group)  # and its members, of which some may wait for one that has failed

    def _share(self, devices: int) -> dict[str, int]:
        return {"num_cpus": 1} | {f"num_{self.unit.lower()}s": devices}

    def _finished(self, tasks: list[Any]) -> Iterator[tuple[int, Any]]:
        waiting = {task: number for number, task in enumerate(tasks)}
        while waiting:
            (task,), _ = self.ray.wait(list(waiting))
            yield waiting.pop(task), self._result(task)

    def _result(self, task: Any) -> Any:
        try:
            return self.ray.get(task)
        except self.ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, PolicyError):
                raise PolicyError(str(error.cause)) from None
            raise PolicyError(f"a Ray task failed: {error.cause!r}\n{error}") from None
        except self.ray.exceptions.RayError as error:
            raise PolicyError(f"a Ray task died: {error}") from None


def _in_folder(folder: str, work: Callable[..., Any], *arguments: Any) -> Any:
    """work(*arguments) where the command was given, if there is that folder: paths may be relative to it."""
    with suppress(FileNotFoundError):
        os.chdir(folder)
    return work(*arguments)


class _Member:
    """A rank's process. It outlives a failure of its rank, so that the others' complaints do not come first."""

    def meeting_point(self) -> str:
        """An address on this node at which ranks can meet."""
        import socket

        import ray.util

        host = ray.util.get_node_ip_address()
        with socket.socket() as probe:
            probe.bind((host, 0))
            return f"tcp://{host}:{probe.getsockname()[1]}"

    def run(
        self, ranks: Ranks, address: str, device: str, folder: str, work: Callable[..., Any], *arguments: Any
    ) -> Any:
        import torch.distributed

        if ranks.count > 1:
            backend = "nccl" if device == "cuda" else "gloo"
            torch.distributed.init_process_group(backend, address, rank=ranks.rank, world_size=ranks.count)
        return _in_folder(folder, work, ranks, *arguments)
