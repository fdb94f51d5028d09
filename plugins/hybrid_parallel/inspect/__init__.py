"""Reports: the parameters that each rank holds, and the timeline of a pipeline."""
