"""A prompt for a model that was given none: plain sentences, and one fact among them that the last line asks for."""

from __future__ import annotations

from collections.abc import Callable

SENTENCES = (
    "The ferry left the harbour a little after seven and met no wind until noon.",
    "Most of the orchard had been picked, and the ladders leaned in a row by the wall.",
    "In the archive the older ledgers stand on the lower shelves, tied with tape.",
    "Rain came over the ridge in the afternoon and was gone before the shops closed.",
    "Nobody could say who had painted the bridge, but it had been done with care.",
    "The train to the coast takes the longer line on Sundays and stops at every village.",
)
FACT = "The code of the north gate is 48213."
QUESTION = "\nQuestion: What is the code of the north gate?\nAnswer: The code of the north gate is"
ANSWER = "48213"


def sample_prompt(tokens: int, count: Callable[[str], int]) -> str:
    """About `tokens` tokens of text, the fact a third of the way in. count: how many tokens a text has."""
    sentence = count(" ".join(SENTENCES * 10)) / (10 * len(SENTENCES))
    number = max(2, int((tokens - count(FACT + QUESTION)) / sentence))
    text = [SENTENCES[i * i % 11 % len(SENTENCES)] for i in range(number)]
    text.insert(number // 3, FACT)
    return " ".join(text) + QUESTION
