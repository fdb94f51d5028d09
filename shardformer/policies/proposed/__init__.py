"""Plans derived from a model: what each linear layer reads decides which are column- or row-parallel."""
