"""Machines and links between them, made of namespaces of this machine; and what training does on them."""
