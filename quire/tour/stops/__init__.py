"""The stops of the tour, a module each with its `STOP`. In order: `quire.tour.route`."""
