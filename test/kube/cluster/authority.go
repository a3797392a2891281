package cluster

import (
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

	"k8s.io/client-go/util/cert"
	"k8s.io/client-go/util/keyutil"
)

// authority signs the certificates of one cluster.
type authority struct {
	dir  string
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
}

// newAuthority makes an authority, whose certificate is in its directory as ca.crt.
func newAuthority(dir string) (*authority, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	own, err := cert.NewSelfSignedCACert(cert.Config{CommonName: "test cluster"}, key)
	if err != nil {
		return nil, err
	}
	raw, err := cert.EncodeCertificates(own)
	if err != nil {
		return nil, err
	}
	a := &authority{dir: dir, cert: own, key: key}
	return a, os.WriteFile(a.file(), raw, 0o600)
}

func (a *authority) file() string { return filepath.Join(a.dir, "ca.crt") }

// issue writes a certificate with its key into one file, as kubelet keeps its own.
func (a *authority) issue(file string, subject pkix.Name, addresses ...net.IP) (string, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return "", err
	}
	raw, err := x509.CreateCertificate(rand.Reader, &x509.Certificate{
		SerialNumber: big.NewInt(time.Now().UnixNano()), Subject: subject, IPAddresses: addresses,
		NotBefore: a.cert.NotBefore, NotAfter: a.cert.NotAfter, KeyUsage: x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth, x509.ExtKeyUsageServerAuth},
	}, a.cert, key.Public(), a.key)
	if err != nil {
		return "", err
	}
	private, err := keyutil.MarshalPrivateKeyToPEM(key)
	if err != nil {
		return "", err
	}
	path := filepath.Join(a.dir, file+".pem")
	return path, os.WriteFile(path, append(pem.EncodeToMemory(&pem.Block{Type: cert.CertificateBlockType, Bytes: raw}), private...), 0o600)
}
