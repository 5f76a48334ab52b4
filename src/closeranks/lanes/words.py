"""Where everything lies in an area: the words of its head and the sections of its data.

A *tick* is the number of something that all workers do together: a phase of a step, a piece of an
evaluation. Ticks are counted by all alike, and a word that says a tick says: this is done, for that
tick. What one tick makes and the next may still be asked for has two places, one for even and one
for odd ticks.

Knows numbers only.
"""

from __future__ import annotations

import zlib

from closeranks.segment import roster

LANES_MAX = 1024
REGIONS_MAX = 64
TEXT_BYTES_MAX = 1 << 20  # of what is told of one lane, or of what came out of a tick

# Words of the head.
AT = roster.AT  # the tick this worker is at: it has applied all before it; 0 before its first
WORK, WORK_NS = 1, 2  # the task it is busy with, and since when
STEPS_DONE = roster.STEPS  # by this incarnation
PROGRESS_NS = roster.PROGRESS_NS  # when it last finished anything
LOST = roster.LOST  # not 0 while it has no state of its own: it was overtaken and asks for it
REQUEST, REQUEST_NS = 6, 7  # its newest request for state
SERVING, SERVING_NS, SERVING_TICK, PATIENCE_NS = 8, 9, 10, 11  # whom it gives its state
READY, READY_TEXT_BYTES, READY_BYTES = 12, 13, 14  # the state it has copied, and for whom
FAILURE = 15  # where user code raised an exception
PLACE = 16  # and 17: what it does in a tick (a hash), by parity
BUFFERS = 18  # and 19: the modules' buffers after lane 0, by parity
LOOKS = 20  # a hash of the state it began with
LEFT = 21  # not 0 once its script has ended

SAVE_BEGUN, SAVE_DONE = 22, 23  # the newest mark it has begun to write, and has dealt with

CONDITIONS = 24  # not 0 once it has told the conditions it computes under
LANE_NS = 27  # how long its lanes usually take
ALIKE = 25  # and 26: its values after a tick, as hashes, by parity

HISTORY = 512  # values and totals of the last ticks
HISTORY_COUNT = 256
RECORDS = 2048  # what is told of a lane, by parity
REGIONS = RECORDS + 2 * LANES_MAX  # sums of regions, by parity
FOLDS = REGIONS + 2 * REGIONS_MAX  # sums of lanes, in slots
FOLDS_MAX = LANES_MAX + 2
assert FOLDS + FOLDS_MAX < 8192, "the words stay in the first quarter of the head"

# Texts of the head, in bytes.
PLACE_TEXT, PLACE_TEXT_BYTES = 65536, 1024  # by parity
FAILURE_TEXT, FAILURE_TEXT_BYTES = 131072, 65536
CONDITIONS_TEXT, CONDITIONS_TEXT_BYTES = 196608, 8192

# Sections of data.
RECORD_DATA, FOLD_DATA, STATE_DATA, HISTORY_DATA, LOOKS_DATA = range(1, 6)
_RESULT_DATA, _BUFFER_DATA = 6, 8  # by parity: what one tick lays out must not reach the other's


def record_word(tick: int, lane: int) -> int:
    return RECORDS + (tick & 1) * LANES_MAX + lane


def result_data(tick: int) -> int:
    """The section of the sums of regions."""
    return _RESULT_DATA + (tick & 1)


def buffer_data(tick: int) -> int:
    """The section of the buffers after lane 0."""
    return _BUFFER_DATA + (tick & 1)


def region_word(tick: int, region: int) -> int:
    return REGIONS + (tick & 1) * REGIONS_MAX + region


def node_key(tick: int, lo: int, hi: int) -> int:
    """The word of a slot: it holds the sum of lanes [lo, hi) of a tick."""
    return tick << 24 | lo << 12 | hi


def node_of(word: int) -> tuple[int, int, int]:
    """Tick and lanes of a slot."""
    return word >> 24, word >> 12 & 0xFFF, word & 0xFFF


def task_key(tick: int, is_region: bool, index: int) -> int:
    return tick << 16 | is_region << 15 | index + 1


def task_of(word: int) -> tuple[int, bool, int]:
    return word >> 16, bool(word >> 15 & 1), (word & 0x7FFF) - 1


def asker_key(number: int, request: int) -> int:
    """The word that says for whose request, and which, a state is."""
    return number + 1 << 32 | request


def asker_of(word: int) -> tuple[int, int]:
    return (word >> 32) - 1, word & 0xFFFFFFFF


def hash24(text: str) -> int:
    return zlib.crc32(text.encode()) & 0xFFFFFF
