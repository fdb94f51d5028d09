"""The options of the plugin, and the JSON description of a layout."""
