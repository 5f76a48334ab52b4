"""What a job is started with, validated once. Pure: nothing here looks at the machine."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

WORKERS_MAX = 4096
DEFAULT_PORT = 29400


@dataclass(frozen=True)
class RunOptions:
    """The command line of `closeranks run`, as values."""

    target: str  # a script, or a module
    arguments: tuple[str, ...] = ()
    is_module: bool = False
    is_program: bool = False  # the target is not for Python
    workers: int | None = None  # None: as many as the machine has cores or GPUs
    nodes: int = 1
    node_rank: int | None = None
    endpoint: tuple[str, int] | None = None  # where the launchers of several nodes meet
    port: int = 0  # where the ranks of one machine meet; 0: any that is free
    run_id: str = "none"
    role: str = "default"
    wire: str | None = None  # the format of gradients between machines; the ranks know which exist
    restarts_max: int | None = None  # None: 0, or 3 for each worker of a job that made a Ranks
    log_dir: Path | None = None
    name: str | None = None
    show: frozenset[int] | None = None  # None: all ranks
    fork: bool | None = None  # None: fork where there is no GPU
    preload: tuple[str, ...] = ()  # modules that workers need and the script does not name
    hang_report_s: float = 60.0
    hang_timeout_s: float | None = None
    grace_s: float = 20.0
    notes: tuple[str, ...] = ()  # to be said at the start

    def __post_init__(self) -> None:
        if self.workers is not None and not 1 <= self.workers <= WORKERS_MAX:
            raise ValueError(f"-n {self.workers}: a job has 1 to {WORKERS_MAX} workers per machine")
        if self.nodes > 1 and self.endpoint is None:
            raise ValueError(
                f"--nnodes {self.nodes} needs --rdzv-endpoint HOST:PORT (or --master-addr and "
                "--master-port), equal on every machine: where their launchers meet"
            )
        if self.nodes > 1 and self.restarts_max:
            raise ValueError(
                f"--max-restarts {self.restarts_max} with --nnodes {self.nodes}: a job on several "
                "machines is not started again by itself; leave it out"
            )
        if self.node_rank is not None and not 0 <= self.node_rank < self.nodes:
            raise ValueError(f"--node-rank {self.node_rank} is not in 0..{self.nodes - 1}")
        if self.restarts_max is not None and self.restarts_max < 0:
            raise ValueError(f"--max-restarts {self.restarts_max}: at least 0")
        if self.is_module and self.is_program:
            raise ValueError("-m and --no-python: the target is a module, or a program, not both")
        if not 0 <= self.port <= 65535:
            raise ValueError(f"--master-port {self.port}: the port is not in 0..65535")
        for option, value in (
            ("--hang-report", self.hang_report_s),
            ("--hang-timeout", self.hang_timeout_s),
            ("--grace", self.grace_s),
        ):
            if value is not None and not value > 0:
                raise ValueError(f"{option} {value:g}: seconds, more than 0")
        if self.name is not None and (
            not self.name or "/" in self.name or self.name in (".", "..")
        ):
            raise ValueError(f"--name {self.name!r} must be the name of a folder, without a slash")

    @property
    def stem(self) -> str:
        """A short name of what runs: "train" for train.py, "train" for package.train."""
        return Path(self.target).stem if not self.is_module else self.target.rpartition(".")[2]


def parse_endpoint(text: str, default_port: int = DEFAULT_PORT) -> tuple[str, int]:
    """ "host", "host:port" or "[::1]:port" as host and port."""
    match = re.fullmatch(r"(?:\[([^\]]+)\]|([^:]+))(?::(\d+))?", text.strip())
    if not match:
        raise ValueError(f"{text!r} is not HOST:PORT")
    port = int(match[3]) if match[3] else default_port
    if not 0 <= port <= 65535:
        raise ValueError(f"{text!r}: the port is not in 0..65535")
    return match[1] or match[2], port


def parse_nodes(text: str) -> int:
    """ "2" or torchrun's "2:2"; a job here has one size from its start to its end."""
    match = re.fullmatch(r"(\d+)(?::(\d+))?", text.strip())
    if not match or int(match[1]) < 1:
        raise ValueError(f"--nnodes {text}: a whole number of at least 1")
    if match[2] and int(match[2]) != int(match[1]):
        raise ValueError(
            f"--nnodes {text}: a job has one number of machines from start to end; name one number"
        )
    return int(match[1])


def parse_workers(text: str) -> int | None:
    """A number, or torchrun's words, which all mean: see what the machine has."""
    if text in ("auto", "cpu", "gpu"):
        return None
    if not re.fullmatch(r"-?\d+", text.strip()):
        raise ValueError(f"-n {text}: a whole number, or 'auto'")
    return int(text)


def parse_ranks(text: str) -> frozenset[int]:
    """ "0", "0,3" or "0-3,7" as a set of ranks."""
    found: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:\s*-\s*(\d+))?\s*", part)
        if not match:
            raise ValueError(f"--show {text}: ranks like 0, 0,3 or 0-3")
        found.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    return frozenset(found)
