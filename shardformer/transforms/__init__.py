"""Changes that the sharder makes to a whole model beside those of its policy's table."""
