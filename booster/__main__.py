"""`python -m booster`: the `booster` command."""

from __future__ import annotations

from booster.cli.main import main

if __name__ == "__main__":
    main()
