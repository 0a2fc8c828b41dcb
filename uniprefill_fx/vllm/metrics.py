"""Counters beside vLLM's own, at its metrics endpoint.

The endpoint is in the process of the server and the counting in that of the engine: prometheus_client carries one to
the other where PROMETHEUS_MULTIPROC_DIR names a folder, which `uniprefill serve` sees to.
"""

from __future__ import annotations

import functools
from typing import Any

from uniprefill_fx.vllm.steps import Step


@functools.cache
def _counters() -> dict[str, Any]:
    from prometheus_client import Counter

    about = {
        "requests_dropped": "Prompts whose tokens were selected; all of them may have been kept.",
        "prompt_tokens": "Tokens of those prompts.",
        "kept_tokens": "Tokens of those prompts that are left behind the last drop.",
    }
    found: dict[str, Any] = {name: Counter(f"uniprefill:{name}", text) for name, text in about.items()}
    found["requests_dense"] = Counter("uniprefill:requests_dense", "Prompts that stayed dense.", ["reason"])
    return found


def count(step: Step) -> None:
    """Add what a step did."""
    counters = _counters()
    for reason in step.dense.values():
        counters["requests_dense"].labels(reason=reason).inc()
    for name in step.dropping:
        kept = step.kept.get(name)
        counters["requests_dropped"].inc()
        counters["prompt_tokens"].inc(step.prompts[name])
        counters["kept_tokens"].inc(len(kept[-1]) if kept else step.prompts[name])
