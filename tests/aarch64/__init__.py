"""`make test-arm`: the kernel tests with aarch64's build, Python and torch, under qemu-user."""
