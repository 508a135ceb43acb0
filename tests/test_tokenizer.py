"""Moonlight's tokenizer: tiktoken ranks become the same byte-pair encoding, and the checkpoint's code is never run."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest
import regex
from hypothesis import given
from hypothesis import strategies as st

from moexp.base.errors import MoexpError
from moexp.target.load import load_target
from moexp.target.tiny import TinyTarget, build_tiny_target, byte_tokenizer
from moexp.target.tokenizer import KIMI_PATTERN, KIMI_RESERVED, load_tokenizer, read_ranks
from tests.family_files import edit_config

# Pairs that meet in words, in other scripts, over the bounds of words, and inside what a digit group cuts.
MERGES = [
    "th",
    "the",
    "in",
    "ing",
    " t",
    " the",
    "He",
    "ll",
    "o W",
    "Hell",
    "Hello",
    "  ",
    "   ",
    "\n\n",
    " \n",
    "'s",
] + ["12", "23", "123", "1234", "ab", "bc", "abc", "\u4f60", "\u597d", "\u4f60\u597d", "\xe9", "\u4f60a", "AB", "ABc"]
SPECIALS = {
    0: "[BOS]",
    1: "[EOS]",
    2: "<|im_end|>",
    3: "<|im_user|>",
    4: "<|im_assistant|>",
    10: "<|im_system|>",
    17: "<|im_middle|>",
    254: "[UNK]",
    255: "[PAD]",
}
TEMPLATE = "{% for m in messages %}<|im_user|>{{ m['content'] }}<|im_end|>{% endfor %}<|im_assistant|>"


def ranks() -> dict[bytes, int]:
    """All bytes (not in their order), then tokens that are each the sum of two before."""
    tokens = [bytes([(7 * byte + 13) % 256]) for byte in range(256)]
    for text in MERGES:
        whole = text.encode()
        for end in range(2, len(whole) + 1):
            if whole[:end] not in tokens:
                tokens.append(whole[:end])
    return {token: rank for rank, token in enumerate(tokens)}


RANKS = ranks()


def write_tokenizer(folder: Path) -> Path:
    """As Moonlight's repository has it; its code does harm if it is imported."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [base64.b64encode(token) + b" %d" % rank for token, rank in RANKS.items()]
    (folder / "tiktoken.model").write_bytes(b"\n".join(lines) + b"\n")
    (folder / "tokenization_moonshot.py").write_text("raise SystemExit('code of a checkpoint was run')\n")
    named = {len(RANKS) + place: {"content": token, "special": True} for place, token in SPECIALS.items()}
    config = {
        "added_tokens_decoder": named,
        "additional_special_tokens": ["<|im_end|>", "<|im_user|>", "<|im_assistant|>"],
        "auto_map": {"AutoTokenizer": ["tokenization_moonshot.TikTokenTokenizer", None]},
        "bos_token": "[BOS]",
        "eos_token": "[EOS]",
        "unk_token": {"content": "[UNK]"},
        "pad_token": "[PAD]",
        "tokenizer_class": "TikTokenTokenizer",
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load_tokenizer(write_tokenizer(tmp_path_factory.mktemp("moonlight")))


def encode_by_ranks(text: str) -> list[int]:
    """What tiktoken defines: cut by the pattern, then merge the pair of lowest rank until there is none."""
    ids = []
    for word in regex.findall("(?V1)" + KIMI_PATTERN, text):
        whole = word.encode()
        parts = [whole] if whole in RANKS else [bytes([byte]) for byte in whole]
        while len(parts) > 1:
            pairs = [RANKS.get(first + second, len(RANKS)) for first, second in zip(parts, parts[1:], strict=False)]
            best = min(range(len(pairs)), key=pairs.__getitem__)
            if pairs[best] == len(RANKS):
                break
            parts[best : best + 2] = [parts[best] + parts[best + 1]]
        ids += [RANKS[part] for part in parts]
    return ids


EXAMPLES = [
    "Hello WORLD's thing, don't you think?",
    "the  the\n\n  the \n",
    "\u4f60\u597dabc \u4f60a 12345",
    "ABcABC abcAB caf\xe9 12 123 1234",
]


@pytest.mark.parametrize("text", EXAMPLES)
def test_ids_are_tiktokens(tokenizer, text):
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert ids == encode_by_ranks(text)
    assert any(token >= 256 for token in ids)
    assert tokenizer.decode(ids) == text


@given(st.text(st.sampled_from("theinglo WH's12345\n\u4f60\u597d\xe9abcAB \t.,'"), max_size=40))
def test_ids_are_tiktokens_for_any_text(tokenizer, text):
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert ids == encode_by_ranks(text)
    assert tokenizer.decode(ids) == text


def test_special_tokens_have_the_ids_of_the_config(tokenizer):
    first = len(RANKS)
    for place, token in SPECIALS.items():
        assert tokenizer.convert_tokens_to_ids(token) == first + place
    assert tokenizer.convert_tokens_to_ids(f"<|reserved_token_{first + 5}|>") == first + 5
    assert len(tokenizer) == first + KIMI_RESERVED
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (first, first + 1)
    assert (tokenizer.unk_token, tokenizer.pad_token) == ("[UNK]", "[PAD]")


def test_a_chat_is_one_token_a_mark(tokenizer):
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "the"}], return_dict=True)["input_ids"]
    first = len(RANKS)
    assert ids == [first + 3, RANKS[b"the"], first + 2, first + 4]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "the"


