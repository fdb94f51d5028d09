"""3D parallelism as ATorch's `DeepSpeed3DParallelConfig` describes it, lowered to options of the plugin."""
