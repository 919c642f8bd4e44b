"""Certificates for development and tests: a local authority, and one certificate for each service and for clients.

In production use your own authority (cert-manager, SPIFFE, Vault): the services only read files.
"""

import datetime
import ipaddress
import os
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from quire.local_stack.certificate_folder import CA, CLIENT, NAMES, CertificateFolder
from svc_common.errors import ConfigError

CA_DAYS = 3_650
LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")
_CLOCK_SKEW = datetime.timedelta(minutes=5)
_USAGES = (ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH)


def make_certificates(folder: CertificateFolder, *, hosts: Sequence[str] = (), days: int = 365) -> list[Path]:
    """Make all certificates, valid for `hosts` and this machine; returns their paths.

    An existing authority is reused, so a second run renews the certificates. Raises ConfigError for an
    unusable folder.
    """
    try:
        folder.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        ca_key, ca = _authority(folder)
        for name in NAMES:
            _issue(folder, name, ca_key, ca, hosts=(*LOCAL_HOSTS, *hosts), days=days)
    except (OSError, ValueError) as error:
        raise ConfigError(f"certificates cannot be made in {folder.path}: {error}", reason="CERTIFICATES") from None
    return [folder.cert(name) for name in (CA, *NAMES)]


def _authority(folder: CertificateFolder) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
    if not folder.key(CA).exists():
        _make_authority(folder)
    key = serialization.load_pem_private_key(folder.key(CA).read_bytes(), password=None)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ValueError(f"{folder.key(CA)} is of another kind than those made here")
    return key, x509.load_pem_x509_certificate(folder.cert(CA).read_bytes())


def _make_authority(folder: CertificateFolder) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    name = _name("Quire development CA")
    usage = x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=True,
        crl_sign=True,
        encipher_only=False,
        decipher_only=False,
    )
    builder = (
        _unsigned(name, name, key.public_key(), CA_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )
    _write(folder, CA, key, builder.sign(key, hashes.SHA256()))


def _issue(
    folder: CertificateFolder,
    name: str,
    ca_key: ec.EllipticCurvePrivateKey,
    ca: x509.Certificate,
    *,
    hosts: Sequence[str],
    days: int,
) -> None:
    """Issue one certificate. Services get their role as DNS name, plus `hosts`; a client gets no hosts."""
    key = ec.generate_private_key(ec.SECP256R1())
    names = [x509.DNSName(name), *(() if name == CLIENT else map(_host, hosts))]
    builder = (
        _unsigned(_name(f"quire {name}"), ca.subject, key.public_key(), days)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.ExtendedKeyUsage(_USAGES), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False)
    )
    _write(folder, name, key, builder.sign(ca_key, hashes.SHA256()))


def _unsigned(
    subject: x509.Name, issuer: x509.Name, public_key: ec.EllipticCurvePublicKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCK_SKEW)
        .not_valid_after(now + datetime.timedelta(days=days))
    )


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _host(text: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(text))
    except ValueError:
        return x509.DNSName(text)


def _write(
    folder: CertificateFolder, name: str, key: ec.EllipticCurvePrivateKey, certificate: x509.Certificate
) -> None:
    """Replace each file atomically, since services may be reading. Key first: services ignore a pair until it matches."""
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    _replace(folder.key(name), pem, mode=0o600)
    _replace(folder.cert(name), certificate.public_bytes(serialization.Encoding.PEM), mode=0o644)


def _replace(path: Path, content: bytes, *, mode: int) -> None:
    beside = path.with_name(f".{path.name}.new")
    beside.unlink(missing_ok=True)
    with open(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(content)
    beside.replace(path)
