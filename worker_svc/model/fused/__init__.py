"""A model's decoder as a list of operators over packed weights: matched by its modules, checked against them, then run instead."""
