"""From facts to verdicts. Pure: one function for each thing, each with its remedy.

ok       nothing to do
warning  jobs run, but slower, or fewer of them
error    jobs will fail
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from closeranks.doctor.facts import Facts

OK, WARNING, ERROR = "ok", "warning", "error"
_PYTHON_MIN, _TORCH_MIN = (3, 11), (2, 13)
_MB, _GB = 10**6, 10**9
# The launcher holds five descriptors for each worker, gloo two for each pair of ranks.
_DESCRIPTORS = 64
_DESCRIPTORS_EACH = 24
_PROCESSES_EACH = 32  # threads count as well


@dataclass(frozen=True)
class Verdict:
    """What was found about one thing."""

    name: str
    level: str
    what: str
    remedy: str = ""


def check(facts: Facts) -> list[Verdict]:
    """Everything, in the order in which it is shown."""
    checks = (_python, _cores, _affinity, _threads, _memory, _shm, _torch, _kernels, _gpus)
    return [v for each in (*checks, _interfaces, _limits, _group) for v in each(facts)]


def _python(facts: Facts) -> Iterator[Verdict]:
    shown = f"{facts.python[0]}.{facts.python[1]} on {facts.architecture}"
    if facts.python < _PYTHON_MIN:
        yield Verdict("python", ERROR, shown, "use Python 3.11 or newer")
    else:
        yield Verdict("python", OK, shown)


def _cores(facts: Facts) -> Iterator[Verdict]:
    quota, cpus = facts.cores.quota, len(facts.cores.cpus)
    if quota is not None and quota < cpus:
        what = f"{cpus} can be used, but the control group grants the time of {quota:g}"
        remedy = "raise the limit (docker run --cpus); workers that share a core wait for it"
        yield Verdict("cores", WARNING, what, remedy)
    else:
        yield Verdict("cores", OK, f"{facts.cores.count}: so many workers run without -n")


def _affinity(facts: Facts) -> Iterator[Verdict]:
    cpus = facts.cores.cpus
    if len(cpus) < facts.cores_of_machine:
        what = f"this process may use {len(cpus)} of {facts.cores_of_machine}: {_ranges(cpus)}"
        remedy = "if that was not meant, start from a shell without taskset or cpuset"
        yield Verdict("affinity", WARNING, what, remedy)
    else:
        yield Verdict("affinity", OK, f"all {len(cpus)}")


def _threads(facts: Facts) -> Iterator[Verdict]:
    set_to = {n: v for n, v in facts.environ.items() if n.endswith("_NUM_THREADS")}
    too_many = [f"{n}={v}" for n, v in set_to.items() if v.isdigit() and int(v) > 1]
    if too_many:
        cores = counted(facts.cores.count, "core")
        what = f"{', '.join(too_many)} is kept for every worker, and this machine has {cores}"
        remedy = "unset it: workers then get cores / workers threads each"
        yield Verdict("threads", WARNING, what, remedy)
    else:
        shown = ", ".join(f"{n}={v}" for n, v in set_to.items())
        yield Verdict("threads", OK, shown or "nothing set: cores / workers for each worker")


def _memory(facts: Facts) -> Iterator[Verdict]:
    free = facts.memory.total - facts.memory.used
    what = f"{free / _GB:.1f} of {facts.memory.total / _GB:.1f} GB are free"
    each = free / facts.cores.count
    if each < 0.3 * _GB:
        remedy = "free memory, or run fewer workers (-n): each needs 0.3 GB before its model"
        yield Verdict("memory", ERROR if free < 0.3 * _GB else WARNING, what, remedy)
    else:
        yield Verdict("memory", OK, what)


def _shm(facts: Facts) -> Iterator[Verdict]:
    if facts.shm is None:
        remedy = "mount a tmpfs there: data loaders with workers need it (gradients do not)"
        yield Verdict("/dev/shm", WARNING, "is not there", remedy)
        return
    what = f"{facts.shm.free / _MB:.0f} of {facts.shm.total / _MB:.0f} MB are free"
    if facts.shm.free < 256 * _MB:
        remedy = "docker run --shm-size=2g, or free it: data loaders with workers need it"
        yield Verdict("/dev/shm", WARNING, what, remedy)
    else:
        yield Verdict("/dev/shm", OK, what)


def _torch(facts: Facts) -> Iterator[Verdict]:
    told = facts.torch
    if "error" in told:
        remedy = "pip install 'torch>=2.13' into the environment of this closeranks"
        yield Verdict("torch", ERROR, f"cannot be asked: {told['error']}", remedy)
        return
    built = f"CUDA {told['cuda_built']}" if told["cuda_built"] else "CPU only"
    what = f"{told['version']} ({built})"
    numbers = tuple(int(n) for n in re.findall(r"\d+", told["version"])[:2])
    if numbers < _TORCH_MIN:
        yield Verdict("torch", ERROR, what, "pip install --upgrade 'torch>=2.13'")
    else:
        yield Verdict("torch", OK, what)
    there = [name for name, is_there in told["backends"].items() if is_there]
    if "gloo" not in there:
        remedy = "install a torch that was built with gloo, as the published ones are"
        yield Verdict("backends", ERROR, f"{', '.join(there) or 'none'}: gloo is missing", remedy)
    else:
        yield Verdict("backends", OK, f"{', '.join(there)}, closeranks")


def _kernels(facts: Facts) -> Iterator[Verdict]:
    kinds = facts.torch.get("kernels")
    if kinds is None:
        return
    unable = facts.torch["unable_to_share"]
    if unable:
        remedy = "use Linux 5.3 or newer; until then gradients go by gloo, which is slower"
        yield Verdict("shared memory", WARNING, unable, remedy)
    else:
        yield Verdict("shared memory", OK, "workers of this machine can share it")
    if "c" in kinds:
        yield Verdict("C kernels", OK, "built")
        return
    what = "not built: gradients are summed in Python, at some 80 % of the speed"
    if not kinds:
        what = f"not built, and {facts.architecture} needs them: memory is not shared, gloo is used"
    remedy = "install closeranks again with a C compiler at hand (Debian: gcc, python3-dev)"
    yield Verdict("C kernels", WARNING, what, remedy)


def _gpus(facts: Facts) -> Iterator[Verdict]:
    if not facts.gpus:
        yield Verdict("GPUs", OK, "none: workers train on cores")
        return
    seen = facts.torch.get("cuda_devices", 0)
    what = f"{facts.gpus} of NVIDIA's in /dev, {seen} seen by torch"
    if seen < facts.gpus:
        remedy = "install a torch for CUDA that suits the driver (nvidia-smi names its version)"
        yield Verdict("GPUs", ERROR, what, f"{remedy}, or hide them: CUDA_VISIBLE_DEVICES=")
    elif not facts.torch["backends"]["nccl"]:
        yield Verdict("GPUs", ERROR, f"{what}, but NCCL is missing", "install a torch with NCCL")
    else:
        yield Verdict("GPUs", OK, what)


def _interfaces(facts: Facts) -> Iterator[Verdict]:
    loopback = [n for n, (is_up, _) in facts.interfaces.items() if is_up and n in ("lo", "lo0")]
    others = [
        f"{name} {addresses[0]}"
        for name, (is_up, addresses) in facts.interfaces.items()
        if is_up and addresses and name not in ("lo", "lo0")
    ]
    shown = ", ".join([*loopback, *others])
    wanted = facts.environ.get("GLOO_SOCKET_IFNAME")
    missing = [n for n in (wanted or "").split(",") if n and n not in facts.interfaces]
    if not loopback:
        remedy = "ip link set lo up: the workers of a machine meet there"
        yield Verdict("interfaces", ERROR, f"{shown or 'none'}: loopback is not up", remedy)
    elif missing:
        what = f"GLOO_SOCKET_IFNAME={wanted}, but there is no {missing[0]}; there is {shown}"
        yield Verdict("interfaces", ERROR, what, "unset it, or name one of these")
    else:
        yield Verdict("interfaces", OK, shown)


def _limits(facts: Facts) -> Iterator[Verdict]:
    workers = facts.cores.count
    for name, need, remedy in (
        ("nofile", _DESCRIPTORS + _DESCRIPTORS_EACH * workers, "ulimit -n 65536"),
        ("nproc", _PROCESSES_EACH * workers, "ulimit -u unlimited, or limits.conf"),
    ):
        limit = facts.limits[name]
        shown = "no limit" if limit is None else str(limit)
        if limit is not None and limit < need:
            what = f"{shown}, and {counted(workers, 'worker')} need about {need}"
            yield Verdict(name, ERROR if limit < need // 4 else WARNING, what, remedy)
        else:
            yield Verdict(name, OK, shown)
    limit = facts.limits["memlock"]
    shown = "no limit" if limit is None else f"{limit / _MB:.1f} MB"
    if facts.gpus and limit is not None and limit < 64 * _MB:
        remedy = "ulimit -l unlimited: NCCL locks memory for fast networks"
        yield Verdict("memlock", WARNING, shown, remedy)
    else:
        yield Verdict("memlock", OK, shown)


def _group(facts: Facts) -> Iterator[Verdict]:
    need = _PROCESSES_EACH * facts.cores.count
    parts = []
    if facts.cores.quota is not None:
        parts.append(f"time of {facts.cores.quota:g} cores")
    if facts.pids_max is not None:
        parts.append(f"{facts.pids_max} processes and threads")
    what = ", ".join(parts) or "sets no limit to cores or processes"
    if facts.pids_max is not None and facts.pids_max < need:
        remedy = "docker run --pids-limit, or TasksMax= of systemd"
        yield Verdict("control group", WARNING, f"{what}; workers need about {need}", remedy)
    else:
        yield Verdict("control group", OK, what)


def counted(count: int, noun: str) -> str:
    """ "no errors", "1 worker", "2 cores"."""
    return f"{count or 'no'} {noun}{'' if count == 1 else 's'}"


def _ranges(numbers: tuple[int, ...]) -> str:
    """ "0-3,8": as taskset writes it."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(f"{a}" if a == b else f"{a}-{b}" for a, b in parts)
