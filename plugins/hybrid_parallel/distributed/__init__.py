"""Process groups: the mesh, which devices its ranks have, and agreement between ranks."""
