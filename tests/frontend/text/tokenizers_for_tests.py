"""Small tokenizers of both kinds, written as the files that checkpoints have."""

from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

TEXT = [
    "the quick brown fox jumps over 漢字かな交じり文 and 😀🎉 emoji, 한국어 too",
    "naïve café — “quotes”",
] * 20
CONTROL = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<\uff5ctool\u2581call\u2581begin\uff5c>")


def byte_level(folder: Path) -> Tokenizer:
    """Byte-level BPE with special tokens and spelled-out added ones."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in CONTROL])
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer


def sentencepiece(folder: Path) -> Tokenizer:
    """BPE with byte fallback, as Llama and Mixtral have it."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256))]
    pieces += ["\u2581", "a", "b", "\u2581a", "\u2581b", "é", "漢", "\u2581\u2581"]
    tokenizer = Tokenizer(
        models.BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=[], byte_fallback=True)
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer
