"""Small tokenizers, made by the package `tokenizers` itself."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

END = "<|endoftext|>"
TEXT = "the cat sat on the mat, and the dog sat on the log. "


def save_tokenizer(folder: Path, end: bool = True) -> Path:
    """A byte-level BPE of 300 tokens, as GPT-2 has it, and the file that says what ends a text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT * 10], trainer)
    tokenizer.enable_truncation(5)  # of no concern here
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    if end:
        (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": END}}))
    return folder / "tokenizer.json"
