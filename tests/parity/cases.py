"""The trainings that are compared: which model, how a step is made, with which options.

A case is a name and the plain values behind it. Its oracles are the naive twin, always, and torch's
class wherever torch does the same thing at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from tests.parity.models import MODELS
from tests.parity.training import SCHEDULES, TORCH_DOES_NOT_SYNCHRONISE

Options = Mapping[str, Any]
NO_OPTIONS: Options = {}


@dataclass(frozen=True)
class Case:
    """One training. `options` go to torch's class and to ours, `torch_options` to torch's only."""

    model: str
    schedule: str = "plain"
    optimizer: str = "sgd"
    average: str = "mean"  # "mean", "sum" or "weighted"
    label: str = ""  # names the options
    options: Options = field(default_factory=dict)
    torch_options: Options = field(default_factory=dict)
    module_options: Callable[[nn.Module], Options] = lambda module: NO_OPTIONS
    set_to_none: bool = True
    torch_can: bool = True

    @property
    def name(self) -> str:
        parts = [self.model, self.schedule, self.optimizer, self.average, self.label]
        return "-".join(part for part in parts if part)

    def is_exact(self, size: int) -> bool:
        """Whether our results and those of the oracles must be the same bits.

        A rank that trains alone exchanges nothing, so it adds (a + b) + c like any backward; the
        twin adds a + (b + c), since only b and c are new.
        """
        alone = size == 1 and self.average != "mean" and self.schedule == "synced_local_synced"
        return size <= 2 and not alone

    @property
    def torch_is_oracle(self) -> bool:
        synchronises = self.schedule not in TORCH_DOES_NOT_SYNCHRONISE
        return self.torch_can and synchronises and self.average == "mean"


def _delay_last_layer(module: nn.Module) -> Options:
    """Take the last layer out of the buckets; it is exchanged when the first has its gradient."""
    named = dict(module.named_parameters())
    delayed = [(name, named[name]) for name in ("4.weight", "4.bias")]
    return {
        "delay_all_reduce_named_params": delayed,
        "param_to_hook_all_reduce": named["0.weight"],
    }


FIND = {"find_unused_parameters": True}
TINY_MB = 0.0002  # 209 bytes: several buckets in every model, most of them of one parameter
_FEW = ("mlp", "branches", "sparse", "mixed")
_SINGLE = ("dropped", "peeked")  # of these one model says enough
_UNUSED = ("branches", "branches_fixed", "branches_wide", "branches_bfloat16")


def _case(model: str, schedule: str, optimizer: str, average: str = "mean", **more: Any) -> Case:
    """Sparse gradients get an optimizer that takes them; torch is told of unused parameters."""
    if model == "sparse":
        optimizer = "sgd_plain"
    if model in _UNUSED:
        more.setdefault("torch_options", FIND)
        # torch's class looks for unused parameters in the graph of the last forward only.
        more.setdefault("torch_can", schedule != "summed")
    return Case(model, schedule, optimizer, average, **more)


def _common(model: str, schedules: tuple[str, ...]) -> tuple[str, ...]:
    """The schedules a model goes through: all for a few, these for the others."""
    return tuple(s for s in SCHEDULES if s not in _SINGLE) if model in _FEW else schedules


def _models() -> Iterator[Case]:
    """Every model, with both optimizers."""
    for model in MODELS:
        for optimizer in ("sgd", "adamw"):
            yield _case(model, "plain", optimizer)


def _schedules() -> Iterator[Case]:
    """Every model with the schedules that matter most, a few with all; the optimizers in turn."""
    for i, model in enumerate(MODELS):
        for j, schedule in enumerate(SCHEDULES):
            if schedule in _common(model, ("no_sync", "two_pairs", "two_forwards")):
                yield _case(model, schedule, ("sgd", "adamw")[(i + j) % 2])


_VIEWS = {"gradient_as_bucket_view": True}
_TINY = {"bucket_cap_mb": TINY_MB}
_STATIC = {"static_graph": True}
_OPTIONS: dict[str, tuple[Options, str]] = {
    "views": (_VIEWS, "mlp wide conv channels_last transformer tied mixed complex"),
    "tiny": (_TINY, "mlp wide channels_last mixed branches sparse"),
    "tiny_views": (
        _TINY | _VIEWS,
        "mlp wide conv channels_last transformer tied mixed complex sparse",
    ),
    "static": (_STATIC, "mlp conv tied sparse"),
    "static_tiny_views": (_STATIC | _TINY | _VIEWS, "mlp channels_last complex"),
    "one_mb": ({"bucket_cap_mb": 1}, "mlp"),
    "batched": ({"batched_grad_copy": True}, "wide mixed"),
    "find": (FIND, "mlp transformer"),
    "find_views": (FIND | _VIEWS, "branches branches_wide mixed"),
    "find_tiny_views": (FIND | _TINY | _VIEWS, "branches mlp tied sparse"),
}


def _options() -> Iterator[Case]:
    """Every option that moves gradients differently and must not change them."""
    for label, (options, models) in _OPTIONS.items():
        for model in models.split():
            yield _case(model, "plain", "adamw", label=label, options=options)
    for label in ("views", "tiny", "tiny_views"):
        options = _OPTIONS[label][0]
        for schedule in ("no_sync", "two_pairs", "synced_local_synced"):
            yield _case("mlp", schedule, "sgd", label=label, options=options)
            yield _case("branches", schedule, "adamw", label=label, options=options)


def _single() -> Iterator[Case]:
    """Cases that stand for themselves."""
    for schedule in _SINGLE:
        yield _case("mlp", schedule, "sgd")
    yield _case("branches_fixed", "plain", "sgd", label="static", options=_STATIC, torch_options={})
    # torch's class asserts when the first backward of a static graph is a local one.
    yield _case("mlp", "no_sync", "sgd", label="static", options=_STATIC, torch_can=False)
    yield _case("conv", "plain", "sgd", label="no_buffers", options={"forward_sync_buffers": False})
    caps = {"bucket_cap_mb_list": [0.0005, 0.0001]}
    yield _case("mlp", "plain", "sgd", label="cap_list", options=caps)
    # torch's class starts the exchange of delayed parameters, and on a CPU nobody waits for it.
    delayed: dict[str, Any] = {"module_options": _delay_last_layer, "torch_can": False}
    yield _case("mlp", "plain", "sgd", label="delayed", **delayed)
    for model in ("mlp", "branches", "branches_fixed", "conv", "mixed"):
        for schedule in ("plain", "two_pairs"):
            yield _case(model, schedule, "sgd", label="zeroed", set_to_none=False)
    for model in ("mlp", "branches"):
        more: dict[str, Any] = {"label": "zeroed_views", "options": _VIEWS, "set_to_none": False}
        yield _case(model, "two_pairs", "sgd", **more)


def _averages() -> Iterator[Case]:
    """Sums and weighted means: two backwards with most models, what else there is with a few."""
    models = [m for m in MODELS if m not in ("dropout", "channels_last")]
    for average in ("sum", "weighted"):
        for schedule in _SINGLE:
            yield _case("mlp", schedule, "sgd", average)
        for i, model in enumerate(models):
            for j, schedule in enumerate(SCHEDULES):
                if schedule in _common(model, ("plain", "two_pairs", "two_forwards")):
                    yield _case(model, schedule, ("sgd", "adamw")[(i + j) % 2], average)
        for model in ("mlp", "branches"):
            for label, set_to_none in (("tiny_views", True), ("zeroed_tiny_views", False)):
                more: dict[str, Any] = {"label": label, "set_to_none": set_to_none}
                more["options"] = _TINY | _VIEWS
                yield _case(model, "two_pairs", "sgd", average, **more)
                yield _case(model, "two_forwards", "adamw", average, **more)


def _by_name(*groups: Iterator[Case]) -> dict[str, Case]:
    """A case that two groups ask for is run once."""
    return {case.name: case for group in groups for case in group}


MEAN_CASES = _by_name(_models(), _schedules(), _options(), _single())
AVERAGE_CASES = _by_name(_averages())
CASES = MEAN_CASES | AVERAGE_CASES
_FEW_SCHEDULES = ("plain", "no_sync", "two_pairs", "two_forwards")
_FEW_LABELS = ("", "tiny_views", "zeroed_tiny_views", "zeroed_views")


def sized(cases: Mapping[str, Case]) -> list[tuple[int, str]]:
    """Which cases to run with how many ranks: all with two, where results are exact.

    Alone there is next to nothing to exchange, and more ranks cost more and prove less. There each
    model trains once, and a few of them go through what changes what is exchanged.
    """
    pairs = [(2, name) for name in cases]
    for size, few in ((1, _FEW), (3, _FEW), (4, ("mlp", "branches"))):
        for name, case in cases.items():
            chosen = case.model in few and case.schedule in _FEW_SCHEDULES
            once = case.schedule == "plain" and (size < 4 or case.optimizer != "adamw")
            if case.label in _FEW_LABELS and (chosen or once):
                pairs.append((size, name))
    return pairs
