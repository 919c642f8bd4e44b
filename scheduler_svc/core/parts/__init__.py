"""The parts that a policy is made of: queue order, admission, budget, preemption, placement."""
