"""README and docs: their python blocks run, their tables agree with the code, their links lead somewhere."""
