"""`python -m uniprefill_fx`: see `cli.py`."""

from uniprefill_fx.tools.cli import main

raise SystemExit(main())
