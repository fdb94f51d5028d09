"""`python -m zoo_tests.campaigns.faults`: see `campaign.py`."""

from zoo_tests.campaigns.faults.campaign import main

if __name__ == "__main__":
    main()
