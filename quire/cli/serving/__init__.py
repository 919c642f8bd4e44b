"""Commands that start services, and their keys and certificates."""
