"""3D parallelism as described by ATorch's `DeepSpeed3DParallelConfig`, converted to options of the plugin."""
