"""Attention inputs whose softmax concentrates as in a trained model for long contexts.

Gaussian inputs attend evenly: there is nothing in them for block-sparse attention to find. These have, for each kv
head, in a random orthonormal basis of the head's dimensions:

- sink (1 dimension): tokens 0 to 3 carry a large key component that every query points at;
- stripe (1): a few runs of 48 to 96 tokens that every later query sees;
- local (44): every cell of 128 tokens has a random code, interpolated between cells, in queries and keys alike: a mild
  diagonal band about 256 tokens wide;
- topic (the rest): the text is cut into segments of 256 to 768 tokens, not aligned to blocks. Each has a topic, and a
  topic has about 3 segments whatever the length, so that the number of relevant blocks stays near constant and density
  falls like 1 / length. A query attends to its own topic and to one other that it refers to, 3 times in 4 the same for
  all heads of the group;
- noise (all): independent on queries and keys: variance inside a block, and a long tail.

Segments differ in the gain of their keys, query heads in their sharpness. Logits do not depend on the length. Values
are a topic's value and a token's own.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import normalize

SINK, STRIPE, LOCAL, TOPIC, REFERRED = 12.6, 6.0, 1.2, 6.6, 6.3  # logits
SEGMENT_GAIN, HEAD_GAIN, Q_NOISE, K_NOISE = 0.06, 0.05, 0.30, 0.30  # standard deviations
LOCAL_DIMS, CELL, SEGMENT, SEGMENTS_OF_A_TOPIC = 44, 128, (256, 768), 3.0
CHUNK = 16_384  # tokens made at a time


def structured_inputs(
    tokens: int, heads: int = 32, kv_heads: int = 8, seed: int = 0, device: str | torch.device = "cuda"
) -> tuple[Tensor, Tensor, Tensor]:
    """q (1, heads, tokens, 128), k and v (1, kv_heads, tokens, 128), bfloat16, in memory (1, tokens, heads, 128).

    The draws on the device, of noise, differ between kinds of device; everything else is the same everywhere.
    """
    dim, group, device = 128, heads // kv_heads, torch.device(device)
    q, k, v = (torch.empty(tokens, n, dim, dtype=torch.bfloat16, device=device) for n in (heads, kv_heads, kv_heads))
    drawn = torch.Generator().manual_seed(seed * 7919 + 1)
    lengths = torch.randint(SEGMENT[0], SEGMENT[1] + 1, (tokens // SEGMENT[0] + 2,), generator=drawn)
    segment = torch.repeat_interleave(torch.arange(len(lengths)), lengths)[:tokens]
    for head in range(kv_heads):
        _one_kv_head(q[:, head * group : (head + 1) * group], k[:, head], v[:, head], segment, head, seed)
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    return q, k, v


def _one_kv_head(q: Tensor, k: Tensor, v: Tensor, segment: Tensor, head: int, seed: int) -> None:
    """Fill q (tokens, group, dim), k and v (tokens, dim)."""
    (tokens, group, dim), device = q.shape, q.device
    segments, topic_dims = int(segment[-1]) + 1, dim - 2 - LOCAL_DIMS
    topics = max(2, round(segments / SEGMENTS_OF_A_TOPIC))
    drawn = torch.Generator().manual_seed(seed * 7919 + 100 + head)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=drawn)

    def choice(below: int, many: int) -> Tensor:
        return torch.randint(0, below, (many,), generator=drawn)

    basis = torch.linalg.qr(normal(dim, dim))[0]
    topic = choice(topics, segments)
    topic_key = normalize(normal(topics, topic_dims), dim=1)
    key_gain = 1 + SEGMENT_GAIN * normal(segments)
    cells = normalize(normal(tokens // CELL + 2, LOCAL_DIMS), dim=1)
    shared_reference = choice(topics, segments)
    stripe = torch.zeros(tokens)
    stripes = 2 + tokens // 16_384
    begins = choice(max(1, tokens - 96), stripes).tolist()
    for begin, length in zip(begins, torch.randint(48, 97, (stripes,), generator=drawn).tolist(), strict=True):
        stripe[begin : begin + length] = 1
    topic_value = normal(topics, dim)
    of_heads = []
    for _ in range(group):
        own = torch.rand(segments, generator=drawn) < 0.25
        reference = torch.where(own, choice(topics, segments), shared_reference)
        reference = torch.where(reference == topic, (reference + 1) % topics, reference)
        of_heads.append((float(1 + HEAD_GAIN * normal(1)), reference))

    noise = torch.Generator(device=device).manual_seed(seed * 7919 + 5000 + head)
    basis, topic_key, cells, topic_value = (x.to(device) for x in (basis, topic_key, cells, topic_value))
    for begin in range(0, tokens, CHUNK):
        place = torch.arange(begin, min(tokens, begin + CHUNK))
        many, own_segment, cell = len(place), segment[place], (place // CELL).to(device)
        along = ((place % CELL).float() / CELL).to(device)[:, None]
        code = normalize(cells[cell] * (1 - along) + cells[cell + 1] * along, dim=1)
        own_topic = topic[own_segment].to(device)

        def components(sink: Tensor, stripe: Tensor, code: Tensor, topic: Tensor) -> Tensor:
            parts = zip((SINK, STRIPE, LOCAL, TOPIC), (sink, stripe, code, topic), strict=True)
            return torch.cat([(logit * dim**0.5) ** 0.5 * part for logit, part in parts], 1)

        def noisy(many: int = many) -> Tensor:
            return torch.randn(many, dim, generator=noise, device=device)

        sinks = (place < 4).float().to(device)[:, None]
        body = 1 - sinks  # the sink's tokens carry nothing else
        topics_of_keys = key_gain[own_segment].to(device)[:, None] * topic_key[own_topic]
        keys = components(sinks, stripe[place].to(device)[:, None] * body, code * body, topics_of_keys * body)
        k[place[0] : place[-1] + 1] = (keys @ basis.T + K_NOISE * (0.1 + 0.9 * body) * noisy()).to(k.dtype)
        v[place[0] : place[-1] + 1] = (0.7 * topic_value[own_topic] + 0.7 * noisy()).to(v.dtype)
        ones = torch.ones(many, 1, device=device)
        for j, (gain, reference) in enumerate(of_heads):
            wanted = topic_key[own_topic] + REFERRED / TOPIC * topic_key[reference[own_segment].to(device)]
            queries = components(ones, ones, code, wanted)
            q[place[0] : place[-1] + 1, j] = (gain * (queries @ basis.T + Q_NOISE * noisy())).to(q.dtype)
