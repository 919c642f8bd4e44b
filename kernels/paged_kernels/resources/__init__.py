"""What each Triton kernel takes of a GPU that need not be here: registers, spills, shared memory.

`launches` records what the backend would launch, `forms` has the launches of a step, `compiled` compiles a launch
for a GPU and reads the result. `python -m paged_kernels.resources` prints the table.
"""
