"""`python -m hybrid_booster`: the `booster` command."""

from __future__ import annotations

from hybrid_booster.command import main

if __name__ == "__main__":
    main()
