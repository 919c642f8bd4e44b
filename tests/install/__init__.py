"""Installing: what is declared, what a bare installation says, and a wheel in an empty environment."""
