"""A checkpoint's tokenizer, without running a line of its code.

Moonlight and Kimi publish a `tiktoken.model` (base64 token and rank a line) and Python that reads it. The same
byte-pair encoding is built here from the ranks, with transformers' own converter.
"""

from __future__ import annotations

import base64
import binascii
import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import TikTokenConverter

from moexp.base.errors import MoexpError

TIKTOKEN = "tiktoken.model"

_LETTERS = r"[^\r\n\p{L}\p{N}]?"
_UPPER, _LOWER = (rf"[\p{{{case}}}\p{{Lm}}\p{{Lo}}\p{{M}}&&[^\p{{Han}}]]" for case in (r"Lu}\p{Lt", "Ll"))
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
KIMI_PATTERN = "|".join(
    (
        r"[\p{Han}]+",
        f"{_LETTERS}{_UPPER}*{_LOWER}+{_CONTRACTION}",
        f"{_LETTERS}{_UPPER}+{_LOWER}*{_CONTRACTION}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
"""How Moonlight and Kimi cut text before merging: runs of Chinese characters apart, words by case, numbers by three."""

KIMI_RESERVED = 258
"""Ids behind the ranks that are special tokens; those without a name of their own are `<|reserved_token_ID|>`."""


def load_tokenizer(folder: Path | str) -> PreTrainedTokenizerBase:
    """The tokenizer of a checkpoint folder.

    Raises:
        MoexpError: there is none, or it needs code of the checkpoint's own.
    """
    folder = Path(folder)
    if (folder / TIKTOKEN).is_file() and not (folder / "tokenizer.json").is_file():
        return _from_tiktoken(folder)
    try:
        if "auto_map" in _read_config(folder, missing={}) and (folder / "tokenizer.json").is_file():
            return PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, ImportError) as error:
        raise MoexpError(
            f"unreadable tokenizer: {str(error).strip().splitlines()[0]}",
            where=str(folder),
            valid=f"tokenizer.json, tokenizer.model, or {TIKTOKEN}; code in a checkpoint is never run",
        ) from error
    loaded: PreTrainedTokenizerBase = tokenizer
    return loaded


def _from_tiktoken(folder: Path) -> PreTrainedTokenizerFast:
    config = _read_config(folder)
    ranks = read_ranks(folder / TIKTOKEN)
    named = {int(number): str(entry["content"]) for number, entry in config.get("added_tokens_decoder", {}).items()}
    first = len(ranks)
    count = max([KIMI_RESERVED, *(number - first + 1 for number in named)])
    specials = [named.get(number, f"<|reserved_token_{number}|>") for number in range(first, first + count)]
    roles = {
        role: _text(config[role]) for role in ("bos_token", "eos_token", "unk_token", "pad_token") if config.get(role)
    }
    unknown = sorted(set(roles.values()) - set(specials))
    if unknown:
        raise MoexpError(f"{unknown[0]!r} has no id", where=str(folder), valid="an entry in added_tokens_decoder")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=_byte_pairs(ranks, specials),
        additional_special_tokens=[_text(token) for token in config.get("additional_special_tokens") or ()],
        clean_up_tokenization_spaces=False,
        **roles,
    )
    template = folder / "chat_template.jinja"
    tokenizer.chat_template = template.read_text() if template.is_file() else config.get("chat_template")
    return tokenizer


def _byte_pairs(ranks: dict[bytes, int], specials: list[str]) -> Tokenizer:
    class Converter(TikTokenConverter):
        @staticmethod
        def load_tiktoken_bpe(tiktoken_url: str) -> dict[bytes, int]:
            return ranks

    tokenizer: Tokenizer = Converter(vocab_file=TIKTOKEN, pattern=KIMI_PATTERN).converted()
    # In order: each takes the next id behind the ranks.
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in specials])
    return tokenizer


def read_ranks(file: Path) -> dict[bytes, int]:
    """token -> rank of a tiktoken file.

    Raises:
        MoexpError: a line that is no token and rank, or ranks that are not 0, 1, 2 and so on.
    """
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(file.read_bytes().splitlines(), start=1):
        if not line:
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error) as error:
            raise MoexpError(f"line {number} is no token and rank", where=str(file)) from error
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise MoexpError("ranks have gaps or occur twice", where=str(file), valid="0, 1, 2 and so on, each once")
    return ranks


def _read_config(folder: Path, missing: dict[str, Any] | None = None) -> dict[str, Any]:
    file = folder / "tokenizer_config.json"
    if missing is not None and not file.is_file():
        return missing
    try:
        config: dict[str, Any] = json.loads(file.read_text())
        config.get("added_tokens_decoder")
    except (OSError, ValueError, AttributeError) as error:
        raise MoexpError("no readable tokenizer_config.json", where=str(folder)) from error
    return config


def _text(token: Any) -> str:
    """Special tokens are strings, or objects with a content."""
    return str(token["content"] if isinstance(token, dict) else token)
