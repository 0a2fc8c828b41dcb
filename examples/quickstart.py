"""`uniprefill demo` on the small checkpoint beside this file: one long prompt, dense and with dropped tokens.

python examples/quickstart.py
python examples/quickstart.py --tokens 16384 --inner-backend inductor
python examples/quickstart.py --option "drop_layers=[5]" --p 0.8

The checkpoint has no tokenizer: its prompts are made here, 16 facts in noise of which the end asks for one. With
--model, all arguments go to `uniprefill demo` as they are.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from needle_prompts import ANSWER_TOKENS, needle_prompt

from uniprefill_fx.tools.cli import main as uniprefill

CHECKPOINT = os.path.relpath(Path(__file__).resolve().parent / "needle-gemma3")

# Inductor needs about three minutes to compile the five graphs of this run on two busy cores. The demo should take one,
# so its pieces run as plain PyTorch ops, dense and dropped ones alike, unless --inner-backend says otherwise.
# The prompts are noise, over which attention spreads widely: the default preset keeps nearly all of it.
DEFAULTS = ["--inner-backend", "eager", "--new-tokens", str(ANSWER_TOKENS)]
HOW_MUCH = ["--p", "0.9"]
SAYS_HOW_MUCH = re.compile(r"--(p|preset)(=|$)|(--option=)?(p|preset|keep_ratio)=")


def main(argv: Sequence[str]) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--model")
    parser.add_argument("--tokens", type=int, default=4096)
    known, others = parser.parse_known_args(argv)
    if known.model is not None or "-h" in argv or "--help" in argv:
        return uniprefill(["demo", *argv])
    defaults = DEFAULTS + ([] if any(map(SAYS_HOW_MUCH.match, others)) else HOW_MUCH)
    prompt = needle_prompt(known.tokens)
    print(f"prompt: 16 facts in noise, the one that is asked for at token {prompt.position}", file=sys.stderr)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "prompt.txt"
        file.write_text(" ".join(map(str, prompt.ids[0].tolist())))
        given = ["--model", CHECKPOINT, "--prompt-file", str(file), "--expect", " ".join(map(str, prompt.answer))]
        return uniprefill(["demo", *given, *defaults, *others])


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
