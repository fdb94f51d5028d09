"""What a layout costs, known before it runs."""
