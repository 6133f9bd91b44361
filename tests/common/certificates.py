"""A certificate authority of a test's own, and what it signs."""

import subprocess
from dataclasses import dataclass
from pathlib import Path

from fastserve_common.tls import DEFAULT_NAME, Identity


def _openssl(*arguments: str | Path) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)


@dataclass(frozen=True)
class Authority:
    folder: Path

    @classmethod
    def make(cls, folder: Path) -> "Authority":
        folder.mkdir(parents=True, exist_ok=True)
        made = cls(folder)
        _openssl(
            *("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "1"),
            *("-subj", "/CN=authority", "-keyout", folder / "ca.key", "-out", made.certificate),
        )
        return made

    @property
    def certificate(self) -> Path:
        return self.folder / "ca.crt"

    def sign(self, who: str, san: str = f"DNS:{DEFAULT_NAME}") -> Identity:
        """Signing again gives other files of the same names: a renewal."""
        key, request, certificate, names = (self.folder / f"{who}.{kind}" for kind in ("key", "csr", "crt", "ext"))
        _openssl(
            *("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-subj", f"/CN={who}"),
            *("-keyout", key, "-out", request),
        )
        names.write_text(f"subjectAltName={san}\n")
        _openssl(
            *("x509", "-req", "-in", request, "-CA", self.certificate, "-CAkey", self.folder / "ca.key", "-days", "1"),
            *("-CAcreateserial", "-extfile", names, "-out", certificate),
        )
        return Identity(certificate, key, self.certificate)


def flags(identity: Identity) -> tuple[str, ...]:
    """As a service takes them."""
    return (f"--tls-cert={identity.certificate}", f"--tls-key={identity.key}", f"--tls-ca={identity.authority}")
