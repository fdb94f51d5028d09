"""`python -m zoo_tests.census`: a short name for `python -m zoo_tests.campaigns.census`, with the same options."""

from zoo_tests.campaigns.census.__main__ import main

if __name__ == "__main__":
    main()
