"""Every parallel layer against its native layer: output and every gradient, in fp64, at awkward sizes."""
