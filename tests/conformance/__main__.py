"""Run torch's own DDP tests against a DistributedDataParallel class, on gloo and the CPU.

    python -m tests.conformance                                           torch's own class
    python -m tests.conformance --ddp closeranks:DistributedDataParallel --force-cpu
    python -m tests.conformance --ddp closeranks:DistributedDataParallel --filter uneven -v

One line for each test, then what is lost against the baseline, then a summary. The exit code is 1
if a test of the baseline is lost.
"""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections import Counter

from tests.conformance import baseline, runner
from tests.conformance.promised import PROMISES
from tests.conformance.result import FAIL, PASS, PROMISED, SKIP, Result
from tests.conformance.settings import Settings


def main(arguments: list[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.write_baseline and (
        options.ddp or options.broken or options.filter or options.backend
    ):
        parser.error("--write-baseline is for all tests of torch's own class")
    settings = Settings(
        ddp=options.ddp,
        broken=options.broken,
        backend=options.backend,
        force_cpu=options.force_cpu,
        start=options.start,
        world_size=options.world_size,
        timeout_s=options.timeout,
        deadline_s=options.deadline,
        filter=options.filter,
    )
    results = runner.run(settings, on_result=lambda result: _tell(result, options.verbose))
    if options.write_baseline:
        baseline.write(settings.force_cpu, results)
    lost = baseline.lost(results, settings)
    for test in lost:
        _say(f"lost: {test}")
    for result in results:
        if result.test in PROMISES and settings.differs_by_promise and result.status == PASS:
            _say(f"passes although promised.py says that it cannot: {result.test}")
    counted = Counter(result.status for result in results)
    promised = f", {counted[PROMISED]} different by promise" if counted[PROMISED] else ""
    _say(f"{counted[PASS]} passed, {counted[FAIL]} failed, {counted[SKIP]} skipped{promised}")
    return 1 if lost else 0


def _tell(result: Result, verbose: bool) -> None:
    line = f"{result.status:8}  {result.test:<84} {result.seconds:5.1f} s"
    _say(line if result.status == PASS and not result.why else f"{line}  {result.headline}")
    if verbose and result.status == FAIL:
        _say(textwrap.indent(result.why.strip(), "    "))


def _say(line: str) -> None:
    sys.stdout.write(line.rstrip() + "\n")
    sys.stdout.flush()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.conformance",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--ddp", default="", metavar="MODULE:CLASS", help="class under test (torch's own)")
    add("--broken", default="", metavar="NAME", help="break that class first, see broken.py")
    add("--backend", default="", metavar="NAME", help="of groups, in place of gloo")
    add("--force-cpu", action="store_true", help="run the tests for GPUs too, on the CPU")
    add("--start", choices=("fork", "spawn"), default="fork", help="spawn takes 3 times longer")
    add("--world-size", type=int, default=2, metavar="N", help="the baselines hold for 2")
    add("--filter", default="", metavar="REGEX", help="only tests in whose name it is found")
    add("--timeout", type=float, default=240.0, metavar="S", help="for one test (240)")
    add("--deadline", type=float, default=1800.0, metavar="S", help="for the whole run (1800)")
    add("--write-baseline", action="store_true", help="this run is what to compare with")
    add("-v", "--verbose", action="store_true", help="tell everything about a failure")
    return parser


if __name__ == "__main__":
    sys.exit(main())
