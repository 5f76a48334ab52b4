"""What one worker does in a tick: its lanes, its regions, and taking the results.

    phase    lanes of a batch, summed into one gradient: the body of `for batch in step`
    pieces   independent pieces whose results are texts: evaluate() and once()
    follow   a tick that this worker missed: only what the others say came out of it

A worker that has missed a tick is *lost*: the script goes on to the end of the step with whatever
it has, and then the state is taken from a peer (rejoin.py), which overwrites everything.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Generator, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from closeranks.errors import LaneUnsteady, LoopDiverged
from closeranks.lanes import threads
from closeranks.lanes import words as w
from closeranks.lanes.assign import block
from closeranks.lanes.averages import apply, into_flat, targets_for
from closeranks.lanes.board import Board, Task
from closeranks.lanes.buffers import Buffers
from closeranks.lanes.durations import Durations
from closeranks.lanes.folds import Folds, FoldsByLayout
from closeranks.lanes.lane import Lane, Work, mean_values, unused_everywhere
from closeranks.lanes.records import Records
from closeranks.lanes.seat import AGAIN, Seat
from closeranks.lanes.seeds import derive, seed_all
from closeranks.lanes.state import Prepared
from closeranks.lanes.turn import Shape, Turn, Wait
from closeranks.lanes.twice import Attempt, difference
from closeranks.observe import points


class Worker:
    """One incarnation of a worker, between the board and the user's objects."""

    def __init__(self, seat: Seat, prepared: Prepared, seed: int) -> None:
        self.seat = seat
        self.board = Board(seat)
        self.records = Records(self.board)
        self.prepared = prepared
        self.seed = seed
        self.tick = 0  # the newest that this worker has begun
        self.is_lost = False
        self.has_failed = False  # its script has raised an exception
        self.lane: Lane | None = None  # that user code is computing now
        self.abandoned: Lane | None = None  # that user code has left before its end
        self.buffers = Buffers([])
        self._folds = FoldsByLayout(self.board.me)
        self._durations = Durations()
        self.threads = torch.get_num_threads()

    def phase(self, work: Work) -> Generator[Any, None, dict[str, float]]:
        """Yields batches of lanes to compute; afterwards .grad is the average. Returns values."""
        self._next_tick()
        if self.is_lost:
            return dict(self.follow(work.place)["values"])
        threads.check(self.threads, work.place)
        parameters = self.prepared.parameters()
        folds = self._folds.at(self.tick, parameters)
        folds.begin(self.tick, len(work.sizes), self.board.roster.workers)
        aside = [p.grad for p in parameters]
        self.buffers.keep()
        phase = int(work.names[-1])
        shape = Shape(work.place, len(work.sizes), len(folds.layout.regions), has_folds=True)
        turn = Turn(self.board, self.tick, shape, self._durations.median_s(phase))
        recent: list[Tensor | None] = [None] * len(parameters)
        try:
            while True:
                task = turn.next()
                if task is None:
                    targets = targets_for(parameters, recent)
                    if not turn.is_complete():
                        return dict(self._miss(work.place)["values"])
                    lanes = self._take_results(turn, folds, targets)
                    if lanes is not None:
                        break
                    continue
                points.reach("task begun", tick=self.tick, task=task, place=work.place)
                if task.is_region:
                    self._sum_region(turn, folds, task, work)
                else:
                    began = time.monotonic()
                    yield from self._compute(work, task, folds, parameters)
                    recent = [p.grad for p in parameters]
                    self._durations.note(phase, time.monotonic() - began)
                self.board.end_task()
        except GeneratorExit:
            self.abandoned = self.lane  # By break, or by an exception of user code.
            raise
        finally:
            self.lane = None
            for parameter, gradient in zip(parameters, aside, strict=True):
                parameter.grad = gradient
            self.buffers.put_back()
        points.reach("complete but not applied", tick=self.tick)
        apply(parameters, targets, unused_everywhere(lanes))
        if lanes[0].buffers is not None:
            self.buffers.adopt(lanes[0].buffers)
        values = mean_values(lanes)
        self._finish({"place": work.place, "values": values})
        seed_all(derive(self.seed, "after", *work.names))
        return values

    def pieces(
        self, place: str, count: int, compute: Callable[[int], str], may_repeat: bool = True
    ) -> list[str]:
        """The texts of all pieces, whoever computed them. If this worker is lost: an empty list."""
        self._next_tick()
        if self.is_lost:
            return list(self.follow(place)["pieces"])
        if not may_repeat and self.records.kept(self.tick) is not None:
            # Whoever did it may have died since; what came out of it is still known.
            told = self.follow(place)
            self._finish(told)
            return list(told["pieces"])
        shape = Shape(place, count, may_repeat=may_repeat)
        turn = Turn(self.board, self.tick, shape, self._durations.median_s(-1))
        while True:
            task = turn.next()
            if task is None:
                texts = [self.records.read(self.tick, lane) for lane in range(count)]
                if None not in texts:
                    break
                if not turn.is_complete():
                    return list(self._miss(place)["pieces"])
                continue
            points.reach("task begun", tick=self.tick, task=task, place=place)
            began = time.monotonic()
            text = compute(task.index)
            points.reach("piece computed", tick=self.tick, task=task, place=place)
            self.records.write(self.tick, task.index, text)
            self._durations.note(-1, time.monotonic() - began)
            self.board.end_task()
        found = [text for text in texts if text is not None]
        self._finish({"place": place, "pieces": found})
        return found

    def _next_tick(self) -> None:
        if self.abandoned is not None:
            raise LoopDiverged(
                f"lane {self.abandoned.index} of tick {self.abandoned.tick} was left before its "
                "end, so its gradient is missing. Training stopped; let `for batch in step` run to "
                "its end, without break and without catching exceptions around it."
            )
        self.tick += 1

    def follow(self, place: str) -> Any:
        """What came out of a tick that this worker does not take part in."""
        wait = Wait()
        while True:
            self.board.refresh()
            text = self.records.kept(self.tick)
            if text is not None:
                told = json.loads(text)
                if told["place"] != place:
                    self.diverged(f"worker {told['worker']} was at {told['place']}", place)
                return told
            others = [a.words[w.AT] for a in self.board.alive if not a.words[w.LOST]]
            if not others or max(others) >= self.tick + w.HISTORY_COUNT:
                self.give_up()
            wait.once()

    def diverged(self, theirs: str, place: str) -> None:
        """User code of this worker does something else than that of the others."""
        if self.is_lost:  # No wonder: it runs on numbers that are no results.
            self.give_up()
        raise LoopDiverged(
            f"{theirs}, while worker {self.seat.worker} is at {place}: every worker must do the "
            "same calls on its Ranks in the same order. Training stopped; let every decision "
            "depend on step.values or on ranks.state, which are equal everywhere."
        )

    def give_up(self) -> NoReturn:
        """Nobody can tell this process what it missed: it is to be started again, or not needed."""
        self.is_lost = True  # Its script ends here, and that it does so says nothing.
        self.board.me.words[w.LOST] = 1
        if self.board.anyone_has_ended():
            raise SystemExit(0)
        self.seat.tell(again=True)
        raise SystemExit(AGAIN)

    def become(self, tick: int) -> None:
        """The state that was just loaded is the one after this tick."""
        self.tick = tick
        self.is_lost = False
        self.buffers = Buffers(self.prepared.modules)
        words = self.board.me.words
        words[w.PROGRESS_NS] = time.monotonic_ns()
        words[w.AT] = tick + 1
        words[w.LOST] = 0

    # Lanes and regions.

    def _compute(
        self, work: Work, task: Task, folds: Folds, parameters: Sequence[Tensor]
    ) -> Generator[Any, None, None]:
        lane, gradients = yield from self._attempt(work, task, parameters, again=False)
        if task.index == work.twice:
            first = Attempt(lane, gradients, self.buffers.packed())
            lane, gradients = yield from self._attempt(work, task, parameters, again=True)
            second = Attempt(lane, gradients, self.buffers.packed())
            differs = difference(first, second, self.prepared.parameter_names())
            if differs:
                raise LaneUnsteady(
                    f"worker {self.seat.worker} did lane {task.index} of {work.place} twice, and "
                    f"{differs} differ. Training stopped, because nobody could repeat it; look "
                    "for warnings about operators that are not deterministic, and for random "
                    "numbers, clocks or files that the loop or the dataset reads."
                )
        share = lane.weight if work.weigh is not None else lane.weight / sum(work.sizes)
        if task.index == 0 and self.buffers.have_changed():
            lane.has_buffers = True
            self.records.tell_buffers(self.tick, self.buffers)
        self.records.write(self.tick, task.index, lane.told())
        points.reach("record written", tick=task.tick, lane=task.index)
        folds.add_lane(task.tick, task.index, len(work.sizes), gradients, share)
        points.reach("between lanes", tick=task.tick, lane=task.index)

    def _attempt(
        self, work: Work, task: Task, parameters: Sequence[Tensor], again: bool
    ) -> Generator[Any, None, tuple[Lane, list[Tensor | None]]]:
        """User code computes a lane; returns what it leaves."""
        self.buffers.put_back()
        for parameter in parameters:
            parameter.grad = None
        batch = work.fetch(task.index, again)
        lane = self.lane = Lane(task.tick, task.index, work.sizes[task.index])
        if work.weigh is not None:
            lane.weight = float(work.weigh(batch))
        seed_all(derive(self.seed, "lane", *work.names, task.index))
        points.reach("before forward", tick=task.tick, lane=task.index, place=work.place)
        yield batch
        points.reach("after backward", tick=task.tick, lane=task.index, place=work.place)
        self.lane = None
        gradients = [p.grad for p in parameters]
        lane.unused = [k for k, g in enumerate(gradients) if g is None]
        return lane, gradients

    def _sum_region(self, turn: Turn, folds: Folds, task: Task, work: Work) -> None:
        scale = 1.0
        if work.weigh is not None:
            lanes = self.records.lanes(self.tick, turn.shape.lanes)
            if lanes is None:
                turn.look_again()
                return
            total = sum(lane.weight for lane in lanes)
            if not total > 0:
                raise ValueError(
                    f"the weights of all lanes of {work.place} add up to {total}: wanted a "
                    "positive number. Training stopped; correct the function given as weight=."
                )
            scale = 1.0 / total
        is_mine = task.index in block(turn.shape.regions, *self.board.standing())
        lanes_count, nodes = turn.shape.lanes, turn.nodes
        if not folds.sum_region(self.tick, task.index, lanes_count, nodes, scale, is_mine):
            turn.look_again()

    def _take_results(
        self, turn: Turn, folds: Folds, targets: Sequence[Tensor]
    ) -> list[Lane] | None:
        """All lanes as they were told, with the gradient in the targets; None: overwritten."""
        lanes = self.records.lanes(self.tick, turn.shape.lanes)
        if lanes is None:
            return None
        if lanes[0].has_buffers:
            lanes[0].buffers = self.records.buffers(self.tick, self.buffers)
            if lanes[0].buffers is None:
                return None
        makers = [maker for maker in turn.makers if maker is not None]
        if not into_flat(targets, lambda places: folds.gather(self.tick, makers, places)):
            return None
        return lanes

    def _finish(self, told: dict[str, Any]) -> None:
        """This tick is complete and everything of it that is needed is here."""
        told["worker"] = self.seat.worker
        self.records.keep(self.tick, json.dumps(told))
        self.board.me.words[w.AT] = self.tick + 1
        self.board.end_task()

    def _miss(self, place: str) -> Any:
        self.board.me.words[w.LOST] = 1
        self.board.end_task()
        points.reach("overtaken", tick=self.tick)
        told = self.follow(place)
        self.is_lost = True
        return told
