"""The admin API of the scheduler: `service` has the methods, the other modules build their responses."""
