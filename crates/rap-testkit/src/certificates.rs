//! Certificate authorities and certificates in files.

use std::fs;
use std::path::{Path, PathBuf};

use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair, SanType,
    date_time_ymd,
};

/// An authority. Its certificate is in `file`.
pub struct Authority {
    issuer: Issuer<'static, KeyPair>,
    pub file: PathBuf,
}

impl Authority {
    /// Makes an authority and writes its certificate to `NAME.pem`.
    pub fn new(directory: &Path, name: &str) -> Authority {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        // Otherwise all authorities would have the same name.
        params.distinguished_name.push(DnType::CommonName, name);
        let key = KeyPair::generate().unwrap();
        let file = directory.join(format!("{name}.pem"));
        fs::write(&file, params.self_signed(&key).unwrap().pem()).unwrap();
        Authority { issuer: Issuer::new(params, key), file }
    }

    /// Writes a certificate with these names, for servers and clients, to `FILE.crt` and its key to `FILE.key`. A name is an
    /// address, a URI or a DNS name.
    pub fn certify(&self, directory: &Path, file: &str, names: &[&str]) -> (PathBuf, PathBuf) {
        self.write(directory, file, names, |_| {})
    }

    /// Like [`Authority::certify`], with a certificate that has expired.
    pub fn certify_expired(&self, directory: &Path, file: &str, names: &[&str]) -> (PathBuf, PathBuf) {
        self.write(directory, file, names, |params| {
            params.not_before = date_time_ymd(2020, 1, 1);
            params.not_after = date_time_ymd(2021, 1, 1);
        })
    }

    fn write(
        &self,
        directory: &Path,
        file: &str,
        names: &[&str],
        change: impl FnOnce(&mut CertificateParams),
    ) -> (PathBuf, PathBuf) {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.subject_alt_names = names.iter().map(|name| alternative_name(name)).collect();
        params.extended_key_usages =
            vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        change(&mut params);
        let key = KeyPair::generate().unwrap();
        let certificate = params.signed_by(&key, &self.issuer).unwrap();
        let [cert_file, key_file] = ["crt", "key"].map(|kind| directory.join(format!("{file}.{kind}")));
        fs::write(&key_file, key.serialize_pem()).unwrap();
        fs::write(&cert_file, certificate.pem()).unwrap();
        (cert_file, key_file)
    }
}

fn alternative_name(name: &str) -> SanType {
    if name.contains("://") {
        return SanType::URI(name.try_into().unwrap());
    }
    match name.parse() {
        Ok(ip) => SanType::IpAddress(ip),
        Err(_) => SanType::DnsName(name.try_into().unwrap()),
    }
}
