"""Expert parallelism: sharding of experts over ranks, and dispatch of tokens to them."""
