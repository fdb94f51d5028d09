"""A census: of the trainable head classes of transformers, how many train exactly when they are sharded."""
