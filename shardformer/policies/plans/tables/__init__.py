"""Plans for families to which transformers gives none."""
