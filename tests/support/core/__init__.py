"""Small cores and their lives for tests of the scheduler core and of cache rules."""
