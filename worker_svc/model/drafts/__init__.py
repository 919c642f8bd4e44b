"""Models that propose draft tokens: a small model of its own, or the MTP head of the model that is served."""
