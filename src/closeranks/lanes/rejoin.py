"""How a worker gets the state of another: a newcomer, or one that was overtaken.

    Phase 1  ask    the asker raises its request number
    Phase 2  serve  a peer that comes to a boundary (between steps) answers: from now on the asker
                    is counted among the workers, so that it is waited for, and the peer copies
                    everything into its own area
    Phase 3  take   the asker copies it, looks whether it is still the same, and is as far as they

Nobody is in charge. Which peer answers follows from the request's number; after a while any peer
does. If the one that copies dies or stops, the handshake is void and the next number is asked with.

Knows workers and bytes; what the state is, says state.py.
"""

from __future__ import annotations

import json
import time
from typing import Any

import torch
from torch import Tensor

from closeranks.checkpoint.format import as_bytes, decode, encode, laid_out, stride_of
from closeranks.lanes import words as w
from closeranks.lanes.board import Board
from closeranks.lanes.turn import Wait
from closeranks.observe import points
from closeranks.segment.area import Area

_ALIGN = 64
_ANYBODY_AFTER_S = 0.15
_VOID_AFTER_S = 1.0  # without an end of the copying, beyond what it should take
_BYTES_PER_S = 5e8  # a slow guess


class Rejoin:
    """Asking and serving, for one worker."""

    def __init__(self, board: Board) -> None:
        self.board = board
        self._request = 0

    # The asker.

    def ask(self) -> Any | None:
        """Everything a peer has, as a tree of its own; None if nobody has anything."""
        me = self.board.me.words
        me[w.LOST] = 1
        wait = Wait()
        try:
            self._raise_request()
            while True:
                self.board.refresh()
                key = w.asker_key(self.board.me.number, self._request)
                peers = [a for a in self.board.alive if a.words[w.AT] and not a.words[w.LOST]]
                if not peers:
                    return None
                for peer in peers:
                    if peer.words[w.READY] == key:
                        tree = self._take(peer, key)
                        if tree is not None:
                            return tree
                if self._is_void(key):
                    self._raise_request()
                # Waiting is no standing still, for which the launcher would kill this worker.
                me[w.PROGRESS_NS] = time.monotonic_ns()
                wait.once()
        finally:
            me[w.REQUEST] = 0

    def _raise_request(self) -> None:
        me = self.board.me.words
        self._request += 1
        me[w.REQUEST_NS] = time.monotonic_ns()
        me[w.REQUEST] = self._request
        self._answered = False

    def _is_void(self, key: int) -> bool:
        """Whether somebody had begun to answer and will not end it."""
        serving = [a for a in self.board.alive if a.words[w.SERVING] == key]
        if not serving:
            return self._answered  # It was answered by somebody who is dead, or serves another.
        self._answered = True
        now_ns = time.monotonic_ns()
        return all(
            now_ns - a.words[w.SERVING_NS] > a.words[w.PATIENCE_NS] + _VOID_AFTER_S * 1e9
            for a in serving
        )

    def _take(self, peer: Area, key: int) -> Any | None:
        points.reach("taking state", giver=peer.number)
        text_bytes, size_bytes = peer.words[w.READY_TEXT_BYTES], peer.words[w.READY_BYTES]
        if peer.words[w.READY] != key:
            return None
        raw = bytes(peer.bytes(w.STATE_DATA, 0, text_bytes))
        source = peer.tensor(w.STATE_DATA, _padded(text_bytes), size_bytes, torch.uint8).clone()
        if peer.words[w.READY] != key:
            return None
        told = json.loads(raw)
        tensors = [_tensor(source, *entry) for entry in told["tensors"]]
        return decode(told["tree"], tensors)

    # The giver.

    def is_asked(self) -> Area | None:
        """Somebody whose request this worker should answer now."""
        for asker in self.board.alive:
            request = asker.words[w.REQUEST]
            if request and self._should_answer(asker, request):
                return asker
        return None

    def _should_answer(self, asker: Area, request: int) -> bool:
        key = w.asker_key(asker.number, request)
        everybody = [self.board.me, *self.board.alive]
        if any(area.words[w.SERVING] == key for area in everybody):
            return False
        if time.monotonic_ns() - asker.words[w.REQUEST_NS] > _ANYBODY_AFTER_S * 1e9:
            return True
        able = sorted(a.number for a in everybody if a.words[w.AT] and not a.words[w.LOST])
        return bool(able) and able[request % len(able)] == self.board.me.number

    def give(self, asker: Area, next_tick: int, tree: Any) -> None:
        """Copy everything for the asker, who takes part from next_tick on."""
        me = self.board.me
        words = me.words
        text, tensors = encode(tree, "the state")
        raw_tensors = [as_bytes(t) for t in tensors]
        entries: list[tuple[int, str, list[int], list[int] | None]] = []
        at = 0
        for tensor, raw in zip(tensors, raw_tensors, strict=True):
            kind = str(tensor.dtype).removeprefix("torch.")
            entries.append((at, kind, list(tensor.shape), stride_of(tensor)))
            at += _padded(raw.numel())
        told = json.dumps({"tree": text, "tensors": entries}).encode()
        key = w.asker_key(asker.number, asker.words[w.REQUEST])
        words[w.READY] = 0
        words[w.SERVING_TICK] = next_tick
        words[w.SERVING_NS] = began_ns = time.monotonic_ns()
        words[w.PATIENCE_NS] = int(2e8 + at / _BYTES_PER_S * 1e9)
        words[w.SERVING] = key
        points.reach("giving state", asker=asker.number)
        me.take(w.STATE_DATA, 0, _padded(len(told)) + max(at, _ALIGN))
        with me.write(w.READY, key):
            me.bytes(w.STATE_DATA, 0, len(told))[:] = told
            place = me.tensor(w.STATE_DATA, _padded(len(told)), max(at, _ALIGN), torch.uint8)
            for entry, raw in zip(entries, raw_tensors, strict=True):
                place[entry[0] : entry[0] + raw.numel()].copy_(raw)
            words[w.READY_TEXT_BYTES], words[w.READY_BYTES] = len(told), max(at, _ALIGN)
            points.reach("state half given", asker=asker.number)
        # Loading takes about as long as copying; the asker is waited for that long and some more.
        took_ns = time.monotonic_ns() - began_ns
        words[w.PATIENCE_NS] = 5 * took_ns + int(2e8)


def _padded(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN


def _tensor(
    source: Tensor, at: int, dtype: str, shape: list[int], stride: list[int] | None
) -> Tensor:
    kind: torch.dtype = getattr(torch, dtype)
    size = torch.Size(shape).numel() * kind.itemsize
    return laid_out(source[at : at + size], kind, shape, stride)
