"""The stops of the tour, one module each with its `STOP`. Their order: `quire_tools.tour.route`."""
