"""The bucket plan, for any parameters, caps and order of readiness.

Together the properties leave no freedom: a plan that has them all is the plan.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from closeranks.reducer.plan import BucketPlan, ParameterSpec, make_plan

_ITEMSIZES = {"torch.float32": 4, "torch.bfloat16": 2, "torch.complex128": 16}


@dataclass(frozen=True)
class Input:
    """What a plan is made from."""

    parameters: tuple[ParameterSpec, ...]
    caps_bytes: tuple[int, ...]
    order: tuple[int, ...] | None

    def plan(self) -> tuple[BucketPlan, ...]:
        return make_plan(self.parameters, self.caps_bytes, self.order)

    @property
    def positions(self) -> dict[int, int]:
        """When each parameter's gradient becomes ready."""
        order = self.order
        if order is None:
            order = tuple(p.index for p in reversed(self.parameters))
        return {index: position for position, index in enumerate(order)}

    def kind(self, bucket: BucketPlan) -> tuple[str, str]:
        first = self.parameters[bucket.indices[0]]
        return first.dtype, first.device

    def size_bytes(self, indices: Sequence[int]) -> int:
        return sum(self.parameters[i].numel * self.parameters[i].itemsize for i in indices)

    def dense_by_kind(self) -> dict[tuple[str, str], list[BucketPlan]]:
        """The dense buckets of the plan, by kind, in launch order."""
        found: dict[tuple[str, str], list[BucketPlan]] = {}
        for bucket in self.plan():
            if not self.parameters[bucket.indices[0]].sparse:
                found.setdefault(self.kind(bucket), []).append(bucket)
        return found


@st.composite
def inputs(draw: st.DrawFn) -> Input:
    """Few kinds and small caps, so that buckets close often; empty parameters occur too."""
    count = draw(st.integers(0, 20))
    parameters = []
    for index in range(count):
        dtype = draw(st.sampled_from(sorted(_ITEMSIZES)))
        parameters.append(
            ParameterSpec(
                index=index,
                numel=draw(st.integers(0, 40)),
                itemsize=_ITEMSIZES[dtype],
                dtype=dtype,
                device=draw(st.sampled_from(["cpu", "cuda:0"])),
                sparse=draw(st.booleans()) and draw(st.booleans()),
            )
        )
    caps_bytes = draw(st.lists(st.integers(1, 400), min_size=1, max_size=4))
    order = draw(st.none() | st.permutations(range(count)))
    return Input(tuple(parameters), tuple(caps_bytes), None if order is None else tuple(order))


def for_any_input(test: Callable[[Input], None]) -> Callable[[], None]:
    """No deadline: what a slow machine takes longer for is not wrong."""
    return settings(deadline=None)(given(inputs())(test))


@for_any_input
def test_every_parameter_is_planned_once(given_input: Input) -> None:
    planned = [index for bucket in given_input.plan() for index in bucket.indices]
    assert sorted(planned) == list(range(len(given_input.parameters)))


@for_any_input
def test_no_bucket_is_empty(given_input: Input) -> None:
    assert all(bucket.indices for bucket in given_input.plan())


@for_any_input
def test_dtypes_and_devices_are_not_mixed(given_input: Input) -> None:
    for bucket in given_input.plan():
        kinds = {given_input.kind(BucketPlan((i,), 1)) for i in bucket.indices}
        assert len(kinds) == 1


@for_any_input
def test_a_sparse_parameter_is_alone(given_input: Input) -> None:
    for bucket in given_input.plan():
        sparse = [given_input.parameters[i].sparse for i in bucket.indices]
        assert not any(sparse) or sparse == [True]


@for_any_input
def test_a_cap_is_reached_by_the_last_parameter_only(given_input: Input) -> None:
    for buckets in given_input.dense_by_kind().values():
        for bucket in buckets:
            assert given_input.size_bytes(bucket.indices[:-1]) < bucket.cap_bytes


@for_any_input
def test_all_but_the_last_of_a_kind_are_full(given_input: Input) -> None:
    for buckets in given_input.dense_by_kind().values():
        for bucket in buckets[:-1]:
            assert given_input.size_bytes(bucket.indices) >= bucket.cap_bytes


