"""Reports and pictures: which rank holds which parameters, and the timeline of a pipeline."""
