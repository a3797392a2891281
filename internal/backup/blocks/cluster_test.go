package blocks_test

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	authenticationv1 "k8s.io/api/authentication/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/client-go/util/cert"

	"github.com/crust-proxy/crust-proxy/internal/backup/blocks"
	"github.com/crust-proxy/crust-proxy/test/check"
)

// apiServer answers by path. It has the audiences.
func apiServer(t *testing.T, answers map[string]string, audiences ...string) *blocks.Cluster {
	t.Helper()
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		answer, known := answers[r.URL.Path]
		if strings.HasSuffix(r.URL.Path, "/token") && known { // for the API server, if no audience is given
			var asked authenticationv1.TokenRequest
			_ = json.NewDecoder(r.Body).Decode(&asked)
			if len(asked.Spec.Audiences) == 0 {
				asked.Spec.Audiences = audiences
			}
			asked.Status.Token = answer
			raw, _ := json.Marshal(asked)
			answer = string(raw)
		}
		if !known {
			w.WriteHeader(http.StatusForbidden)
			answer = `{"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "Forbidden", "code": 403, "message": "you may not"}`
		}
		_, _ = w.Write([]byte(answer))
	}))
	t.Cleanup(server.Close)
	config := filepath.Join(t.TempDir(), "config")
	text := fmt.Sprintf(`{apiVersion: v1, kind: Config, current-context: one, clusters: [{name: c, cluster: {server: "%s"}}],
contexts: [{name: one, context: {cluster: c, namespace: shop}}, {name: two, context: {cluster: c}}]}`, server.URL)
	check.Must(t, os.WriteFile(config, []byte(text), 0o600))
	for args, want := range map[[2]string]string{{"", ""}: "shop", {"two", ""}: "default", {"one", "other"}: "other"} {
		c, err := blocks.OpenCluster(config, args[0], args[1])
		check.Require(t, err == nil && c.Namespace == want, "%v: %+v, %v", args, c, err)
	}
	check.Fails(t, check.Err(blocks.OpenCluster(config, "three", ""))) // a context that is not there
	return check.Value(blocks.OpenCluster(config, "", ""))(t)
}

const (
	clientToken = "/api/v1/namespaces/backup/serviceaccounts/client/token" // #nosec G101 -- a path
	snapshots   = "/apis/snapshot.storage.k8s.io/v1/namespaces/shop/volumesnapshots/"
	contents    = "/apis/snapshot.storage.k8s.io/v1/volumesnapshotcontents/"
)

