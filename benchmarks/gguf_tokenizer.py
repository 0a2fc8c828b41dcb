"""The tokenizer of a GGUF file whose vocabulary was made by SentencePiece's BPE, as Gemma's and Llama-2's are.

Such a file holds pieces and scores, and no merges: a piece's score says when it is merged. transformers reads the same
fields as a unigram model, under which "▁capital" becomes "▁c", "ap", "it", "al": text that the model was never trained
on. Here each piece gives the merges that lead to it, in the order of the scores, which is what SentencePiece does.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

NORMAL, USER_DEFINED = 1, 4
"""Types of pieces in GGUF (`tokenizer.ggml.token_type`) that text is made of. User-defined ones, runs of spaces or line
breaks, come before all others; the rest are bytes and control tokens."""


def merges_of(tokens: list[str], scores: list[float], types: list[int]) -> list[tuple[str, str]]:
    """All pairs of pieces that make a piece: user-defined ones in their order, then by falling score of the result."""
    pieces = {token: number for number, token in enumerate(tokens) if types[number] in (NORMAL, USER_DEFINED)}
    found: list[tuple[bool, float, int, int, str, str]] = []
    for piece, number in pieces.items():
        plain = types[number] == NORMAL
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in pieces and right in pieces:
                order = -scores[number] if plain else float(number)
                found.append((plain, order, pieces[left], pieces[right], left, right))
    return [(left, right) for *_, left, right in sorted(found)]


def sentencepiece_tokenizer(gguf: Path) -> Any:
    """A fast tokenizer of transformers; texts begin with the file's beginning-of-sequence token.

    Raises:
        ValueError: the file's vocabulary is of another kind.
    """
    from gguf import GGUFReader
    from tokenizers import Tokenizer, decoders, models, normalizers, processors
    from transformers import PreTrainedTokenizerFast

    fields = GGUFReader(str(gguf)).fields

    def read(name: str) -> Any:
        return fields[f"tokenizer.ggml.{name}"].contents()

    if read("model") != "llama":
        raise ValueError(f"{gguf}: a vocabulary of kind {read('model')!r}; wanted SentencePiece's, 'llama'")
    scores, types = read("scores"), read("token_type")
    # a run of spaces is written as it is, unlike the spaces of all other pieces
    tokens = [t.replace(" ", "▁") if k == USER_DEFINED else t for t, k in zip(read("tokens"), types, strict=True)]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    unknown = tokens[read("unknown_token_id")] if "tokenizer.ggml.unknown_token_id" in fields else "<unk>"
    model = models.BPE(
        vocabulary, merges_of(tokens, scores, types), unk_token=unknown, fuse_unk=True, byte_fallback=True
    )
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    begin = tokens[read("bos_token_id")]
    special = [(begin, vocabulary[begin])]
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{begin} $A", special_tokens=special)
    end = tokens[read("eos_token_id")]
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=begin,
        eos_token=end,
        unk_token=unknown,
        clean_up_tokenization_spaces=False,
    )
