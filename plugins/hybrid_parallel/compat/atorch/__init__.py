"""One call from a model and a dataset to training objects: a layout that is given, or the fastest that is found."""
