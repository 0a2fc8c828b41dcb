"""`uniprefill serve MODEL --p 0.95 [any flag of vllm serve]`: vLLM's server with what dropping needs.

Says on standard error which flags it adds and why, and becomes `vllm serve`: that of the Python which runs this, since
another one on PATH may lack the package, and would then serve without dropping.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

from uniprefill_fx.config import PRESETS, OptionError
from uniprefill_fx.tools.cli import options_of
from uniprefill_fx.tools.cli_output import UserError
from uniprefill_fx.vllm.options import engine_args

WHY = {
    "--compilation-config": "mode 2 hands this package the whole graph of the model",
    "--kernel-config": "norms as torch spells them, which are fused with what lies around them",
    "--additional-config": "the options",
    "--no-enable-prefix-caching": "a cached block holds a token for the layers that kept it, and for no others",
    "--no-enable-chunked-prefill": "a prompt drops tokens when it arrives whole; others stay dense",
}


def command_of(arguments: Sequence[str]) -> list[str]:
    """`vllm serve` with the flags that are added.

    Raises:
        OptionError, UserError: a bad option. SystemExit: what argparse does not understand.
    """
    parser = argparse.ArgumentParser(prog="uniprefill serve", description=__doc__, allow_abbrev=False)
    parser.add_argument("model")
    parser.add_argument("--preset", choices=tuple(PRESETS), help="how much stays; quality unless --p says it")
    parser.add_argument("--p", help="attention mass to keep: 0.95, or 0.99,0.9 for each drop layer")
    parser.add_argument("--option", action="append", default=[], metavar="NAME=VALUE", help="any other option")
    parser.add_argument("--no-warm-up", action="store_true", help="the first prompt that drops compiles, not the start")
    own, others = parser.parse_known_args(arguments)
    if others and list(arguments).index(others[0]) < list(arguments).index(own.model):
        raise UserError(f"MODEL comes before the flags of vllm serve: got {others[0]} before {own.model}")
    needed = engine_args(warm_up=not own.no_warm_up, **options_of(own))
    added: list[str] = []
    for name, value in needed.items():
        flag = name.replace("_", "-")
        if isinstance(value, dict):
            value = _merged(value, _taken(flag, others))
        added += [f"--no-{flag}"] if value is False else [f"--{flag}", json.dumps(value)]
    return ["vllm", "serve", own.model, *added, *others]


def _taken(flag: str, others: list[str]) -> dict[str, Any]:
    """What the user's flags say of a flag that is added, out of `others`: of two, vLLM takes the last one alone.

    Raises:
        UserError: it is no object of JSON.
    """
    name = "--" + flag.replace("-", "[-_]") + ("|-cc" if flag == "compilation-config" else "")
    said: dict[str, Any] = {}
    for i in reversed(range(len(others))):  # the last one first, which wins
        if (found := re.fullmatch(rf"(?:{name})((?:\.\w+)*)(?:=(.*))?", others[i], re.DOTALL)) is None:
            continue
        text = found[2] if found[2] is not None else "".join(others[i + 1 : i + 2])
        keys = found[1].split(".")[1:]
        try:
            value = json.loads(text)
        except ValueError:
            value = text
        for key in reversed(keys):
            value = {key: value}
        if not isinstance(value, dict):
            raise UserError(f"{others[i]} {text}: wanted an object of JSON, or {others[i]}.NAME VALUE")
        said = _merged(value, said)
        del others[i : i + (1 if found[2] is not None else 2)]
    return said


def _merged(first: dict[str, Any], last: dict[str, Any]) -> dict[str, Any]:
    """Both, objects inside of them too; of two other values the last."""
    both = first | last
    for name in first.keys() & last.keys():
        if isinstance(first[name], dict) and isinstance(last[name], dict):
            both[name] = _merged(first[name], last[name])
    return both


def main(arguments: Sequence[str]) -> int:
    """Start the server in place of this process; returns an exit status only if it cannot."""
    try:
        command = command_of(arguments)
    except (OptionError, UserError) as error:
        print(f"uniprefill serve: {error}", file=sys.stderr)
        return 2
    found = importlib.util.find_spec("vllm")
    if found is None or found.origin is None:  # a folder of that name is not vLLM
        print('uniprefill serve: there is no vllm here: pip install ".[vllm]" in a checkout', file=sys.stderr)
        return 2
    for flag, why in WHY.items():
        value: Any = command[command.index(flag) + 1] if not flag.startswith("--no-") else ""
        print(f"uniprefill serve: {flag} {value}  ({why})", file=sys.stderr)
    os.environ.setdefault("PROMETHEUS_MULTIPROC_DIR", tempfile.mkdtemp(prefix="uniprefill_metrics_"))
    os.execvp(sys.executable, [sys.executable, "-m", "vllm.entrypoints.cli.main", *command[1:]])
