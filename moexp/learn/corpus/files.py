"""Corpora on disk: rows of token ids in Parquet, whose metadata name author and tokenizer (another one is refused)."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from moexp.base import ranks
from moexp.base.atomic import new_folder
from moexp.base.errors import MoexpError
from moexp.base.progress import stage
from moexp.config.target import CorpusSection
from moexp.learn.corpus.streams import chat_frame, scripts, write_streams


def tokenizer_id(tokenizer: PreTrainedTokenizerBase) -> str:
    """A short hash of the vocabulary: token ids mean the same for equal ids."""
    items = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    return hashlib.sha256(repr(items).encode()).hexdigest()[:16]


def save_rows(file: Path, rows_NL: Tensor, tokenizer: PreTrainedTokenizerBase, author: str) -> None:
    """Writes rows of token ids as one Parquet file (zstd)."""
    ids = pa.array(rows_NL.numpy().astype(np.uint16 if len(tokenizer) <= 1 << 16 else np.uint32).ravel())
    column = pa.FixedSizeListArray.from_arrays(ids, rows_NL.shape[1])
    metadata = {"tokenizer": tokenizer_id(tokenizer), "author": author}
    table = pa.table({"tokens": column}).replace_schema_metadata(metadata)
    pq.write_table(table, file, compression="zstd", compression_level=19)


def load_rows(file: Path, tokenizer: PreTrainedTokenizerBase) -> Tensor:
    """Rows of token ids, int32 [N, L].

    Raises:
        MoexpError: not a corpus, or one of another tokenizer.
    """
    try:
        table = pq.read_table(file)
        metadata = {key.decode(): value.decode() for key, value in (table.schema.metadata or {}).items()}
        column = table.column("tokens").combine_chunks()
    except (OSError, pa.ArrowInvalid, KeyError) as error:
        raise MoexpError(f"not a corpus: {str(error).splitlines()[0]}", where=str(file)) from error
    if metadata.get("tokenizer") != tokenizer_id(tokenizer):
        raise MoexpError("a corpus of another tokenizer", where=str(file), valid=f"tokenizer {tokenizer_id(tokenizer)}")
    values = column.flatten().to_numpy(zero_copy_only=False).astype(np.int32)
    return torch.from_numpy(values.reshape(len(table), -1))


def shipped_corpora(author: str) -> list[Path]:
    """Corpora in the package by this author (`dense` or `target`)."""
    folder = Path(str(resources.files("moexp.data") / "corpora"))
    return sorted(folder.glob(f"{author}-*.parquet"))


@dataclass(frozen=True)
class Author:
    """A model that writes a corpus, named `dense` or `target`. Reading needs no model."""

    name: str
    model: PreTrainedModel | None
    tokenizer: PreTrainedTokenizerBase


def corpus_rows(section: CorpusSection, author: Author, folder: Path, seed: int) -> Tensor:
    """The rows to train on, int32 [N, L], at most `section.tokens` tokens: those shipped, or written into `folder`."""
    if section.source == "shipped":
        files = shipped_corpora(author.name)
        if not files:
            raise MoexpError(f"no corpus by {author.name} is shipped", where="corpus.source", valid="source: write")
    else:
        files = write_corpus(section, author, folder, seed)
    rows_NL = torch.cat([load_rows(file, author.tokenizer) for file in files])
    order = torch.randperm(len(rows_NL), generator=torch.Generator().manual_seed(seed))
    return rows_NL[order][: max(1, section.tokens // rows_NL.shape[1])]


def write_corpus(section: CorpusSection, author: Author, folder: Path, seed: int) -> list[Path]:
    """Lets the author write `section.tokens` tokens into `folder`, but for finished batches; gives all batches' files.

    Each batch has a subfolder and depends on section and seed alone. Processes take batches in turn.
    """
    per_batch = section.rows * section.length
    batches = -(-section.tokens // per_batch)
    files = [folder / f"{batch:03d}" / "rows.parquet" for batch in range(batches)]
    model, tokenizer = author.model, author.tokenizer
    assert model is not None
    _, _, end_id = chat_frame(tokenizer)
    stop_ids = frozenset({end_id, *tokenizer.all_special_ids})
    with stage(f"Text by the {author.name} model", batches * per_batch) as advance:
        for batch in range(ranks.rank(), batches, ranks.world()):
            if files[batch].parent.exists():
                continue

            def on_step(done: int, batch: int = batch) -> None:
                advance(batch * per_batch + done)

            own_seed = seed * 1000 + batch
            lines = scripts(tokenizer, own_seed)
            streams = write_streams(model, lines, section, own_seed, stop_ids=stop_ids, end_id=end_id, on_step=on_step)
            with new_folder(files[batch].parent) as into:
                save_rows(into / files[batch].name, streams.tokens, tokenizer, author.name)
        ranks.barrier()
    return files
