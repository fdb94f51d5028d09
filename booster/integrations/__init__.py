"""Training loops of other libraries on boosted objects; each file is imported by who uses that library."""
