package pods

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"math/big"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/crust-proxy/crust-proxy/internal/ground/apiserver"
	"github.com/crust-proxy/crust-proxy/test/check"
)

// clientPEM is a certificate and its key in one file, as kubelet keeps its own.
func clientPEM(t *testing.T, serial int64) []byte {
	t.Helper()
	key := check.Value(ecdsa.GenerateKey(elliptic.P256(), rand.Reader))(t)
	cert := &x509.Certificate{
		SerialNumber: big.NewInt(serial), Subject: pkix.Name{CommonName: "system:node:" + thisNode, Organization: []string{"system:nodes"}},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
	}
	der := check.Value(x509.CreateCertificate(rand.Reader, cert, cert, &key.PublicKey, key))(t)
	keyDER := check.Value(x509.MarshalPKCS8PrivateKey(key))(t)
	return append(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}),
		pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: keyDER})...)
}

// TestKubeletsCertificateIsRotated: kubelet moves a link to its new certificate, and never tells anybody. One asks at a
// time: of two handshakes at once client-go reads what it has cached beside its lock, which the race detector sees.
func TestKubeletsCertificateIsRotated(t *testing.T) {
	f := newFakeAPI(t, "data")
	var mu sync.Mutex
	var serial int64
	secure := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		mu.Lock()
		serial = r.TLS.PeerCertificates[0].SerialNumber.Int64()
		mu.Unlock()
		f.ServeHTTP(w, r)
	}))
	secure.TLS = &tls.Config{ClientAuth: tls.RequireAnyClientCert, MinVersion: tls.VersionTLS12}
	secure.EnableHTTP2 = true
	secure.StartTLS()
	t.Cleanup(func() { f.cutWatches(); secure.CloseClientConnections(); secure.Close() })

	dir := t.TempDir()
	current, ca := filepath.Join(dir, "kubelet-client-current.pem"), filepath.Join(dir, "ca.crt")
	write := func(name string, data []byte) string {
		path := filepath.Join(dir, name)
		check.Must(t, os.WriteFile(path, data, 0o600))
		return path
	}
	link := func(target string) {
		check.Must(t, os.Symlink(target, current+".new"))
		check.Must(t, os.Rename(current+".new", current))
	}
	write("ca.crt", pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: secure.Certificate().Raw}))
	link(write("1.pem", clientPEM(t, 1)))
	kubeconfig := write("kubelet.conf", fmt.Appendf(nil, "apiVersion: v1\nkind: Config\ncurrent-context: c\n"+
		"clusters: [{name: c, cluster: {server: %q, certificate-authority: %q}}]\n"+
		"contexts: [{name: c, context: {cluster: c, user: u}}]\n"+
		"users: [{name: u, user: {client-certificate: %[3]q, client-key: %[3]q}}]\n", secure.URL, ca, current))

	config := check.Value((apiserver.Identity{Kubeconfig: kubeconfig}).Config())(t)
	client := check.Value(newAPI(config))(t)
	t.Cleanup(client.close)
	shown := func() int64 {
		secure.CloseClientConnections()
		// A connection that was just closed may still be tried once.
		_ = client.ask(coreGroup, "persistentvolumeclaims").Namespace("default").Name("data").Do(t.Context()).Into(&corev1.PersistentVolumeClaim{})
		mu.Lock()
		defer mu.Unlock()
		return serial
	}
	becomes := func(want int64) {
		t.Helper()
		deadline := time.Now().Add(patient)
		for got := shown(); got != want; got = shown() { // client-go keeps a certificate for a second
			check.Require(t, !time.Now().After(deadline), "certificate %d is shown, not %d", got, want)
		}
	}
	becomes(1)
	link(write("2.pem", clientPEM(t, 2)))
	becomes(2)
}
