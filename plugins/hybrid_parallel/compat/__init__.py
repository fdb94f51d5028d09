"""Interfaces of other libraries, implemented on top of this plugin."""
