"""User-defined policies: TPInfo, slot policies, and uniform sharding of all linear layers."""
