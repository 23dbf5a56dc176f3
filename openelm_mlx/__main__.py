"""`python -m openelm_mlx` is the `openelm` command."""

from .cli import main

raise SystemExit(main())
