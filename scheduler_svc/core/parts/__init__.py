"""The parts of a policy: queue order, admission, budget, preemption, placement."""
