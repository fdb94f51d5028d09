"""Process groups: the mesh, the mapping of ranks to devices, and agreement between ranks."""
