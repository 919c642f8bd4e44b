"""Parts of a model for the ranks of a group, and the sums over them."""
