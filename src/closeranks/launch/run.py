"""`closeranks run`: from options to a watched job, and its exit code.

Looks at the machine, makes the folder, and puts the parts together; every decision is elsewhere.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
import sys
from collections.abc import Callable
from pathlib import Path

from closeranks.launch import kernel, machine
from closeranks.launch.channel import Message
from closeranks.launch.crew import Crew
from closeranks.launch.environment import LAUNCHER, RUN_DIR, JobFacts, Place, for_worker
from closeranks.launch.folder import make_folder
from closeranks.launch.guard import Guard
from closeranks.launch.hosts import Membership, Peers, Wanted, meet
from closeranks.launch.job import Job
from closeranks.launch.loop import Loop
from closeranks.launch.muster import Muster
from closeranks.launch.options import RunOptions
from closeranks.launch.policy import OrdinaryPolicy, ResilientPolicy
from closeranks.launch.record import Worker
from closeranks.launch.rendezvous import LOOPBACK_ADDRESS, Rendezvous
from closeranks.launch.screen import Screen
from closeranks.launch.share import Share, share_out
from closeranks.launch.starter import ExecStarter, ForkStarter, Starter
from closeranks.launch.supervisor import Supervisor
from closeranks.launch.survival import Survival
from closeranks.launch.warm import modules_for
from closeranks.segment.roster import Roster
from closeranks.world.interface import interface_towards

_OF_SERVER = ("OMP_NUM_THREADS", LAUNCHER, RUN_DIR)


def run(options: RunOptions) -> int:
    """Run the job to its end. ValueError, with nothing started, if something cannot be."""
    check_target(options)
    gpus = machine.gpus()
    share = share_out(options.workers, machine.cores(), gpus)
    rendezvous = Rendezvous(options.port, is_handed_over=not options.is_program)
    folder = make_folder(options.log_dir, options.name, options.stem)
    membership = join_machines(options, share, rendezvous)
    kernel.adopt_orphans()
    guard = Guard()  # first: it is a fork, and must not inherit threads or workers
    loop, screen = Loop(), Screen()
    crew: Crew | None = None
    roster = Roster.create(share.workers)
    try:
        for warning in (share.warning, folder.warning, *options.notes):
            if warning:
                screen.say(f"warning: {warning}")
        facts = JobFacts(
            launcher=os.getpid(),
            folder=str(folder.path),
            run_id=options.run_id,
            role=options.role,
            serves_store=not options.is_program,
            restarts_max=options.restarts_max or 0,
            threads=share.threads,
            interface=network_interface(membership),
            wire=options.wire,
        )
        job = Job(
            size=membership.size,
            show=options.show,
            grace_s=options.grace_s,
            hang_report_s=options.hang_report_s,
            hang_timeout_s=options.hang_timeout_s,
            listener_of=rendezvous.listener_of,
            message_of=message_maker(options, facts, rendezvous),
            prepare=rendezvous.open,
        )
        forks = not (gpus or options.is_program) if options.fork is None else options.fork
        starter = make_starter(forks, options, facts)
        policy = OrdinaryPolicy(options.restarts_max or 0)
        survival = Survival(make_muster(roster, options), screen)
        supervisor = Supervisor(job, folder, screen, loop, policy, survival, membership.peers)
        crew = Crew(make_workers(share, membership), starter, guard, loop, supervisor, roster.fd)
        return supervisor.run(crew)
    except ValueError as error:  # From here on it is no fault of what the user has typed.
        raise RuntimeError(f"the launcher failed: {error}") from error
    finally:
        if crew is not None:
            crew.close()
        roster.close()
        membership.peers.close()
        guard.close()
        screen.close(limit_s=1.0)
        folder.close()
        loop.close()


def check_target(options: RunOptions) -> None:
    """ValueError if there is nothing to run."""
    if options.is_program:
        if shutil.which(options.target) is None:
            raise ValueError(f"--no-python {options.target} cannot be run. Nothing was started")
        return
    if not options.is_module:
        path = Path(options.target)
        if not path.is_file():
            what = "is a folder, not a script" if path.is_dir() else "is not there"
            raise ValueError(f"{options.target} {what}. Nothing was started")
        if not os.access(path, os.R_OK):
            raise ValueError(f"{options.target} cannot be read. Nothing was started")
        return
    top = options.target.split(".")[0]
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found = importlib.util.find_spec(top)
    except ValueError:
        found = None
    if found is None:
        raise ValueError(f"-m {options.target}: there is no module {top}. Nothing was started")


def join_machines(options: RunOptions, share: Share, rendezvous: Rendezvous) -> Membership:
    """This machine's place among the machines of the job; usually it is alone."""
    if options.nodes == 1:
        return Membership(0, 1, 0, share.workers, LOOPBACK_ADDRESS, 0, Peers(are_all_done=True))
    assert options.endpoint is not None, "options were validated"
    wanted = Wanted(
        options.endpoint, options.nodes, options.node_rank, share.workers, options.run_id
    )
    found = meet(wanted)
    rendezvous.use(found.address, found.port, found.listener)
    return found


def network_interface(membership: Membership) -> str:
    """For gloo, which would otherwise look up the host's name: loopback if we are alone."""
    if membership.nodes > 1:
        return interface_towards(membership.address)
    names = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    return names[0] if names else ""


def make_workers(share: Share, membership: Membership) -> list[Worker]:
    m = membership
    return [
        Worker(
            Place(m.first_rank + n, m.size, n, share.workers, m.node, m.nodes, m.address, m.port),
            share.cpus[n],
        )
        for n in range(share.workers)
    ]


def message_maker(
    options: RunOptions, facts: JobFacts, rendezvous: Rendezvous
) -> Callable[[Worker], Message]:
    """What a worker is told: who it is, and what to run."""

    def message_of(worker: Worker) -> Message:
        place = Place(**(vars(worker.place) | {"port": rendezvous.port}))
        command = " ".join([options.target, *options.arguments])
        return {
            "rank": place.rank,
            "launcher": facts.launcher,
            "env": for_worker(place, facts, worker.restarts, os.environ),
            "cpus": worker.cpus,
            "seat": worker.seat,
            "title": f"rank {place.rank}: {command}",
            "target": options.target,
            "is_module": options.is_module,
            "is_program": options.is_program,
            "arguments": options.arguments,
        }

    return message_of


def make_muster(roster: Roster, options: RunOptions) -> Muster:
    if options.restarts_max is None:
        return Muster(roster, ResilientPolicy())
    return Muster(roster, ResilientPolicy(options.restarts_max))


def make_starter(forks: bool, options: RunOptions, facts: JobFacts) -> Starter:
    if not forks:
        return ExecStarter()
    place = Place(0, 1, 0, 1, 0, 1, LOOPBACK_ADDRESS, 0)
    environ = for_worker(place, facts, 0, os.environ)
    # Libraries read the number of threads when they are loaded; the rest is a worker's own.
    return ForkStarter(modules_for(options), {n: environ[n] for n in _OF_SERVER if n in environ})
