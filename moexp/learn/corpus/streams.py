"""Text a model writes itself: batched sampling of packed chat streams.

A row is a stream: the first words of a question are fed, which steer the kind of text, and the model writes the rest of
the question and the answer. When a script ends the next follows in the same row, so that no row idles.

Shapes: B rows, L tokens a stream, V vocabulary, C candidates a draw.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import resources
from typing import Any

import torch
import torch.nn.functional as F
import yaml
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, StaticCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from moexp.base.errors import MoexpError
from moexp.config.target import CorpusSection

STREAM_ATTENTION = "moexp_stream"
CANDIDATES = 64  # tokens a draw chooses from: the tail of a small model's distribution is noise


@dataclass(frozen=True)
class Part:
    """`given` tokens are fed; then the model writes at most `limit` tokens, or until it ends its turn."""

    given: tuple[int, ...]
    limit: int


Script = tuple[Part, ...]


@dataclass
class Streams:
    """`tokens` int64 [B, L]; `written` bool [B, L]: True where the model itself chose the token."""

    tokens: Tensor
    written: Tensor


def write_streams(
    model: PreTrainedModel,
    scripts: Iterator[Script],
    section: CorpusSection,
    seed: int,
    *,
    stop_ids: frozenset[int],
    end_id: int,
    on_step: Callable[[int], None] = lambda tokens: None,
) -> Streams:
    """Samples the section's `rows` packed streams of `length` tokens from `model`.

    Args:
        stop_ids: tokens that end a turn when the model writes one.
        end_id: fed where a turn is cut off by its limit.
        on_step: called with the number of tokens so far.
    """
    rows, length = section.rows, section.length
    generator = torch.Generator().manual_seed(seed)
    temperature_B = torch.tensor([section.temperatures[row % len(section.temperatures)] for row in range(rows)])
    writers = [_Writer(scripts, stop_ids, end_id) for _ in range(rows)]
    tokens_BL = torch.zeros(rows, length, dtype=torch.long)
    written_BL = torch.zeros(rows, length, dtype=torch.bool)
    cache = StaticCache(config=model.config, max_cache_len=length)
    sampled = [0] * rows
    with torch.no_grad(), _stream_attention(model):
        for position in range(length):
            chosen = [writer.next_token(sampled[row]) for row, writer in enumerate(writers)]
            tokens_BL[:, position] = torch.tensor([token for token, _ in chosen])
            written_BL[:, position] = torch.tensor([own for _, own in chosen])
            on_step(rows * (position + 1))
            if position + 1 < length:
                logits_BV = model(
                    input_ids=tokens_BL[:, position : position + 1].to(model.device),
                    cache=cache,
                    position_ids=torch.full((rows, 1), position, device=model.device),
                ).logits[:, -1]
                sampled = _sample(logits_BV, temperature_B, generator).tolist()
    return Streams(tokens=tokens_BL, written=written_BL)


@contextmanager
def _stream_attention(model: PreTrainedModel) -> Iterator[None]:
    """Inside, the model attends as `_attend_one` does; afterwards as before."""
    before = model.config._attn_implementation
    if STREAM_ATTENTION not in ALL_ATTENTION_FUNCTIONS.valid_keys():
        ALL_ATTENTION_FUNCTIONS.register(STREAM_ATTENTION, _attend_one)
    model.set_attn_implementation(STREAM_ATTENTION)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def _attend_one(
    _module: nn.Module,
    query_BN1D: Tensor,
    key_BMLD: Tensor,
    value_BMLD: Tensor,
    _mask: Tensor | None,
    scaling: float | None = None,
    *,
    position_ids: Tensor,
    **ignored: object,
) -> tuple[Tensor, None]:
    """One query a row, all at one position: no mask or padded keys; a group's query heads read each key once."""
    rows, heads, _, dim = query_BN1D.shape
    length = int(position_ids[0, 0]) + 1
    mixed_BMGD = F.scaled_dot_product_attention(
        query_BN1D.view(rows, key_BMLD.shape[1], -1, dim), key_BMLD[:, :, :length], value_BMLD[:, :, :length],
        scale=scaling,
    )  # fmt: skip
    return mixed_BMGD.reshape(rows, 1, heads, -1), None