func TestCluster(t *testing.T) {
	c := apiServer(t, map[string]string{
		snapshots + "ready":   `{"status": {"boundVolumeSnapshotContentName": "content", "readyToUse": true}}`,
		snapshots + "late":    `{"status": {"boundVolumeSnapshotContentName": "content", "readyToUse": false}}`,
		snapshots + "new":     `{}`,
		snapshots + "foreign": `{"status": {"boundVolumeSnapshotContentName": "forbidden", "readyToUse": true}}`,
		snapshots + "climber": `{"status": {"boundVolumeSnapshotContentName": "../../../api/v1/secrets", "readyToUse": true}}`,
		contents + "content":  `{"spec": {"driver": "d.example.com"}, "status": {"snapshotHandle": "snap-1"}}`,
		"/apis/cbt.storage.k8s.io/v1beta1/snapshotmetadataservices/d.example.com": `{"spec": {"audience": "a", "address": "h:1", "caCert": "Q0E="}}`,
		clientToken: "secret",
	}, "https://api", "https://old.api")
	got, err := c.Snapshot(t.Context(), "ready")
	check.That(t, err == nil && got.Driver == "d.example.com" && got.ID == "snap-1", "%+v, %v", got, err)
	for _, end := range []error{nil, io.EOF, status.Error(codes.Unavailable, "away")} { // nil: a message
		source := c.Unchanged(got, "ready", func(context.Context, int64) (blocks.Stream, error) {
			return func() (blocks.Message, error) { return blocks.Message{}, end }, nil
		})
		first, later := check.Value(source(t.Context(), 0))(t), check.Value(source(t.Context(), 0))(t)
		check.Is(t, check.Err(first()), end)
		got.ID = "snap-0" // made anew, before the server looked it up
		check.Fails(t, check.Err(later()), "is another snapshot now")
		check.Is(t, check.Err(first()), end) // which is not looked up for each message
		got.ID = "snap-1"
	}
	check.Equal(t, check.Value(c.Base(t.Context(), "ready", got))(t), "snap-1", "the id of the base")
	check.Fails(t, check.Err(c.Base(t.Context(), "ready", &blocks.Snapshot{Driver: "other"})), "is of driver d.example.com, not of other")
	service, err := c.Service(t.Context(), "d.example.com")
	check.That(t, err == nil && service.Audience == "a" && service.Address == "h:1" && string(service.CA) == "CA", "%+v, %v", service, err)
	check.Equal(t, check.Value(c.Token(t.Context(), "backup", "client", "a"))(t), "secret", "the token")
	for _, own := range []string{"https://api", "https://old.api"} {
		token, err := c.Token(t.Context(), "backup", "client", own)
		check.That(t, err != nil && strings.Contains(err.Error(), "the API server accepts too") && token == "",
			"a token for the API server: %q, %v", token, err)
	}
	for name, text := range map[string]string{"late": "is not ready", "new": "is not ready", "foreign": "you may not", "missing": "you may not", "climber": "invalid"} {
		check.Fails(t, check.Err(c.Snapshot(t.Context(), name)), text)
	}
	_, err = c.Token(t.Context(), "backup", "stranger", "a")
	check.That(t, apierrors.IsForbidden(err) && strings.Contains(err.Error(), "backup/stranger"), "%v", err)
	other := apiServer(t, map[string]string{clientToken: "secret"}, "https://api")
	token, err := other.Token(t.Context(), "backup", "client", "https://api")
	check.That(t, err != nil && token == "", "the first token is for the API server: %q, %v", token, err)
	silent := apiServer(t, map[string]string{clientToken: "secret"})
	token, err = silent.Token(t.Context(), "backup", "client", "a")
	check.That(t, err != nil && strings.Contains(err.Error(), "not known") && token == "", "an API server that does not name its audiences: %q, %v", token, err)
	check.Fails(t, check.Err(service.Dial("")), "caCert")
	check.Fails(t, check.Err((&blocks.Service{Address: "nowhere"}).Dial("")), "HOST:PORT")
}

// TestNoKubeconfigSaysWhatToGive: client-go's words name a variable that nobody is to set.
func TestNoKubeconfigSaysWhatToGive(t *testing.T) {
	t.Setenv("KUBECONFIG", filepath.Join(t.TempDir(), "none"))
	t.Setenv("KUBERNETES_SERVICE_HOST", "")
	check.Fails(t, check.Err(blocks.OpenCluster("", "", "")), "--kubeconfig", "--csi-socket")
}

// TestAWrongCertificateIsToldAtOnce: it does not become right by waiting.
func TestAWrongCertificateIsToldAtOnce(t *testing.T) {
	ours, key, err := cert.GenerateSelfSignedCertKey("127.0.0.1", nil, nil)
	check.Must(t, err)
	theirs, _, err := cert.GenerateSelfSignedCertKey("127.0.0.1", nil, nil)
	check.Must(t, err)
	pair := check.Value(tls.X509KeyPair(ours, key))(t)
	server := httptest.NewUnstartedServer(http.NotFoundHandler())
	server.TLS, server.EnableHTTP2 = &tls.Config{Certificates: []tls.Certificate{pair}, MinVersion: tls.VersionTLS12}, true
	server.StartTLS()
	defer server.Close()
	conn := check.Value((&blocks.Service{Address: server.Listener.Addr().String(), CA: theirs}).Dial(""))(t)
	defer func() { check.Must(t, conn.Close()) }()
	streams := 0
	tokens := func(context.Context) (string, error) { streams++; return "secret", nil }
	reader := &blocks.Reader{Source: blocks.FromService(conn, tokens, "shop", "", "snapshot")}
	err = reader.Read(t.Context(), 0, func(blocks.Message) error { return nil })
	check.That(t, status.Code(err) == codes.Unavailable && blocks.IsCertificate(err) && streams == 1, "%d streams: %v", streams, err)
}
