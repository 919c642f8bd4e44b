"""A decoder run as a list of operators over packed weights, matched by its modules and verified against them."""