def test_moonlight_loads_without_its_code(tmp_path):
    folder = build_tiny_target(
        tmp_path / "moonlight", TinyTarget(model_type="deepseek_v3", vocab=len(RANKS) + KIMI_RESERVED)
    )
    for file in folder.glob("tokenizer*"):
        file.unlink()
    write_tokenizer(folder)
    (folder / "modeling_deepseek.py").write_text("raise SystemExit('code of a checkpoint was run')\n")
    auto_map = {"AutoConfig": "modeling_deepseek.Config", "AutoModelForCausalLM": "modeling_deepseek.Model"}
    edit_config(folder, auto_map=auto_map)
    target = load_target(folder)
    assert target.spec.model_type == "deepseek_v3"
    assert target.tokenizer("the").input_ids == [RANKS[b"the"]]


def test_a_converted_tokenizer_beside_the_code_is_taken(tmp_path):
    byte_tokenizer().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config["auto_map"] = {"AutoTokenizer": ["tokenization_moonshot.TikTokenTokenizer", None]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert load_tokenizer(tmp_path)("a").input_ids == byte_tokenizer()("a").input_ids


def test_a_tokenizer_that_is_only_code_is_refused(tmp_path):
    write_tokenizer(tmp_path)
    (tmp_path / "tiktoken.model").unlink()
    with pytest.raises(MoexpError, match="unreadable tokenizer.*never run"):
        load_tokenizer(tmp_path)


def test_no_tokenizer_is_one_clear_error(tmp_path):
    with pytest.raises(MoexpError, match="unreadable tokenizer"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"YQ== 0\nnonsense\n", "line 2 is no token and rank"),
        (b"YQ== 0\n!!!! 1\n", "line 2 is no token and rank"),
        (b"YQ== 0\nYg== 2\n", "gaps or occur twice"),
        (b"YQ== 0\nYg== 0\n", "gaps or occur twice"),
    ],
)
def test_a_damaged_rank_file_is_named(tmp_path, content, message):
    file = tmp_path / "tiktoken.model"
    file.write_bytes(content)
    with pytest.raises(MoexpError, match=message):
        read_ranks(file)


def test_a_role_without_an_id_is_refused(tmp_path):
    write_tokenizer(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token": "<end>"}))
    with pytest.raises(MoexpError, match="'<end>' has no id"):
        load_tokenizer(tmp_path)