@for_any_input
def test_the_caps_are_those_given_and_the_last_repeats(given_input: Input) -> None:
    for buckets in given_input.dense_by_kind().values():
        caps = [bucket.cap_bytes for bucket in buckets]
        repeated = given_input.caps_bytes + given_input.caps_bytes[-1:] * len(caps)
        assert caps == list(repeated[: len(caps)])


@for_any_input
def test_within_a_kind_the_order_is_that_of_readiness(given_input: Input) -> None:
    for buckets in given_input.dense_by_kind().values():
        positions = [given_input.positions[i] for bucket in buckets for i in bucket.indices]
        assert positions == sorted(positions)


@for_any_input
def test_buckets_fly_in_the_order_in_which_they_are_complete(given_input: Input) -> None:
    completed = [given_input.positions[bucket.indices[-1]] for bucket in given_input.plan()]
    assert completed == sorted(completed)


@for_any_input
def test_the_same_input_gives_the_same_plan(given_input: Input) -> None:
    first = given_input.plan()
    as_lists = make_plan(
        list(given_input.parameters),
        list(given_input.caps_bytes),
        None if given_input.order is None else list(given_input.order),
    )
    assert given_input.plan() == first == as_lists


@for_any_input
def test_without_an_order_it_is_the_reverse_of_registration(given_input: Input) -> None:
    reverse = range(len(given_input.parameters))[::-1]
    explicit = make_plan(given_input.parameters, given_input.caps_bytes, reverse)
    assert make_plan(given_input.parameters, given_input.caps_bytes) == explicit


def _float32(*numels: int) -> list[ParameterSpec]:
    return [ParameterSpec(i, n, 4, "torch.float32", "cpu", False) for i, n in enumerate(numels)]


@pytest.mark.parametrize(
    ("numels", "caps_bytes", "buckets"),
    [
        ((), (4,), []),
        ((10, 10, 10), (1000,), [(2, 1, 0)]),
        ((10, 10, 10), (40,), [(2,), (1,), (0,)]),  # reaching the cap closes a bucket
        ((10, 10, 10), (41,), [(2, 1), (0,)]),
        ((1, 1, 100, 1, 1), (8,), [(4, 3), (2,), (1, 0)]),
        ((1, 1, 100, 1, 1), (12,), [(4, 3, 2), (1, 0)]),  # never split, so it exceeds
        ((1, 1, 1, 1, 1), (4, 8), [(4,), (3, 2), (1, 0)]),
    ],
)
def test_plans_told_by_hand(
    numels: tuple[int, ...], caps_bytes: tuple[int, ...], buckets: list[tuple[int, ...]]
) -> None:
    assert [b.indices for b in make_plan(_float32(*numels), caps_bytes)] == buckets


@pytest.mark.parametrize("order", [(0, 1), (0, 1, 1), (0, 1, 2, 3), ()])
def test_an_order_of_other_parameters_is_refused(order: tuple[int, ...]) -> None:
    with pytest.raises(AssertionError, match="names every parameter exactly once"):
        make_plan(_float32(1, 1, 1), (4,), order)


_PRINT_A_PLAN = """
from closeranks.reducer.plan import ParameterSpec, make_plan
kinds = [(dtype, device) for dtype in ("a", "b", "c") for device in ("x", "y", "z")]
parameters = [ParameterSpec(i, 3, 4, *kinds[i * 7 % 9], i % 11 == 0) for i in range(60)]
print(make_plan(parameters, [20, 40]))
"""


def test_the_plan_does_not_depend_on_the_seed_of_hashes() -> None:
    """Ranks are processes of their own; nothing of one interpreter may leak into its plan."""
    plans = set()
    for seed in ("1", "2", "3"):
        done = subprocess.run(
            [sys.executable, "-c", _PRINT_A_PLAN],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        plans.add(done.stdout)
    assert len(plans) == 1 and "BucketPlan" in plans.pop()
