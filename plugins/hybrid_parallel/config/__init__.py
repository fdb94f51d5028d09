"""Options of the plugin, and the JSON description of a parallel layout."""
