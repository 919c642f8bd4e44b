"""What a request may ask for, and every default. Pure."""
