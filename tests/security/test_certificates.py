"""Certificates are taken whole, or the version before stays."""

import pytest
from tests.security.conftest import Mounted, write, yesterday

from paceline.errors import ConfigError
from paceline.security.certificates import CertificateFiles, Certificates, read_identity


def files(mounted: Mounted) -> CertificateFiles:
    return CertificateFiles.at("server.tls", mounted.certificate, mounted.key, mounted.ca, "client_ca")


def test_a_pair_that_belongs_together_is_read(mounted):
    identity = read_identity(files(mounted))
    assert identity.chain == mounted.certificate.read_bytes()
    assert identity.key == mounted.key.read_bytes()
    assert identity.ca == mounted.ca.read_bytes()


@pytest.mark.parametrize(
    ("spoil", "refusal"),
    [
        (lambda m: m.key.unlink(), r"server\.tls\.key is '.*tls\.key': it cannot be read \(No such file"),
        (lambda m: m.certificate.write_text("no"), r"server\.tls\.certificate is '.*': it holds no certificate"),
        (lambda m: m.ca.write_text("no"), r"server\.tls\.client_ca is '.*': it holds no certificate"),
        (lambda m: m.key.write_text("no"), r"server\.tls\.key is '.*': it holds no private key"),
        (
            lambda m: m.key.write_bytes(m.authority.issue_cert("other").private_key_pem.bytes()),
            r"server\.tls\.key is '.*': it does not belong to the certificate in '.*tls\.crt'",
        ),
        (lambda m: m.renew(not_after=yesterday()), r"server\.tls\.certificate is '.*': it expired on "),
    ],
)
def test_files_that_cannot_be_used_are_refused_by_name(mounted, spoil, refusal):
    spoil(mounted)
    with pytest.raises(ConfigError, match=refusal):
        Certificates(files(mounted))


def test_no_refusal_quotes_what_a_file_holds(mounted):
    secret = mounted.key.read_bytes().decode()
    mounted.certificate.write_text(secret)  # the two were confused
    with pytest.raises(ConfigError) as refused:
        read_identity(files(mounted))
    assert not any(line in str(refused.value) for line in secret.splitlines())


def test_a_renewed_certificate_is_taken(mounted):
    changes = []
    certificates = Certificates(files(mounted), on_change=changes.append)
    before = certificates.current
    assert certificates.refresh() is before
    mounted.renew()
    after = certificates.refresh()
    assert after.chain == mounted.certificate.read_bytes() != before.chain
    assert changes == [after]
    assert certificates.refresh() is after


def test_a_broken_version_leaves_the_old_one_and_is_counted_once(mounted, caplog):
    certificates = Certificates(files(mounted))
    before = certificates.current
    write(mounted.key, b"broken")
    for _ in range(5):
        assert certificates.refresh() is before
    assert certificates.num_failures == 1
    (record,) = [record for record in caplog.records if record.levelname == "ERROR"]
    assert "the certificate in use stays as it was: server.tls.key is" in record.getMessage()
    mounted.renew()
    assert certificates.refresh() is not before
    assert certificates.num_failures == 1


def test_files_that_are_replaced_one_after_the_other_are_no_failure(mounted):
    certificates = Certificates(files(mounted))
    issued = mounted.authority.issue_cert("internal.paceline")
    write(mounted.certificate, issued.cert_chain_pems[0].bytes())
    before = certificates.refresh()  # its key is still to come
    write(mounted.key, issued.private_key_pem.bytes())
    assert certificates.refresh().chain != before.chain
    assert certificates.num_failures == 0
