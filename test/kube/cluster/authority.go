package cluster

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"time"
)

// authority signs the certificates of one cluster.
type authority struct {
	dir  string
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
}

// lifetime is that of certificates. Tests last minutes.
const lifetime = 24 * time.Hour

// newAuthority makes an authority, whose certificate is in its directory as ca.crt.
func newAuthority(dir string) (*authority, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	a := &authority{dir: dir, key: key}
	template := a.template(pkix.Name{CommonName: "test cluster"})
	template.IsCA, template.BasicConstraintsValid = true, true
	template.KeyUsage |= x509.KeyUsageCertSign
	raw, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		return nil, err
	}
	if a.cert, err = x509.ParseCertificate(raw); err != nil {
		return nil, err
	}
	return a, os.WriteFile(a.file(), pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: raw}), 0o600)
}

func (a *authority) file() string { return filepath.Join(a.dir, "ca.crt") }

func (a *authority) template(subject pkix.Name) *x509.Certificate {
	return &x509.Certificate{
		SerialNumber: big.NewInt(time.Now().UnixNano()), Subject: subject,
		NotBefore: time.Now().Add(-time.Minute), NotAfter: time.Now().Add(lifetime),
		KeyUsage:    x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth, x509.ExtKeyUsageServerAuth},
	}
}

// issue writes a certificate with its key into one file, as kubelet keeps its own.
func (a *authority) issue(file string, subject pkix.Name, addresses ...net.IP) (string, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return "", err
	}
	template := a.template(subject)
	template.IPAddresses = addresses
	raw, err := x509.CreateCertificate(rand.Reader, template, a.cert, key.Public(), a.key)
	if err != nil {
		return "", err
	}
	private, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		return "", err
	}
	var out bytes.Buffer
	for _, block := range []*pem.Block{{Type: "CERTIFICATE", Bytes: raw}, {Type: "EC PRIVATE KEY", Bytes: private}} {
		if err := pem.Encode(&out, block); err != nil {
			return "", err
		}
	}
	path := filepath.Join(a.dir, file+".pem")
	return path, os.WriteFile(path, out.Bytes(), 0o600)
}