class _Writer:
    """One row: what to feed next, or how much the model may still write."""

    def __init__(self, scripts: Iterator[Script], stop_ids: frozenset[int], end_id: int) -> None:
        self._scripts, self._stop_ids, self._end_id = scripts, stop_ids, end_id
        self._forced: deque[int] = deque()
        self._parts: deque[Part] = deque()
        self._left = 0
        self._next_part()

    def next_token(self, sampled: int) -> tuple[int, bool]:
        """The row's next token, and whether the model (which proposed `sampled`) chose it."""
        if self._forced:
            return self._forced.popleft(), False
        if self._left <= 0:
            self._next_part()
            return self._end_id, False
        self._left -= 1
        if sampled in self._stop_ids:
            self._next_part()
        return sampled, True

    def _next_part(self) -> None:
        self._left = 0
        while not self._left:  # a part may only be fed (limit 0)
            if not self._parts:
                self._parts.extend(next(self._scripts))
            part = self._parts.popleft()
            self._forced.extend(part.given)
            self._left = part.limit


def _sample(logits_BV: Tensor, temperature_B: Tensor, generator: torch.Generator) -> Tensor:
    """One token a row: a Gumbel draw among the `CANDIDATES` likeliest (temperature 0: the argmax)."""
    scores_BC, ids_BC = logits_BV.topk(CANDIDATES, dim=-1)
    scores_BC, ids_BC = scores_BC.cpu(), ids_BC.cpu()  # where the generator is
    noise_BC = torch.empty_like(scores_BC, dtype=torch.float32).exponential_(generator=generator).log().neg()
    best_B1 = (scores_BC.float() + temperature_B[:, None] * noise_BC).argmax(dim=-1, keepdim=True)
    return ids_BC.gather(1, best_B1).squeeze(1)


_SLOT = "\x00"


def chat_frame(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int], int]:
    """The chat template's tokens before a user's words and after the turn, and its end-of-turn token.

    Raises:
        MoexpError: no chat template, or one that does not end a turn with a special token.
    """
    if tokenizer.chat_template is None:
        raise MoexpError("the tokenizer has no chat template", where=tokenizer.name_or_path)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": _SLOT}], tokenize=False, add_generation_prompt=True
    )
    before, after = str(text).split(_SLOT)
    before_ids = tokenizer.encode(before, add_special_tokens=False)
    end_id, *after_ids = tokenizer.encode(after, add_special_tokens=False)
    if end_id not in tokenizer.all_special_ids:
        raise MoexpError("the chat template ends a turn with ordinary text", where=tokenizer.name_or_path)
    return before_ids, after_ids, end_id


def scripts(tokenizer: PreTrainedTokenizerBase, seed: int) -> Iterator[Script]:
    """Endless scripts, a pure function of the seed: opening words, room for the question's rest and for an answer."""
    text = (resources.files("moexp.data") / "workloads" / "openings.yaml").read_text()
    openings: dict[str, Any] = yaml.safe_load(text)
    before_ids, after_ids, _ = chat_frame(tokenizer)
    joiner_ids = tokenizer.encode("\n", add_special_tokens=False)
    names, kinds = openings["names"], openings["kinds"]
    draw = random.Random(seed)
    while True:
        kind = draw.choices(list(kinds), weights=[kinds[name]["weight"] for name in kinds])[0]
        words = draw.choice(kinds[kind]["openings"]).format(name=draw.choice(names), number=draw.randint(2, 200))
        opening_ids = tokenizer.encode(words, add_special_tokens=False) if words else []
        yield (
            Part((*before_ids, *opening_ids), kinds[kind]["question_tokens"]),
            Part(tuple(after_ids), openings["answer_tokens"]),
            Part(tuple(joiner_ids), 0),
        )
