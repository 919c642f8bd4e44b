"""`python -m deploy.release` (`make release`): everything that is published of a commit, in one folder.

    notes      release notes: the changelog's section, what was built, checksums
    images     container images as OCI archives, where a Docker engine can be reached

Wheels, the source distribution and SBOMs are made by deploy/wheel.py, deploy/sdist.py and deploy/sbom.py. docs/release.md.
"""
