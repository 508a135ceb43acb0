"""What a model is fed while it writes a corpus: the first words of a question; question and answer are its own.

Few words steer the kind of text (problems, code, summaries, instructions, talk); the model supplies variety, in its
own chat format.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from importlib import resources
from typing import Any

import yaml
from transformers import PreTrainedTokenizerBase

from moexp.base.errors import MoexpError
from moexp.learn.corpus.streams import Part, Script

_SLOT = "\x00"


def chat_frame(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int], int]:
    """What the chat template puts before a user's words, after the end of the turn, and the end-of-turn token.

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
    """Endless scripts, a pure function of the seed: opening words, room for the rest of the question, room for an
    answer.
    """
    openings = load_openings()
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


def load_openings() -> dict[str, Any]:
    """The shipped openings: names, kinds with weights, opening words and token limits."""
    text = (resources.files("moexp.data") / "workloads" / "openings.yaml").read_text()
    openings: dict[str, Any] = yaml.safe_load(text)
    return openings
