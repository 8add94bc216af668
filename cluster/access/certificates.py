"""The PKI of the cluster: an authority, a server certificate, and a client certificate per component.

The openssl program creates new ones at every start, in `.cluster/`.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from cluster.commands import Arguments, run
from cluster.layout import BRIDGE_ADDRESS, CERTIFICATES, DOMAIN, SERVICE_ADDRESS, Node
from cluster.programs.packages import program

DAYS = "3650"

CONFIG = """\
[req]
distinguished_name = name
prompt = no
[name]
[authority]
basicConstraints = critical, CA:TRUE
keyUsage = critical, keyCertSign, cRLSign
subjectKeyIdentifier = hash
[leaf]
basicConstraints = CA:FALSE
keyUsage = critical, digitalSignature
extendedKeyUsage = serverAuth, clientAuth
"""


@dataclass(frozen=True)
class Identity:
    """The subject of a certificate: file name, common name, organisation, host names and addresses."""

    name: str
    common_name: str
    organisation: str = ""
    hosts: tuple[str, ...] = ()

    @property
    def certificate(self) -> Path:
        """The file with the certificate."""
        return CERTIFICATES / f"{self.name}.crt"

    @property
    def key(self) -> Path:
        """The file with the private key."""
        return CERTIFICATES / f"{self.name}.key"

    @property
    def subject(self) -> str:
        """The subject in openssl's syntax."""
        return (f"/O={self.organisation}" if self.organisation else "") + f"/CN={self.common_name}"


AUTHORITY = Identity("authority", "fluxtrain-cluster")
ADMIN = Identity("admin", "admin", "system:masters")
CONTROLLER_MANAGER = Identity("controller-manager", "system:kube-controller-manager")
SCHEDULER = Identity("scheduler", "system:kube-scheduler")
PROXY = Identity("proxy", "system:kube-proxy")
DNS = Identity("dns", "coredns")
SERVER = Identity(
    "server",
    "kubernetes",
    hosts=(
        "DNS:localhost",
        "DNS:kubernetes",
        "DNS:kubernetes.default",
        "DNS:kubernetes.default.svc",
        f"DNS:kubernetes.default.svc.{DOMAIN}",
        "IP:127.0.0.1",
        f"IP:{SERVICE_ADDRESS}",
        f"IP:{BRIDGE_ADDRESS}",
    ),
)

SERVICE_ACCOUNT_KEY = CERTIFICATES / "service-account.key"
SERVICE_ACCOUNT_PUBLIC_KEY = CERTIFICATES / "service-account.pub"


def kubelet(node: Node) -> Identity:
    """Return the identity of the kubelet of ``node``, as a client and as a server."""
    hosts = (f"DNS:{node.name}", f"IP:{node.address}")
    return Identity(node.name, f"system:node:{node.name}", "system:nodes", hosts)


def create(nodes: list[Node]) -> None:
    """Write the authority, all certificates and the key pair of service-account tokens."""
    CERTIFICATES.mkdir(parents=True, exist_ok=True)
    CERTIFICATES.chmod(0o700)
    (CERTIFICATES / "openssl.cnf").write_text(CONFIG)
    _request(AUTHORITY, "authority")
    leaves = [ADMIN, CONTROLLER_MANAGER, SCHEDULER, PROXY, DNS, SERVER, *map(kubelet, nodes)]
    with ThreadPoolExecutor() as pool:
        list(pool.map(issue, leaves))
    _create_token_keys()


def issue(identity: Identity) -> None:
    """Write a certificate of ``identity``, signed by the authority, and its key."""
    names = ["-addext", f"subjectAltName={','.join(identity.hosts)}"] if identity.hosts else []
    signed: Arguments = ["-CA", AUTHORITY.certificate, "-CAkey", AUTHORITY.key, *names]
    _request(identity, "leaf", *signed)


def _request(identity: Identity, section: str, *more: str | Path) -> None:
    curve: Arguments = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-noenc"]
    files: Arguments = ["-keyout", identity.key, "-out", identity.certificate]
    config: Arguments = ["-config", CERTIFICATES / "openssl.cnf", "-extensions", section]
    subject = ["-subj", identity.subject, "-days", DAYS]
    run([program("openssl"), "req", "-x509", *curve, *files, *config, *subject, *more])


def _create_token_keys() -> None:
    openssl = program("openssl")
    kind = ["-algorithm", "RSA", "-pkeyopt", "rsa_keygen_bits:2048"]
    run([openssl, "genpkey", *kind, "-out", SERVICE_ACCOUNT_KEY])
    run(
        [openssl, "pkey", "-in", SERVICE_ACCOUNT_KEY, "-pubout", "-out", SERVICE_ACCOUNT_PUBLIC_KEY]
    )
