"""The software bill of materials of a wheel: CycloneDX 1.6 as JSON, which PEP 770 keeps in `*.dist-info/sboms/`.

It lists what the wheel contains beside Quire's own code (compiled kernels with what the compiler put into them, the built-in
model) and what it asks an installer for. Equal contents and times give equal bytes.
"""

import hashlib
import importlib.metadata
import re
import uuid
from collections.abc import Iterator, Mapping
from datetime import datetime

from cyclonedx.model import HashAlgorithm, HashType, Property
from cyclonedx.model.bom import Bom, BomMetaData
from cyclonedx.model.component import Component, ComponentScope, ComponentType
from cyclonedx.model.license import DisjunctiveLicense, LicenseExpression
from cyclonedx.model.lifecycle import LifecyclePhase, PredefinedLifecycle
from cyclonedx.model.tool import ToolRepository
from cyclonedx.output import make_outputter
from cyclonedx.schema import OutputFormat, SchemaVersion
from packageurl import PackageURL
from packaging.metadata import Metadata
from packaging.requirements import Requirement

from paged_kernels.cpu_builds import PREBUILT

FILE_NAME = "quire.cdx.json"
_KERNELS = f"paged_kernels/{PREBUILT.name}/"
_MODEL = "quire/tiny/"
_WEIGHTS = f"{_MODEL}model.safetensors"
_DEVELOPMENT = frozenset({"dev", "docs", "release"})
"""Extras that no service needs."""
_REQUIREMENT = "quire:requirement"
"""Property with a requirement as the wheel declares it (PEP 508): CycloneDX has versions of components, not ranges."""


def bill_of_materials(wheel: str, files: Mapping[str, bytes], made: datetime) -> bytes:
    """The SBOM of the wheel named `wheel` with these files (no SBOM and no RECORD among them). `made`: time of its sources."""
    metadata = Metadata.from_email(next(files[name] for name in files if name.endswith(".dist-info/METADATA")))
    quire = _root(metadata, wheel)
    libraries = {name: content for name, content in files.items() if name.startswith(_KERNELS)}
    carried, asked = [_model(files), *_kernels(libraries)], list(_dependencies(metadata))
    bom = Bom(serial_number=_serial_number(wheel, files, made), components=[*carried, *asked])
    bom.metadata = BomMetaData(
        component=quire,
        timestamp=made,
        tools=ToolRepository(components=_tools(("setuptools", "ziglang") if libraries else ("setuptools",))),
        lifecycles=[PredefinedLifecycle(LifecyclePhase.BUILD)],
    )
    bom.register_dependency(quire, [*carried, *asked])
    text = make_outputter(bom, OutputFormat.JSON, SchemaVersion.V1_6).output_as_string(indent=2)
    return f"{text}\n".encode()


def _root(metadata: Metadata, wheel: str) -> Component:
    """Quire as a generic package: the `quire` of PyPI is another project, whose advisories are not about this one."""
    purl = PackageURL("generic", None, metadata.name, str(metadata.version), {"file_name": wheel})
    return Component(
        type=ComponentType.APPLICATION,
        name=metadata.name,
        version=str(metadata.version),
        description=metadata.summary,
        licenses=[LicenseExpression(str(metadata.license_expression))],
        purl=purl,
        bom_ref=purl.to_string(),
    )


def _model(files: Mapping[str, bytes]) -> Component:
    """The built-in model; its license is the one that its card names."""
    (license_name,) = re.findall(r"^license_name: (\S+)$", files[f"{_MODEL}README.md"].decode(), re.M)
    return Component(
        type=ComponentType.MACHINE_LEARNING_MODEL,
        name="tiny",
        description="The built-in model, trained for Quire on Python's standard library",
        licenses=[DisjunctiveLicense(id=license_name.upper())],
        hashes=[_hash(files[_WEIGHTS])],
        bom_ref=_WEIGHTS,
    )


def _kernels(libraries: Mapping[str, bytes]) -> Iterator[Component]:
    """The compiled libraries, and the header-only code that the compiler's C++ library added to them."""
    compilers = set()
    for name, content in libraries.items():
        yield Component(type=ComponentType.FILE, name=name, hashes=[_hash(content)], bom_ref=name)
        (compiler,) = set(re.findall(rb"clang version ([\d.]+)", content))
        compilers.add(compiler.decode())
    for version in sorted(compilers):
        purl = PackageURL("generic", None, "libcxx", version)
        yield Component(
            name="libc++",
            version=version,
            description="LLVM's C++ standard library: templates from its headers, compiled into the CPU kernels",
            licenses=[LicenseExpression("Apache-2.0 WITH LLVM-exception")],
            purl=purl,
            bom_ref=purl.to_string(),
        )


def _dependencies(metadata: Metadata) -> Iterator[Component]:
    """Each distribution that the services require, once; optional where only extras ask for it."""
    asked: dict[str, list[Requirement]] = {}
    for requirement in metadata.requires_dist or ():
        if _extra(requirement) not in _DEVELOPMENT and requirement.name != metadata.name:
            asked.setdefault(requirement.name, []).append(requirement)
    for name, requirements in asked.items():
        purl = PackageURL("pypi", None, name)
        always = any(not _extra(requirement) for requirement in requirements)
        yield Component(
            name=name,
            purl=purl,
            scope=ComponentScope.REQUIRED if always else ComponentScope.OPTIONAL,
            properties=[Property(name=_REQUIREMENT, value=str(requirement)) for requirement in requirements],
            bom_ref=purl.to_string(),
        )


def _extra(requirement: Requirement) -> str:
    """The extra that asks for it; empty: it is always installed."""
    found = re.search(r'extra == "([^"]+)"', str(requirement.marker or ""))
    return found[1] if found else ""


def _tools(names: tuple[str, ...]) -> Iterator[Component]:
    for name in (*names, "cyclonedx-python-lib"):
        version = importlib.metadata.version(name)
        purl = PackageURL("pypi", None, name, version)
        yield Component(
            type=ComponentType.APPLICATION, name=name, version=version, purl=purl, bom_ref=f"tool:{purl.to_string()}"
        )


def _serial_number(wheel: str, files: Mapping[str, bytes], made: datetime) -> uuid.UUID:
    """Named after what the wheel contains: another one only where the wheel differs."""
    digests = "".join(f"{name} {hashlib.sha256(content).hexdigest()}\n" for name, content in sorted(files.items()))
    return uuid.uuid5(uuid.NAMESPACE_OID, f"{wheel}\n{made.isoformat()}\n{digests}")


def _hash(content: bytes) -> HashType:
    return HashType(alg=HashAlgorithm.SHA_256, content=hashlib.sha256(content).hexdigest())
