"""Who computes cells on a cluster? Ray: each is a task that asks for CPUs and GPUs, and that runs again elsewhere when
its worker or its node dies.

A task sends back what its cell's file is to hold, and this process writes it: workers need no common folder, and a cell
has one file however often it ran.
"""

from __future__ import annotations

import os
import socket
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from softequiv.adapt.opening import first_line
from softequiv.errors import SoftEquivError, imported
from softequiv.experiments.base import DATA, data_root
from softequiv.experiments.cells import Cell, Told, Work, computed, keep

KNOCKING = 10.0  # seconds for a cluster to answer
LOOKING = 1.0  # seconds between two looks at it


@dataclass
class OnRay:
    """The runner on a Ray cluster: the one at an address ("auto" finds that of this machine), or one that is started
    here and ends with the last cell. Each cell has so many CPUs and GPUs, or a part of one, and is tried again so many
    times when the process or the machine that computes it is lost; one whose work raises is not.
    """

    address: str | None = None
    cpus: float = 1.0
    gpus: float = 0.0
    retries: int = 3
    seen: str = field(default="Ray is starting", init=False, compare=False)

    def __call__(self, cells: Sequence[Cell], work: Work, folder: Path) -> Iterator[tuple[Cell, str]]:
        ray = imported("ray", "cells on a cluster need ray", "ray")
        own = not ray.is_initialized()
        if own:
            self.connect(ray)
        try:
            self.check_there_is_room(ray)
            task = ray.remote(there).options(num_cpus=self.cpus, num_gpus=self.gpus, max_retries=self.retries)
            threads, data = max(1, int(self.cpus)), str(data_root().resolve())
            running = {task.remote(cell, work, threads, data): cell for cell in cells}
            while running:
                self.seen = seen(ray)
                for ended in ray.wait(list(running), num_returns=1, timeout=LOOKING)[0]:
                    cell = running.pop(ended)
                    yield cell, self.ended(ray, ended, cell, folder)
        finally:
            if own:
                ray.shutdown()

    def standing(self) -> str | None:
        """How many nodes there were at the last look, and how much of them was taken."""
        return self.seen

    def ended(self, ray: Any, task: Any, cell: Cell, folder: Path) -> str:
        """Take what a task sends back into its cell's file; what went wrong."""
        try:
            return keep(cell, ray.get(task), folder)
        except ray.exceptions.RayTaskError as problem:  # before the work began: a module that is not there
            return f"its worker could not begin ({first_line(problem.cause)}); install the same there"
        except ray.exceptions.RayError as problem:
            return f"its worker was lost {self.retries + 1} times ({type(problem).__name__}); run it again"

    def connect(self, ray: Any) -> None:
        """Find the cluster, or start one here."""
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is sent to anybody
        try:
            if self.address is not None and ":" in self.address:
                self.knock(*self.address.removeprefix("ray://").rsplit(":", 1))
            ray.init(address=self.address or "local", log_to_driver=False, logging_level="error")
        except (OSError, RuntimeError, ValueError) as problem:
            raise SoftEquivError(
                f"no Ray cluster answers at {self.address} ({first_line(problem)}); start one with ray start --head, "
                "or leave the address out for one on this machine"
            ) from problem

    @staticmethod
    def knock(host: str, port: str) -> None:
        """Ray itself tries for minutes."""
        socket.create_connection((host, int(port)), timeout=KNOCKING).close()

    def check_there_is_room(self, ray: Any) -> None:
        """Ray waits without a word for machines that nobody will add."""
        wanted = {"CPU": self.cpus, "GPU": self.gpus}
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        if any(all(node.get(kind, 0) >= count for kind, count in wanted.items()) for node in nodes):
            return
        lacking = f"no node of the cluster has {self.cpus:g} CPUs and {self.gpus:g} GPUs for a cell"
        if self.address is None:
            raise SoftEquivError(f"{lacking}; ask for less, or give the address of a larger cluster")
        warnings.warn(f"{lacking}; the cells wait until one is added", stacklevel=2)


def seen(ray: Any) -> str:
    """How many nodes there are, and how much of them is taken."""
    whole, free = ray.cluster_resources(), ray.available_resources()
    kinds = [kind for kind in ("CPU", "GPU") if kind in whole]
    taken = [f"{whole[kind] - free.get(kind, 0):g} of {whole[kind]:g} {kind}s" for kind in kinds]
    nodes = sum(node["Alive"] for node in ray.nodes())
    return f"{nodes} node{'s' * (nodes != 1)}, {' and '.join(taken)} taken"


def there(cell: Cell, work: Work, threads: int, data: str) -> Told:
    """What a worker does; the data lie where its own machine says, else where they lie here."""
    torch.set_num_threads(threads)
    os.environ.setdefault(DATA, data)
    return computed(cell, work)
