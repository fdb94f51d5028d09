"""What tells the user where numbers went bad, and where ranks have come apart."""
