"""The second task of the demo: a character GPT learns the source of Python's standard library.

The text is on every machine that runs this. It is cut into windows that do not overlap; the model
guesses each character of a window from those before it.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from closeranks.demo.training import Batch, Task

_ALPHABET = "\n" + "".join(map(chr, range(32, 127)))  # whatever else there is counts as "?"
_CODES = {character: code for code, character in enumerate(_ALPHABET)}
_CHARACTERS_MAX = 2_000_000
_WINDOW = 64
_HELD_OUT_WINDOWS = 256
_HELD_OUT_EVERY = 10  # every tenth file
_WIDTH, _HEADS, _BLOCKS = 128, 4, 3
_STEPS = 350
_PROMPT = "def "


class Windows(Dataset[Batch]):
    """A text as pairs of windows: characters, and the characters after them."""

    def __init__(self, codes: Tensor) -> None:
        self._codes = codes

    def __len__(self) -> int:
        return (len(self._codes) - 1) // _WINDOW

    def __getitem__(self, number: int) -> Batch:
        start = number * _WINDOW
        window = self._codes[start : start + _WINDOW + 1].long()
        return [window[:-1], window[1:]]


class Gpt(nn.Module):
    """A transformer that looks back only."""

    def __init__(self) -> None:
        super().__init__()
        self.characters = nn.Embedding(len(_ALPHABET), _WIDTH)
        self.places = nn.Embedding(_WINDOW, _WIDTH)
        block = nn.TransformerEncoderLayer(
            _WIDTH, _HEADS, 4 * _WIDTH, dropout=0.0, batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(block, _BLOCKS, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(_WIDTH)
        self.guess = nn.Linear(_WIDTH, len(_ALPHABET))
        ahead = nn.Transformer.generate_square_subsequent_mask(_WINDOW)
        self.register_buffer("ahead", ahead, persistent=False)

    def forward(self, codes: Tensor) -> Tensor:
        length = codes.shape[1]
        x = self.characters(codes) + self.places.weight[:length]
        mask = self.get_buffer("ahead")[:length, :length]
        guessed: Tensor = self.guess(self.norm(self.blocks(x, mask=mask, is_causal=True)))
        return guessed


def task(is_quick: bool) -> Task:
    """Every tenth file is held out."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    if not files:
        raise FileNotFoundError(
            f"{sysconfig.get_path('stdlib')} holds no sources: this Python was installed without "
            "them, and the demo's GPT reads them. Nothing is wrong with closeranks; run the demo "
            "with another Python."
        )
    held_out = _read(files[::_HELD_OUT_EVERY], 2 * _HELD_OUT_WINDOWS * _WINDOW)
    train = _read([f for n, f in enumerate(files) if n % _HELD_OUT_EVERY], _CHARACTERS_MAX)
    windows = Windows(held_out)
    judged = [windows[number] for number in range(min(_HELD_OUT_WINDOWS, len(windows)))]
    return Task(
        title="source code, a character GPT",
        model=Gpt(),
        train_set=Windows(train),
        held_out=[torch.stack(each) for each in zip(*judged, strict=True)],
        batch_size=16,
        steps=_STEPS // 10 if is_quick else _STEPS,
        lr=2e-3,
        unit="windows",
        last_words=_continue,
    )


def _read(files: list[Path], characters_max: int) -> Tensor:
    """The codes of these files, at most so many."""
    unknown = _CODES["?"]
    codes: list[int] = []
    for file in files:
        text = file.read_text("utf-8", errors="replace").expandtabs(4)
        codes += [_CODES.get(character, unknown) for character in text]
        if len(codes) >= characters_max:
            break
    return torch.tensor(codes[:characters_max], dtype=torch.uint8)


def _continue(model: nn.Module) -> str:
    """What the model writes after a prompt; the same dice on every rank and in every run."""
    dice = torch.Generator().manual_seed(0)
    codes = [_CODES[character] for character in _PROMPT]
    while len(codes) < 3 * _WINDOW:
        guessed = model(torch.tensor([codes[-_WINDOW:]]))[0, -1]
        chances = (guessed / 0.6).softmax(dim=0)
        codes.append(int(torch.multinomial(chances, 1, generator=dice)))
    text = "".join(_ALPHABET[code] for code in codes)
    return "  it writes:\n" + "\n".join(f"    {line}" for line in text.split("\n"))
