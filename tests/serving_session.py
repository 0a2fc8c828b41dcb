"""A session of one request whose input goes on, in an engine of vLLM in a process of its own.

    python serving_session.py FOLDER      # or names of folders as standard input, as serving_worker.py

The case: `model`, `options` (of `engine_args`), `turns` (each a list of token ids), `made` (tokens generated a turn).
The result: by turn, what was generated, as [token, {token: log-probability}] each; and the steps, as tokens computed.
"""

from __future__ import annotations

from typing import Any

import serving_worker  # sets the environment


def run(case: dict[str, Any]) -> dict[str, Any]:
    from vllm import LLM, SamplingParams

    import uniprefill_fx.vllm as served

    llm = LLM(case["model"], **(serving_worker.ENGINE | served.engine_args(**case["options"])))
    llm.collective_rpc(serving_worker.watch)
    engine = llm.llm_engine
    params = SamplingParams(max_tokens=case["made"], temperature=0.0, logprobs=3, detokenize=False, ignore_eos=True)
    found: list[Any] = []
    for turn in case["turns"]:
        prompt: Any = {"prompt_token_ids": turn}
        engine.engine_core.add_request(
            engine.input_processor.process_inputs(
                "session", prompt, params, supported_tasks=("generate",), resumable=True
            )
        )
        made: list[Any] = []
        while len(made) < case["made"]:
            for output in engine.engine_core.get_output().outputs:
                values = output.new_logprobs
                assert values is not None
                for i, token in enumerate(output.new_token_ids):
                    pairs = zip(values.logprob_token_ids[i].tolist(), values.logprobs[i].tolist(), strict=True)
                    made.append([token, dict(pairs)])
        found.append(made)
    return {"turns": found} | llm.collective_rpc(serving_worker.seen)[0]


if __name__ == "__main__":
    serving_worker.answer_each(run)
