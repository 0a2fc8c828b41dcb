"""Prompts for the checkpoint beside this file: facts hidden in noise, and one question at the end.

The checkpoint's 512 token ids are not text. A fact is `KEY k VAL v1 v2 v3 v4 SEP`; the prompt ends with
`QUERY k ANS`, and the right continuation is v1 v2 v3 v4.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

BOS, KEY, VAL, QUERY, ANS, SEP = 1, 2, 3, 4, 5, 6
FIRST_NOISE, FIRST_SYMBOL, VOCABULARY = 16, 256, 512
ANSWER_TOKENS = 4
FACT_TOKENS = 8


@dataclass(frozen=True)
class NeedlePrompt:
    """One prompt and what should follow it.

    Attributes:
        ids: (1, tokens) int64. key: the symbol that is asked for. answer: its four values.
        position: index of the fact's first token in the prompt.
    """

    ids: Tensor
    key: int
    answer: list[int]
    position: int


def needle_prompt(tokens: int, facts: int = 16, seed: int = 0) -> NeedlePrompt:
    """A prompt of exactly `tokens` tokens that holds `facts` facts and asks for one of them.

    Raises:
        ValueError: the facts do not fit, or there are more of them than symbols to name them.
    """
    question = 3  # QUERY k ANS
    positions = (tokens - 1 - question) // FACT_TOKENS
    symbols = VOCABULARY - FIRST_SYMBOL
    if not 1 <= facts <= min(positions, symbols):
        raise ValueError(
            f"{facts} facts in {tokens} tokens: wanted 1 to {min(positions, symbols)} "
            f"({positions} positions of {FACT_TOKENS} tokens, {symbols} symbols)"
        )
    random = torch.Generator().manual_seed(seed)
    ids = torch.randint(FIRST_NOISE, FIRST_SYMBOL, (tokens,), generator=random)
    ids[0] = BOS
    keys = FIRST_SYMBOL + torch.randperm(symbols, generator=random)[:facts]
    values = torch.randint(FIRST_SYMBOL, VOCABULARY, (facts, ANSWER_TOKENS), generator=random)
    starts = 1 + FACT_TOKENS * torch.randperm(positions, generator=random)[:facts]
    for key, value, start in zip(keys.tolist(), values.tolist(), starts.tolist(), strict=True):
        ids[start : start + FACT_TOKENS] = torch.tensor([KEY, key, VAL, *value, SEP])
    asked = int(torch.randint(facts, (), generator=random))
    ids[-question:] = torch.tensor([QUERY, int(keys[asked]), ANS])
    return NeedlePrompt(ids[None], int(keys[asked]), values[asked].tolist(), int(starts[asked]))
