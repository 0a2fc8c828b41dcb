"""`python -m uniprefill_fx`: see `tools/cli.py`, and `vllm/serve.py` for its command `serve`."""

import sys

if sys.argv[1:2] == ["serve"]:
    from uniprefill_fx.vllm.serve import main as serve

    raise SystemExit(serve(sys.argv[2:]))

from uniprefill_fx.tools.cli import main

raise SystemExit(main())
