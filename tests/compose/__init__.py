"""`python -m tests.compose` (`make test-compose`): docker-compose.yml in a real engine, with images made without a registry.

`steps` are in the order in which things are needed:

    debian, wheels      what is fetched, once: packages, a root file system, wheels           (cached in a folder)
    engine              dockerd in a network namespace of its own; nothing of it is left behind
    images              our three images from their Dockerfiles, stand-ins for what only a registry has
    checks/             pytest files: the stack up, used, hurt, hardened, down
    report              what it took, printed and in benchmarks/results/compose.json

`debian`, and `commands` that all steps run, are in tests/support, because other folders use them too.

pytest does not collect `checks/` by itself: their files are named check_*.py.
"""
