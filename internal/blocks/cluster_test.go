package blocks_test

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/crust-proxy/crust-proxy/internal/blocks"
)

// apiServer answers by path.
func apiServer(t *testing.T, answers map[string]string) *blocks.Cluster {
	t.Helper()
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		answer, known := answers[r.URL.Path]
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
	if err := os.WriteFile(config, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	for args, want := range map[[2]string]string{{"", ""}: "shop", {"two", ""}: "default", {"one", "other"}: "other"} {
		c, err := blocks.OpenCluster(config, args[0], args[1])
		if err != nil || c.Namespace != want {
			t.Fatalf("%v: %+v, %v", args, c, err)
		}
	}
	if _, err := blocks.OpenCluster(config, "three", ""); err == nil {
		t.Error("a context that is not there")
	}
	c, err := blocks.OpenCluster(config, "", "")
	if err != nil {
		t.Fatal(err)
	}
	return c
}

const (
	snapshots = "/apis/snapshot.storage.k8s.io/v1/namespaces/shop/volumesnapshots/"
	contents  = "/apis/snapshot.storage.k8s.io/v1/volumesnapshotcontents/"
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
		"/api/v1/namespaces/backup/serviceaccounts/client/token":                  `{"status": {"token": "secret"}}`,
	})
	got, err := c.Snapshot(t.Context(), "ready")
	if err != nil || got.Driver != "d.example.com" || got.ID != "snap-1" {
		t.Errorf("%+v, %v", got, err)
	}
	service, err := c.Service(t.Context(), "d.example.com")
	if err != nil || service.Audience != "a" || service.Address != "h:1" || string(service.CA) != "CA" {
		t.Errorf("%+v, %v", service, err)
	}
	if token, err := c.Token(t.Context(), "backup", "client", "a"); err != nil || token != "secret" {
		t.Errorf("%q, %v", token, err)
	}
	for name, text := range map[string]string{"late": "is not ready", "new": "is not ready", "foreign": "you may not", "missing": "you may not", "climber": "invalid"} {
		if got, err := c.Snapshot(t.Context(), name); err == nil || !strings.Contains(err.Error(), text) {
			t.Errorf("%s: %+v, %v", name, got, err)
		}
	}
	if _, err := c.Token(t.Context(), "backup", "stranger", "a"); !apierrors.IsForbidden(err) || !strings.Contains(err.Error(), "backup/stranger") {
		t.Error(err)
	}
	if _, err := service.Dial(""); err == nil || !strings.Contains(err.Error(), "caCert") {
		t.Error(err)
	}
	if _, err := (&blocks.Service{Address: "nowhere"}).Dial(""); err == nil || !strings.Contains(err.Error(), "HOST:PORT") {
		t.Error(err)
	}
}
