package pods

import (
	"context"
	"encoding/json"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/zap"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"

	"github.com/crust-proxy/crust-proxy/test/check"
)

// TestEventsOfPods: an event is made, and counted when it happens again; an API server that is away or hangs holds up
// nobody, and too many events are dropped.
func TestEventsOfPods(t *testing.T) {
	var mu sync.Mutex
	made, counts, hang := map[string]*corev1.Event{}, map[string]float64{}, false
	api := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		mu.Lock()
		defer mu.Unlock()
		raw, _ := io.ReadAll(r.Body)
		if hang {
			panic(http.ErrAbortHandler)
		}
		w.Header().Set("Content-Type", "application/json")
		name := r.URL.Path[strings.LastIndexByte(r.URL.Path, '/')+1:]
		if r.Method == http.MethodPatch {
			var patch map[string]any
			_ = json.Unmarshal(raw, &patch)
			counts[name], _ = patch["count"].(float64)
			_, _ = w.Write([]byte(`{"kind":"Event","apiVersion":"v1"}`))
			return
		}
		object, _, err := scheme.Codecs.UniversalDeserializer().Decode(raw, nil, nil)
		event, is := object.(*corev1.Event)
		if err != nil || !is || r.URL.Path != "/api/v1/namespaces/shop/events" {
			t.Errorf("%s %s: %v, %T", r.Method, r.URL.Path, err, object)
			return
		}
		if made[event.Name] != nil {
			failWith(w, http.StatusConflict, "events")
			return
		}
		made[event.Name] = event
		w.WriteHeader(http.StatusCreated)
		_, _ = w.Write([]byte(`{"kind":"Event","apiVersion":"v1"}`))
	}))
	defer api.Close()
	client := check.Value(newAPI(&rest.Config{Host: api.URL, QPS: -1}))(t)
	cluster := New(Config{NodeName: "node-a", Log: zap.NewNop()})
	events := NewEvents(cluster)
	events.pause = 0
	refused := Event{Namespace: "shop", Pod: "db-0", UID: "0f0e", Warning: true, Reason: "VolumeRefused", Text: "it must not", Count: 1, Last: time.Unix(9, 0)}
	events.Offer(Event{Namespace: "shop", Pod: "early"}) // no API server is known: it is dropped
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	running.Go(func() { _ = events.Run(ctx) })
	defer running.Wait()
	defer cancel()
	check.Eventually(t, "the first is dropped", func() bool { return len(events.queue) == 0 })
	cluster.server.client.Store(client)
	defer client.close()
	posted := func(pod, reason string, count float64) func() bool {
		return func() bool {
			mu.Lock()
			defer mu.Unlock()
			for name, event := range made {
				if event.InvolvedObject.Name == pod && event.Reason == reason && strings.HasPrefix(name, pod+".") && counts[name] == count {
					return event.Source.Host == "node-a" && (pod != "db-0" ||
						event.InvolvedObject.UID == "0f0e" && event.Type == "Warning" && event.Message == "it must not")
				}
			}
			return false
		}
	}
	events.Offer(refused)
	check.Eventually(t, "the event is made", posted("db-0", "VolumeRefused", 0))
	refused.Count = 2
	events.Offer(refused)
	check.Eventually(t, "the event is counted", posted("db-0", "VolumeRefused", 2))
	long := strings.Repeat("a", mostName-1) + "-" + strings.Repeat("b", 20)
	events.Offer(Event{Namespace: "shop", Pod: long, Reason: "VolumeRefused"})
	check.Eventually(t, "an event of a pod with a long name", func() bool {
		mu.Lock()
		defer mu.Unlock()
		for name, event := range made {
			if event.InvolvedObject.Name == long {
				return len(name) <= 253 && strings.HasPrefix(name, long[:mostName-1]+".")
			}
		}
		return false
	})
	mu.Lock()
	hang = true
	mu.Unlock()
	for range 3 * mostPosts {
		events.Offer(Event{Namespace: "shop", Pod: "web", Text: "dropped"})
	}
	check.Eventually(t, "what cannot be posted is dropped", func() bool { return len(events.queue) == 0 })
	mu.Lock()
	hang = false
	mu.Unlock()
	events.Offer(Event{Namespace: "shop", Pod: "web", Reason: "VolumeRepaired", Text: "claim device"})
	check.Eventually(t, "it goes on", posted("web", "VolumeRepaired", 0))
}
