"""What a rank keeps outside of its device."""
