"""`python -m uniprefill_fx`, which is the command `uniprefill`: see `tools/cli.py`."""

import sys


def main() -> int:
    """The exit status. An interrupt that comes while modules are imported is one line, too."""
    try:
        from uniprefill_fx.tools.cli import main as run

        return run()
    except KeyboardInterrupt:
        print("uniprefill: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    raise SystemExit(main())
