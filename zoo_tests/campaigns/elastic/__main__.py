"""`python -m zoo_tests.campaigns.elastic`: see `campaign.py`."""

from zoo_tests.campaigns.elastic.campaign import main

if __name__ == "__main__":
    main()
