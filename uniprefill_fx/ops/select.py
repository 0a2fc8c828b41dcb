"""Which tokens of a padded batch stay, from the scores of their blocks (UniPrefill, arXiv 2605.06221, Eq. 5).

Behind a drop a batch is an ordinary left-padded one: K columns, K the most that any request keeps, each request's kept
rows at the end.
"""

from __future__ import annotations

import torch
from torch import Tensor

from uniprefill_fx.kernels.select_blocks.naive import select_blocks_reference


def select_reference(
    scores: Tensor,
    token_bounds: Tensor,
    prompt_bounds: Tensor,
    block_size: int,
    last_n: int,
    sink_tokens: int,
    p: float | None,
    keep_ratio: float | None,
) -> tuple[Tensor, Tensor]:
    """The smallest set of blocks that holds a fraction `p` of each request's mass, plus the forced tokens.

    A block is kept when the mass of all higher blocks is below p of the total (Eq. 5); ties go to the lower block
    index; cumulative sums are float64. With `keep_ratio` instead of `p`: the
    ceil(keep_ratio * prompt length / block_size) highest blocks. The first `sink_tokens` and the last `last_n` tokens
    of a request always stay. p = 1 keeps everything, and so does a total that is not finite.

    Args:
        scores: (batch, blocks), as `score` returns them.
        token_bounds: (batch, 2) int64 on the CPU, of the stream as it is; prompt_bounds: the same before any drop (what
            `keep_ratio` counts from).

    Returns:
        kept_indices: (batch, kept) int64, ascending columns of the stream as it is; -1 in front where a request keeps
            fewer.
        token_bounds: (batch, 2) int64 on the CPU, of the kept stream.
    """
    prompt_lengths = prompt_bounds[:, 1] - prompt_bounds[:, 0]
    return select_blocks_reference(scores, token_bounds, prompt_lengths, block_size, last_n, sink_tokens, p, keep_ratio)


select = torch.library.custom_op("uniprefill::select", select_reference, mutates_args=())


@select.register_fake
def _(scores, token_bounds, prompt_bounds, block_size, last_n, sink_tokens, p, keep_ratio):  # type: ignore[no-untyped-def]
    kept = torch.library.get_ctx().new_dynamic_size()
    return scores.new_empty(scores.shape[0], kept, dtype=torch.int64), torch.empty_like(token_bounds)
