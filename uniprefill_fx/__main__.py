"""`python -m uniprefill_fx`, which is the command `uniprefill`: see `tools/cli.py`."""

from uniprefill_fx.tools.cli import main

raise SystemExit(main())
