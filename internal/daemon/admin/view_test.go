package admin

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/protobuf/encoding/protojson"

	"github.com/crust-proxy/crust-proxy/pkg/volume"
	adminv1 "github.com/crust-proxy/crust-proxy/proto/crust/admin/v1"
	"github.com/crust-proxy/crust-proxy/test/check"
)

// viewed is a daemon that says what a test wants.
type viewed struct {
	*served
	findings   []string
	begin, end chan struct{} // of a description, unless they are nil
}

func (v *viewed) Describe(_ context.Context, public bool) *adminv1.GetNodeResponse {
	if v.begin != nil {
		v.begin <- struct{}{}
		<-v.end
	}
	if !public {
		return &adminv1.GetNodeResponse{Errors: []string{"do-not-show"}, Findings: []string{"do-not-show"}}
	}
	return &adminv1.GetNodeResponse{NodeName: "node-7", Config: "do-not-show", Findings: v.findings}
}

// viewOf returns the view of a node with that many volumes, and what asks it.
func viewOf(t *testing.T, volumes int) (*viewed, func(path string) *httptest.ResponseRecorder) {
	t.Helper()
	s := &viewed{served: serve(t)}
	for i := range volumes {
		target := fmt.Sprintf("%s/pods/%05d/mount", s.kubelet, i)
		s.handler.volumes = append(s.handler.volumes, &volume.Volume{
			Key: volume.KeyOf(target), Target: target, Handler: "kata", Driver: "<script>alert(1)</script>\u202e", PodUID: "pod",
			MountFlags: []string{"password=hunter2"}, Adopted: true,
		})
	}
	view := (&AdminServer{Node: s.node, Hub: s.hub, Daemon: s, Stopping: s.stopping}).View()
	return s, func(path string) *httptest.ResponseRecorder {
		reply := httptest.NewRecorder()
		view.ServeHTTP(reply, httptest.NewRequestWithContext(t.Context(), http.MethodGet, path, nil))
		return reply
	}
}

// TestViewOfManyVolumes: whatever a node has, an answer is bounded, whole by its pages, and has neither the
// configuration nor mount options.
func TestViewOfManyVolumes(t *testing.T) {
	const many = 10_000
	s, get := viewOf(t, many)
	s.findings = make([]string, 3*mostFindings)
	var node adminv1.NodeView
	check.Must(t, protojson.Unmarshal(get("/v1/node").Body.Bytes(), &node))
	got := node.GetNode()
	check.That(t, got.GetVolumesByState()["adopted"] == many && got.GetConfig() == "" && len(got.GetFindings()) == mostFindings+1, "got %v", got)
	seen, token := 0, ""
	for page := 0; page == 0 || token != ""; page++ {
		reply := get("/v1/volumes?page_token=" + url.QueryEscape(token))
		var list adminv1.ListVolumesResponse
		check.Must(t, protojson.Unmarshal(reply.Body.Bytes(), &list))
		check.Require(t, !strings.Contains(reply.Body.String(), "hunter2") && len(list.GetVolumes()) <= defaultPage,
			"a page of %d volumes, or with mount options", len(list.GetVolumes()))
		seen, token = seen+len(list.GetVolumes()), list.GetNextPageToken()
	}
	check.That(t, seen == many, "the pages have %d volumes", seen)
	page := get("/")
	body := page.Body.String()
	rows := strings.Count(body, "<td>ADOPTED</td>")
	check.That(t, rows == mostRows && strings.Contains(body, "500 of 10000; 10000 adopted") && len(body) <= 1<<20, "%d rows, %d bytes", rows, len(body))
	for _, words := range []string{"hunter2", "do-not-show", "<script", "\u202e", "ZgotmplZ", "http://", "https://", "src=", "style="} {
		check.That(t, !strings.Contains(body, words) && !strings.Contains(get("/v1/node").Body.String(), "do-not-show"), "the page has %q", words)
	}
	policy := page.Header().Get("Content-Security-Policy")
	check.That(t, strings.HasPrefix(policy, "default-src 'none'; style-src 'sha256-"), "policy %q", policy)
}

func TestViewRefuses(t *testing.T) {
	s, get := viewOf(t, 1)
	for path, want := range map[string]int{"/v1/volumes?state=odd": http.StatusBadRequest, "/v1/other": http.StatusNotFound, "/v1/volumes?state=bound": http.StatusOK} {
		check.Equal(t, get(path).Code, want, "%s", path)
	}
	// Readers that are slow take the places of others of their kind, and of nothing else.
	s.begin, s.end = make(chan struct{}, mostViews), make(chan struct{})
	var running sync.WaitGroup
	bodies := make([]string, mostViews)
	for i := range bodies {
		running.Go(func() {
			answer := get("/v1/node")
			for answer.Code == http.StatusTooManyRequests { // the request below had the slot for a moment
				answer = get("/v1/node")
			}
			bodies[i] = answer.Body.String()
		})
	}
	<-s.begin // of one; the others wait for its answer, unless that is too old by then
	check.Eventually(t, "no slot is free", func() bool { return get("/v1/other").Code == http.StatusTooManyRequests })
	check.That(t, len(s.begin) == 0, "%d more are described at the same time", len(s.begin))
	close(s.end)
	running.Wait()
	for _, body := range bodies {
		check.That(t, body == bodies[0] && strings.Contains(body, "node-7"), "not the shared answer: %.100q", body)
	}
}

// slowReader has what a connection's deadline was set to.
type slowReader struct {
	*httptest.ResponseRecorder
	until time.Time
}

func (r *slowReader) SetWriteDeadline(until time.Time) error {
	r.until = until
	return nil
}

// TestViewOfSlowReaders: they lose the connection, and the slot, long before the server's own time for an answer.
func TestViewOfSlowReaders(t *testing.T) {
	s, _ := viewOf(t, 1)
	reader := &slowReader{ResponseRecorder: httptest.NewRecorder()}
	view := (&AdminServer{Node: s.node, Hub: s.hub, Daemon: s, Stopping: s.stopping}).View()
	view.ServeHTTP(reader, httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/", nil))
	left := time.Until(reader.until)
	check.That(t, left > 0 && left <= writeTime, "%v are left", left)
}
